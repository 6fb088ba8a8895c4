# SPDX-License-Identifier: Apache-2.0
"""The scenarios of `make test-vm`: functions, whose docstrings are the lines that are printed."""

from __future__ import annotations

from vm.guest import RUNTIME, Container, Guest, containerd, docker, podman, require

GPU = ("--env", "NVIDIA_VISIBLE_DEVICES=0")
CDI = ("--device", "nvidia.com/gpu=0")
LINKS = "/dev/char/195:*"
SPEC = "/run/cdi/nvidia.yaml"
OTHER_VERSION = "535.183.01"
# What has systemd, or the engine, set the device rules of a container again.
TRIGGERS = {
    "daemon-reload": "systemctl daemon-reload",
    "daemon-reexec": "systemctl daemon-reexec",
    "set-property": "systemctl set-property --runtime {unit} CPUWeight=90",
    "set-property of the slice": "systemctl set-property --runtime system.slice CPUWeight=90",
    "update": "{update}",
}


# ---- a GPU that survives what systemd does ----


def keeps(guest: Guest, container: Container) -> None:
    """Start *container* and require that it can open its GPU after each trigger, and no other."""
    container.run(guest)
    require(container.opens(guest), f"{container.name}: the GPU cannot be opened at the start")
    unit = container.unit(guest)
    for name, command in TRIGGERS.items():
        if name == "update" and not container.update:
            continue
        guest.run(command.format(unit=unit, update=container.update))
        require(container.opens(guest), f"{container.name}: the GPU is lost after {name}")
    guest.require_healthy()


def loses(guest: Guest, container: Container) -> None:
    """Require that *container*, which can open its GPU, loses it at a daemon-reload."""
    require(container.opens(guest), f"{container.name}: the GPU cannot be opened at the start")
    guest.run("systemctl daemon-reload")
    require(not container.opens(guest), f"{container.name}: the control keeps its GPU")


def docker_runtime(guest: Guest) -> None:
    """Keep a GPU with docker and our runtime, through reload, reexec, set-property and update."""
    keeps(guest, docker("runtime", "--runtime", "gpuruntime", *GPU))


def docker_hook(guest: Guest) -> None:
    """Keep a GPU with `docker run --gpus`, plain runc and our prestart hook."""
    keeps(guest, docker("hook", "--runtime", "runc", "--gpus", "all"))


def containerd_runtime(guest: Guest) -> None:
    """Keep a GPU with containerd and our runtime."""
    keeps(guest, containerd("runtime", *GPU))


def podman_runtime(guest: Guest) -> None:
    """Keep a GPU with podman and our runtime."""
    keeps(guest, podman("runtime", *GPU, runtime=RUNTIME))


def podman_cdi_runc(guest: Guest) -> None:
    """Keep a GPU with podman, runc and a device of our CDI spec."""
    keeps(guest, podman("cdi", *CDI, runtime="runc"))


def podman_cdi_crun(guest: Guest) -> None:
    """Keep a GPU with podman, crun and a device of our CDI spec."""
    keeps(guest, podman("cdi", *CDI, runtime="crun"))


def control_without_links(guest: Guest) -> None:
    """Lose the GPU where our links in /dev/char are missing: a control."""
    guest.run(f"rm {LINKS}")
    container = docker("unlinked", "--runtime", "gpuruntime", *GPU)
    container.run(guest)
    loses(guest, container)


def control_old_grant(guest: Guest) -> None:
    """Lose a GPU that was granted without telling systemd, as old hooks do: a control."""
    container = docker("old", "--runtime", "runc", "--volume", "/dev/nvidia0:/dev/nvidia0")
    container.run(guest)
    require(not container.opens(guest), "the device rules let everything through")
    cgroup = guest.run(f"sed -n 's/^0:://p' /proc/$({container.init})/cgroup")
    guest.run(f"python3 /srv/vm/guest/open_device.py /sys/fs/cgroup{cgroup} 195 0")
    loses(guest, container)


# ---- boot ----


def boot(guest: Guest) -> None:
    """Boot with nodes, links and spec before the engines, and without a failed unit."""
    guest.run("systemctl enable docker.service containerd.service")
    guest.reboot()
    guest.require_healthy()
    guest.run(f"test -c /dev/nvidia0 && test -c /dev/nvidiactl && ls {LINKS} && test -s {SPEC}")
    times = [
        int(guest.run(f"systemctl show --value --property={name}TimestampMonotonic {unit}"))
        for name, unit in (
            ("ExecMainExit", "gpuruntime-nodes.service"),
            ("ExecMainStart", "gpuruntime-cdi-refresh.service"),
            ("ExecMainExit", "gpuruntime-cdi-refresh.service"),
            ("ExecMainStart", "containerd.service"),
            ("ExecMainStart", "docker.service"),
        )
    ]
    require(times[0] > 0 and times == sorted(times), f"started in another order: {times}")
    keeps(guest, docker("booted", "--runtime", "gpuruntime", *GPU))


def boot_without_driver(guest: Guest) -> None:
    """Boot without a driver, without a failed unit; a container starts."""
    guest.run("python3 -B /srv/vm/guest/simulated_driver.py remove")
    guest.reboot()
    guest.require_healthy()
    state = guest.status("systemctl is-system-running")[1]
    require(state == "running", f"the system is {state}")
    require(guest.status(f"ls {SPEC} /dev/nvidia*")[0] != 0, "there are nodes, or a spec")
    guest.run("docker run --rm --network none --runtime gpuruntime busybox:local true")


def boot_with_other_driver(guest: Guest) -> None:
    """Boot with another driver: a new spec, and a restarted container has its GPU again."""
    container = docker("kept", "--runtime", "gpuruntime", "--restart", "always", *GPU)
    container.run(guest)
    guest.run(f"python3 -B /srv/vm/guest/simulated_driver.py install {OTHER_VERSION}")
    guest.run("systemctl enable docker.service")
    guest.reboot()
    guest.require_healthy()
    guest.run(f"grep -q {OTHER_VERSION} {SPEC}")
    guest.wait_until(f"{container.execute} true", "the container runs again")
    require(container.opens(guest), "the GPU cannot be opened")
    libraries = guest.run(f"{container.execute} ls /usr/lib/x86_64-linux-gnu")
    require(
        f"libcuda.so.{OTHER_VERSION}" in libraries, f"libraries of another driver: {libraries}"
    )


def timer(guest: Guest) -> None:
    """Write no spec by the timer while nothing has changed, and one that is gone again."""
    identity = f"stat --format='%i %Y %Z' {SPEC}"
    before = guest.run(identity)
    guest.run("systemctl start gpuruntime-cdi-refresh.service")
    require(guest.run(identity) == before, "the spec was written again")
    enabled = guest.run(
        "systemctl is-active gpuruntime-cdi-refresh.timer gpuruntime-cdi-refresh.path"
    )
    require(enabled == "active\nactive", f"timer and path unit are {enabled}")
    guest.run(f"rm {SPEC}")
    guest.wait_until(f"test -s {SPEC}", "the timer has the spec written")


def units(guest: Guest) -> None:
    """Have systemd verify our units and rate their exposure."""
    names = guest.run("cd /usr/lib/systemd/system && ls gpuruntime-*").split()
    text = guest.run(f"systemd-analyze verify {' '.join(names)} 2>&1")
    require(not [line for line in text.splitlines() if "gpuruntime" in line], text)
    for name, limit in (("gpuruntime-cdi-refresh", 2.0), ("gpuruntime-nodes", 5.0)):
        line = guest.run(f"systemd-analyze security {name}.service | tail -n 1")
        exposure = float(line.split(":")[1].split()[0])
        require(exposure <= limit, f"{name}: exposure {exposure}, at most {limit}")


# ---- upgrade and removal ----


def upgrade(guest: Guest) -> None:
    """Upgrade while a container runs: it keeps its GPU, and units are reloaded."""
    container = docker("old", "--runtime", "gpuruntime", *GPU)
    container.run(guest)
    guest.run("dpkg -i /srv/vm/packages/new/*.deb", limit_s=600)
    guest.require_healthy()
    require(container.opens(guest), "the container has lost its GPU")
    stale = guest.run("systemctl show --property=NeedDaemonReload 'gpuruntime-*' | sort -u")
    require("yes" not in stale, "units are not reloaded")
    guest.run("systemctl start gpuruntime-cdi-refresh.service")
    keeps(guest, docker("new", "--runtime", "gpuruntime", *GPU))
    require(container.opens(guest), "the container has lost its GPU")


def removal(guest: Guest) -> None:
    """Remove while a container runs: it keeps its GPU, docker restarts, a purge leaves no file."""
    container = docker("old", "--runtime", "gpuruntime", *GPU)
    container.run(guest)
    guest.run("gpuruntime runtime configure --runtime docker --undo")
    guest.run("apt-get -y remove gpuruntime gpuruntime-nvidia-compat", limit_s=600)
    guest.require_healthy()
    require(container.opens(guest), "the container has lost its GPU")
    guest.run("systemctl restart docker")
    guest.require_healthy()
    guest.run("apt-get -y purge gpuruntime gpuruntime-nvidia-compat", limit_s=600)
    guest.require_healthy()
    left = guest.run(
        "find /etc /usr /var/lib /run -xdev -name '*gpuruntime*' -not -path '/var/lib/docker/*'"
    )
    require(not left, f"left: {left}")


SCENARIOS = (
    docker_runtime, docker_hook, containerd_runtime, podman_runtime, podman_cdi_runc,
    podman_cdi_crun, control_without_links, control_old_grant,
    boot, boot_without_driver, boot_with_other_driver, timer, units, upgrade, removal,
)  # fmt: skip
