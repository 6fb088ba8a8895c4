# SPDX-License-Identifier: Apache-2.0
"""The scenarios of `make test-vm`: functions, whose docstrings are the lines that are printed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator

import artefacts
from vm.guest import (
    GPU,
    RUNTIME,
    Container,
    Guest,
    Running,
    Scenario,
    containerd,
    docker,
    pod,
    podman,
    require,
)

REQUEST = ("--env", "NVIDIA_VISIBLE_DEVICES=0")
CDI = ("--device", "nvidia.com/gpu=0")
LINKS = "/dev/char/195:*"
SPEC = "/run/cdi/nvidia.yaml"
OTHER_VERSION = "535.183.01"
REFRESH = "gpuruntime-cdi-refresh"
NODES = "gpuruntime-nodes.service"
UNITS = (
    NODES, f"{REFRESH}.service", f"{REFRESH}.path", f"{REFRESH}.timer",
)  # fmt: skip
RELOAD = "systemctl daemon-reload"
# The journal's identifiers of the messages about a unit (systemd.journal-fields, sd-messages.h).
STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
STARTED = "39f53479d3a045ac8e11786248231fbf"
# After each of them systemd, or the engine, sets the device rules of a container again.
TRIGGERS = (
    RELOAD,
    "systemctl daemon-reexec",
    "systemctl set-property --runtime {unit} CPUWeight=90",
    "systemctl set-property --runtime {slice} CPUWeight=90",
    "{update}",
    RELOAD,
)


# ---- a GPU that survives what systemd does ----


def keeps(guest: Guest, container: Container) -> Running:
    """Start *container* and require that it can open its GPU after each trigger, and no other."""
    running = container.run(guest)
    require(running.has_gpu(), f"{container.name}: the GPU cannot be opened at the start")
    still_keeps(running)
    return running


def still_keeps(running: Running) -> None:
    """Require that the container can open its GPU after each trigger, and no other."""
    name = running.container.name
    for command in triggers(running):
        require(running.has_gpu(command), f"{name}: the GPU is lost after {command}")
    require(running.executes(), f"{name}: a process that is started later cannot open the GPU")
    running.guest.require_healthy()


def triggers(running: Running) -> list[str]:
    """Return the commands of TRIGGERS for the container."""
    update = running.container.update or "true"
    return [
        trigger.format(unit=running.unit, slice=running.slice, update=update)
        for trigger in TRIGGERS
    ]


def loses(running: Running) -> None:
    """Require that the container can open its GPU and loses it at one of TRIGGERS: a control."""
    name = running.container.name
    require(running.has_gpu(), f"{name}: the GPU cannot be opened at the start")
    is_lost = any(not running.has_gpu(command) for command in triggers(running))
    require(is_lost, f"{name}: the control keeps its GPU")


def keeps_by_links(
    guest: Guest, container: Callable[..., Container], name: str, *options: str, **more: str
) -> None:
    """Keep a GPU, and lose it in a container of the same kind without our links in /dev/char.

    With a newer runc the second container keeps its GPU, too.
    """
    keeps(guest, container(name, *options, **more))
    with no_links(guest):
        unlinked = container(f"{name}-unlinked", *options, **more).run(guest)
        if needs_links(guest):
            loses(unlinked)
        else:
            require(unlinked.has_gpu(RELOAD), f"{name}: the GPU is lost without our links")


def needs_links(guest: Guest) -> bool:
    """Return whether runc omits a device that has no path in /dev/char, as before 1.1.7."""
    return version_of(guest, "runc") < [1, 1, 7]


def version_of(guest: Guest, program: str) -> list[int]:
    """Return the version of runc or crun."""
    version = guest.run(f"{program} --version").split()[2]
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


@contextlib.contextmanager
def no_links(guest: Guest) -> Iterator[None]:
    """Have no links of ours in /dev/char within the context."""
    aside = "/run/char"
    guest.run(f"mkdir -p {aside} && mv {LINKS} {aside}")
    yield
    guest.run(f"mv {aside}/* /dev/char")


def docker_runtime(guest: Guest) -> None:
    """Keep a GPU with docker and our runtime; lose it without our links."""
    keeps_by_links(guest, docker, "docker-runtime", "--runtime", "gpuruntime", *REQUEST)


def docker_gpus(guest: Guest) -> None:
    """Keep a GPU with `docker run --gpus` and plain runc, with and without our links."""
    options = ("--runtime", "runc", "--gpus", "device=0")
    keeps(guest, docker("docker-gpus", *options))
    with no_links(guest):
        unlinked = docker("docker-gpus-unlinked", *options).run(guest)
        require(unlinked.has_gpu(RELOAD), "the GPU is lost without our links")


def docker_old_grant(guest: Guest) -> None:
    """Lose a GPU that was granted to a docker container without telling systemd: a control."""
    running = docker("docker-old-grant", "--runtime", "runc", "--volume", f"{GPU}:{GPU}").run(
        guest
    )
    require(not running.has_gpu(), "the GPU can be opened without a grant")
    guest.run(f"python3 /srv/vm/guest/open_device.py {running.cgroup} 195 0")
    loses(running)


def docker_cdi(guest: Guest) -> None:
    """Keep a GPU with docker, plain runc and a CDI device."""
    keeps_by_links(guest, docker, "docker-cdi", "--runtime", "runc", *CDI)


def containerd_runtime(guest: Guest) -> None:
    """Keep a GPU with containerd and our runtime; lose it without our links."""
    keeps_by_links(guest, containerd, "containerd-runtime", *REQUEST)


def pod_runtime(guest: Guest) -> None:
    """Keep a GPU in a pod with our runtime; lose it without our links."""
    keeps_by_links(guest, pod, "pod-runtime", "gpuruntime", REQUEST[1])


def pod_cdi(guest: Guest) -> None:
    """Keep a GPU in a pod with plain runc and a CDI device."""
    keeps_by_links(guest, pod, "pod-cdi", "runc", CDI[1])


def podman_runtime(guest: Guest) -> None:
    """Keep a GPU with podman and our runtime; lose it without our links."""
    keeps_by_links(guest, podman, "podman-runtime", *REQUEST, runtime=RUNTIME)


def podman_cdi_runc(guest: Guest) -> None:
    """Keep a GPU with podman, runc and a CDI device; lose it without our links."""
    keeps_by_links(guest, podman, "podman-cdi-runc", *CDI, runtime="runc")


def podman_cdi_crun(guest: Guest) -> None:
    """Keep a GPU with podman, crun and a CDI device, with and without our links."""
    container = podman("podman-cdi-crun", *CDI, runtime="crun")
    running = keeps(guest, dataclasses.replace(container, update=""))
    # That of Debian 13 sets the rules without those of the device.
    is_kept = version_of(guest, "crun") < [1, 21]
    require(running.has_gpu(container.update) == is_kept, f"{container.update}: {not is_kept}")
    with no_links(guest):
        unlinked = podman("podman-cdi-crun-unlinked", *CDI, runtime="crun").run(guest)
        require(unlinked.has_gpu(RELOAD), "the GPU is lost without our links")


# ---- boot ----


def boot(guest: Guest) -> None:
    """Boot with nodes, links and spec before the engines; a restarted container has its GPU."""
    container = docker("restarted", "--runtime", "gpuruntime", "--restart", "always", *REQUEST)
    container.run(guest)
    guest.reboot()
    guest.require_healthy()
    guest.run(f"test -c /dev/nvidia0 && test -c /dev/nvidiactl && ls {LINKS} && test -s {SPEC}")
    events = (
        (NODES, STARTED),
        (f"{REFRESH}.service", STARTING),
        (f"{REFRESH}.service", STARTED),
        ("containerd.service", STARTING),
        ("docker.service", STARTING),
    )
    order = first_events(guest, {unit for unit, _ in events})
    missing = [event for event in events if event not in order]
    require(not missing, f"not in the journal: {missing}")
    positions = [order.index(event) for event in events]
    require(positions == sorted(positions), f"started in another order: {order}")
    still_keeps(restarted(guest, container))


def first_events(guest: Guest, unit_names: set[str]) -> list[tuple[str, str]]:
    """Return in which order *unit_names* were first starting, and first started, since the boot.

    The timer runs the units again, so that systemd's properties may have the time of a later run.
    """
    matches = [f"MESSAGE_ID={message}" for message in (STARTING, STARTED)]
    matches += [f"UNIT={name}" for name in sorted(unit_names)]
    text = guest.run(f"journalctl --boot --output json {' '.join(matches)}")
    entries = [json.loads(line) for line in text.splitlines()]
    return list(dict.fromkeys((entry["UNIT"], entry["MESSAGE_ID"]) for entry in entries))


def restarted(guest: Guest, container: Container) -> Running:
    """Return *container* as its engine has started it again after a boot, with its GPU."""
    guest.wait_until(f"{container.execute} true", "the container runs again")
    running = container.running(guest)
    require(running.has_gpu(), "the container that is started at boot has no GPU")
    return running


def boot_without_driver(guest: Guest) -> None:
    """Boot without a driver, without a failed unit; use a driver that is loaded later."""
    guest.run("python3 -B /srv/vm/guest/simulated_driver.py remove")
    guest.reboot()
    guest.require_healthy()
    state = guest.status("systemctl is-system-running")[1]
    require(state == "running", f"the system is {state}")
    require(guest.status(f"ls {SPEC} /dev/nvidia*")[0] != 0, "there are nodes, or a spec")
    active = guest.status(f"systemctl is-active {' '.join(UNITS)}")[1].split()
    require(set(active) == {"inactive"}, f"units without a driver are {active}")
    guest.run("docker run --rm --network none --runtime gpuruntime busybox:local true")
    guest.run(
        f"cd /srv/vm/guest && python3 -B simulated_driver.py install {artefacts.DEFAULT_VERSION}"
        " && python3 -B simulated_driver.py load && python3 -B simulated_driver.py insert"
    )
    guest.wait_until(f"test -s {SPEC} && test -c {GPU}", "udev has the units started")
    active = guest.status(f"systemctl is-active {' '.join(UNITS[2:])}")[1].split()
    require(active == ["active", "active"], f"path unit and timer are {active}")
    guest.require_healthy()


def boot_with_other_driver(guest: Guest) -> None:
    """Boot with another driver: a new spec; a restarted container has the new libraries."""
    container = docker("restarted", "--runtime", "gpuruntime", "--restart", "always", *REQUEST)
    container.run(guest)
    guest.run(f"python3 -B /srv/vm/guest/simulated_driver.py install {OTHER_VERSION}")
    guest.reboot()
    guest.require_healthy()
    guest.run(f"grep -q {OTHER_VERSION} {SPEC}")
    restarted(guest, container)
    libraries = guest.run(f"{container.execute} ls /usr/lib/x86_64-linux-gnu")
    require(
        f"libcuda.so.{OTHER_VERSION}" in libraries, f"libraries of another driver: {libraries}"
    )


def timer(guest: Guest) -> None:
    """Compare and do no more while nothing has changed; have the timer write a missing spec."""
    identity = f"stat --format='%i %Y %Z' {SPEC} /run/gpuruntime/*"
    guest.run(f"systemctl start {REFRESH}.service")
    before = guest.run(identity)
    nodes = show(guest, NODES, "InvocationID")
    guest.run(f"systemctl start {REFRESH}.service")
    result = show(guest, f"{REFRESH}.service", "Result")
    require(result == "exec-condition", f"a refresh while nothing had changed: {result}")
    require(guest.run(identity) == before, "a file was written while nothing had changed")
    require(show(guest, NODES, "InvocationID") == nodes, f"{NODES} ran while nothing had changed")
    active = guest.run(f"systemctl is-active {REFRESH}.timer {REFRESH}.path")
    require(active == "active\nactive", f"timer and path unit are {active}")
    guest.run(f"rm {SPEC}")
    guest.wait_until(f"test -s {SPEC}", "the timer has the spec written")
    require(show(guest, NODES, "InvocationID") != nodes, f"{NODES} did not run after a change")
    guest.require_healthy()


def show(guest: Guest, unit: str, name: str) -> str:
    """Return the property *name* of *unit*."""
    return guest.run(f"systemctl show --value --property={name} {unit}")


def units(guest: Guest) -> None:
    """Have systemd verify the units and rate their exposure."""
    text = guest.run(f"systemd-analyze verify {' '.join(UNITS)} 2>&1")
    require(not [line for line in text.splitlines() if "gpuruntime" in line], text)
    for name, limit in ((REFRESH, 1.5), ("gpuruntime-nodes", 5.0)):
        line = guest.run(f"systemd-analyze security {name}.service | tail -n 1")
        exposure = float(line.split(":")[1].split()[0])
        require(exposure <= limit, f"{name}: exposure {exposure}, at most {limit}")


# ---- upgrade and removal ----


def upgrade(guest: Guest) -> None:
    """Upgrade: a container keeps its GPU, units are reloaded, and none fails at any time."""
    running = docker("old", "--runtime", "gpuruntime", *REQUEST).run(guest)
    require(running.has_gpu("dpkg -i /srv/vm/packages/new/*.deb"), "the GPU is lost")
    guest.require_healthy()
    stale = guest.run(f"systemctl show --value --property=NeedDaemonReload {' '.join(UNITS)}")
    require(set(stale.split()) == {"no"}, f"units to be reloaded: {stale}")
    active = guest.run(f"systemctl is-active {' '.join(UNITS[2:])}")
    require(active == "active\nactive", f"path unit and timer are {active}")
    guest.run(f"systemctl start {REFRESH}.service")
    require_none_failed(guest)
    require(running.has_gpu(RELOAD), "the GPU is lost after a daemon-reload")
    newer = docker("new", "--runtime", "gpuruntime", *REQUEST).run(guest)
    require(newer.has_gpu(RELOAD), "a container that is started afterwards has no GPU")


def removal(guest: Guest) -> None:
    """Remove and purge: a container keeps its GPU, docker restarts, no file or unit is left."""
    running = docker("old", "--runtime", "gpuruntime", *REQUEST).run(guest)
    for command in (
        "gpuruntime runtime configure --runtime docker --undo",
        "gpuruntime runtime configure --runtime containerd --undo",
        "apt-get -y remove gpuruntime gpuruntime-nvidia-compat",
        RELOAD,
    ):
        require(running.has_gpu(command), f"the GPU is lost after {command}")
        guest.require_healthy()
    loaded = guest.run(f"systemctl show --value --property=LoadState {' '.join(UNITS)}").split()
    require(set(loaded) == {"not-found"}, f"units that are removed are {loaded}")
    for command in (
        "systemctl restart containerd docker",
        "apt-get -y purge gpuruntime gpuruntime-nvidia-compat",
    ):
        guest.run(command)
        guest.require_healthy()
    require_none_failed(guest)
    # The drop-ins are those of the simulated driver.
    remaining = guest.run(
        "find /etc /usr /var/lib /run -xdev -name '*gpuruntime*' -not -path '/var/lib/docker/*'"
        " -not -path '/etc/systemd/system/*.service.d'"
    )
    require(not remaining, f"after the purge there is: {remaining}")


def require_none_failed(guest: Guest) -> None:
    """Raise ScenarioError if one of our units has failed since the boot."""
    units_options = " ".join(f"--unit {unit}" for unit in UNITS)
    _, text = guest.status(f"journalctl --boot --no-pager {units_options} | grep -i fail")
    require(not text, f"a unit has failed:\n{text}")


# They leave behind containers alone, so that they can be played in one machine.
SHARING: tuple[Scenario, ...] = (
    units, timer, docker_runtime, docker_gpus, docker_old_grant, containerd_runtime, pod_runtime,
    podman_runtime, podman_cdi_runc, podman_cdi_crun, docker_cdi, pod_cdi,
)  # fmt: skip
OTHERS: tuple[Scenario, ...] = (
    boot, boot_without_driver, boot_with_other_driver, upgrade, removal,
)  # fmt: skip
# docker 20.10 and containerd 1.6 know no CDI devices.
NEWER_ENGINES = (docker_cdi, pod_cdi)
SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "bookworm": (*(s for s in SHARING if s not in NEWER_ENGINES), *OTHERS),
    "trixie": (*SHARING, *OTHERS),
}
