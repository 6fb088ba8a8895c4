# SPDX-License-Identifier: Apache-2.0
"""Start containers by one engine, on the simulated host that this runs in; print what they saw.

`scenario.py ENGINE [NVIDIA_VISIBLE_DEVICES]`. Standard output is what the probe in the container
printed. Engines are started on private sockets; all of it ends with the simulated host.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
TREE = HERE.parents[1]
BIN = TREE / ".venv" / "bin"
RUNTIME = str(BIN / "gpu-container-runtime")
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
BUSYBOX = "/bin/busybox"
CAPABILITY = "CAP_MKNOD"


def run(
    *command: object, check: bool = True, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run *command*, its output captured; exit with it if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, check=False, **options)  # type: ignore[call-overload]
    if check and done.returncode != 0:
        sys.exit(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def make_root(root: Path) -> None:
    """Make a userland: busybox, the machine's own glibc and loader, the probe twice."""
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "run", "var"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    (root / "bin" / "sh").symlink_to("busybox")
    run("gcc", "-O1", "-o", root / "bin" / "probe", HERE / "probe.c")
    run("gcc", "-O1", "-DNEEDED", "-o", root / "bin" / "needs", HERE / "probe.c", "-lcuda")
    for word in run("ldd", root / "bin" / "probe").stdout.split():
        if word.startswith("/"):
            target = Path(f"{root}{word}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, target)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    # Its own libraries, as an image has them: the merge must leave them alone.
    (root / "sbin").mkdir(exist_ok=True)


def generate(target: str = "/etc/cdi/nvidia.json") -> None:
    """Write the spec that the runtime reads."""
    run(BIN / "gpuruntime", "cdi", "generate", "--output", target)


def make_bundle(work: Path, devices: str, *, fakeproc: bool = True) -> Path:
    """Make a bundle that asks for *devices* and runs both probes."""
    bundle = work / "bundle"
    make_root(bundle / "rootfs")
    run("runc", "spec", "--bundle", bundle)
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    config["process"]["terminal"] = False
    config["process"]["args"] = [
        "/bin/sh",
        "-c",
        "/bin/probe; /bin/needs | /bin/busybox grep needed",
    ]
    config["process"]["env"] = ["PATH=/bin", "MINE=kept", f"NVIDIA_VISIBLE_DEVICES={devices}"]
    config["root"]["readonly"] = False
    for capabilities in config["process"]["capabilities"].values():
        capabilities.append(CAPABILITY)
    path.write_text(json.dumps(config))
    if fakeproc:
        run(sys.executable, SIMHOST, "fakeproc", bundle)
    return bundle


def run_bundle(bundle: Path, runtime: str = RUNTIME, **environment: str) -> str:
    """Create, start and delete the container of *bundle*; return what it printed."""
    out = bundle.parent / "output"
    env = {**os.environ, **environment}
    name = f"scenario-{os.getpid()}"
    with out.open("w") as stream:
        created = subprocess.run(
            [runtime, "create", "--bundle", str(bundle), name],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=env,
            check=False,
        )
    if created.returncode != 0:
        sys.exit(f"create: status {created.returncode}\n{out.read_text()}")
    run(runtime, "start", name, env=env)
    for _ in range(200):
        if json.loads(run(runtime, "state", name, env=env).stdout)["status"] == "stopped":
            break
        time.sleep(0.05)
    run(runtime, "delete", "--force", name, env=env)
    return out.read_text()


def runc_v1(work: Path, devices: str) -> str:
    """Use runc on the machine's own cgroups, version 1."""
    generate()
    return run_bundle(make_bundle(work, devices))


def runc_v2(work: Path, devices: str) -> str:
    """Use runc where /sys/fs/cgroup is cgroup2 alone."""
    generate()
    bundle = make_bundle(work, devices)
    run("umount", "-R", "/sys/fs/cgroup")
    run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    return run_bundle(bundle)


def crun(work: Path, devices: str) -> str:
    """Use crun, named in config.toml, with the cgroups that it can work with."""
    generate()
    bundle = make_bundle(work, devices)
    run("umount", "/sys/fs/cgroup/unified")
    config = work / "config.toml"
    config.write_text('[nvidia-container-runtime]\nruntimes = ["crun"]\n')
    return run_bundle(bundle, GPURUNTIME_CONFIG=str(config))


@contextlib.contextmanager
def daemon(work: Path, *command: object) -> Iterator[None]:
    """Run a daemon; its log is shown if the scenario fails."""
    log = work / "daemon.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=stream, stderr=stream, stdin=subprocess.DEVNULL
        )
    try:
        yield
    except SystemExit:
        sys.stderr.write(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        process.wait(20)


def until(check: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for *check*; exit if it does not come true."""
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            sys.exit("the engine does not answer")
        time.sleep(0.1)


@contextlib.contextmanager
def dockerd(work: Path) -> Iterator[list[str]]:
    """Run a dockerd that knows our runtime and has the image `box`; yield its client's command."""
    settings = work / "daemon.json"
    settings.write_text(json.dumps({"runtimes": {"gpuruntime": {"path": RUNTIME}}}))
    socket = f"unix://{work}/docker.sock"
    client = ["docker", "-H", socket]
    with daemon(
        work, "dockerd", "--config-file", settings, "-H", socket, "--data-root", work / "data",
        "--exec-root", work / "exec", "--pidfile", work / "pid", "--iptables=false",
        "--ip6tables=false", "--bridge=none", "--storage-driver=vfs",
    ):  # fmt: skip
        until(lambda: run(*client, "info", check=False).returncode == 0)
        root = work / "image"
        make_root(root)
        run("tar", "-C", root, "-cf", work / "image.tar", ".")
        run(*client, "import", work / "image.tar", "box")
        yield client


def docker(work: Path, devices: str) -> str:
    """Use a real dockerd: `docker run --runtime`."""
    generate()
    script = "/bin/probe; /bin/needs | /bin/busybox grep needed"
    with dockerd(work) as client:
        return run(
            *client, "run", "--rm", "--network=none", "--runtime=gpuruntime", "-e", "MINE=kept",
            "-e", f"NVIDIA_VISIBLE_DEVICES={devices}", "box", "/bin/sh", "-c", script,
        ).stdout  # fmt: skip


def docker_errors(work: Path, devices: str) -> str:
    """Show what docker's user reads when *devices* cannot be given, and that others still work."""
    generate()
    base = ["run", "--rm", "--network=none", "--runtime=gpuruntime"]
    with dockerd(work) as client:
        bad = run(
            *client,
            *base,
            "-e",
            f"NVIDIA_VISIBLE_DEVICES={devices}",
            "box",
            "/bin/probe",
            check=False,
        )
        os.unlink("/etc/cdi/nvidia.json")
        none = run(
            *client, *base, "-e", "NVIDIA_VISIBLE_DEVICES=0", "box", "/bin/probe", check=False
        )
        plain = run(*client, *base, "box", "/bin/probe")
        return json.dumps({"bad": [bad.returncode, bad.stdout, bad.stderr],
                           "none": [none.returncode, none.stdout, none.stderr],
                           "plain": plain.stdout})  # fmt: skip


def docker_life(work: Path, devices: str) -> str:
    """Restart a container and run a second process in it."""
    generate()
    with dockerd(work) as client:
        run(
            *client, "run", "-d", "--name=life", "--network=none", "--runtime=gpuruntime",
            "-e", f"NVIDIA_VISIBLE_DEVICES={devices}", "box", "/bin/busybox", "sleep", "1000",
        )  # fmt: skip
        first = run(*client, "exec", "life", "/bin/probe").stdout
        changes = run(*client, "diff", "life").stdout
        run(*client, "restart", "-t", "0", "life")
        second = run(*client, "exec", "life", "/bin/probe").stdout
        again = run(*client, "diff", "life").stdout
        run(*client, "rm", "-f", "life")
        return json.dumps({"first": first, "second": second, "diffs": [changes, again]})


def containerd(work: Path, devices: str) -> str:
    """Use a real containerd: `ctr run --runc-binary`."""
    generate()
    settings = work / "containerd.toml"
    settings.write_text(
        f'version = 2\nroot = "{work}/root"\nstate = "{work}/state"\n'
        f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{work}/c.sock"\n'
    )
    make_root(work / "image")
    script = "/bin/probe; /bin/needs | /bin/busybox grep needed"
    client = ["ctr", "-a", f"{work}/c.sock"]
    with daemon(work, "containerd", "-c", settings):
        until(lambda: run(*client, "version", check=False).returncode == 0)
        return run(
            *client, "run", "--rm", "--runc-binary", RUNTIME, "--cap-add", CAPABILITY,
            "--env", "MINE=kept", "--env", f"NVIDIA_VISIBLE_DEVICES={devices}",
            "--rootfs", work / "image", "one", "/bin/sh", "-c", script,
        ).stdout  # fmt: skip


def _podman(work: Path, devices: str, spec: str) -> str:
    generate(spec)
    make_root(work / "image")
    run("umount", "/sys/fs/cgroup/unified")
    script = "/bin/probe; /bin/needs | /bin/busybox grep needed"
    flags = [
        word for name in devices.split(",") for word in ("--device", f"nvidia.com/gpu={name}")
    ]
    return run(
        "podman", "--root", work / "storage", "--runroot", work / "runroot",
        "--tmpdir", work / "tmp",
        "--cgroup-manager=cgroupfs", "--events-backend=none", "run", "--rm", "--network=none",
        "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--cap-add", CAPABILITY,
        "--env", "MINE=kept", *flags, "--rootfs", work / "image", "/bin/sh", "-c", script,
    ).stdout  # fmt: skip


def podman_json(work: Path, devices: str) -> str:
    """Use podman with the spec as JSON, its own reader and injection; of ours only the hook."""
    return _podman(work, devices, "/etc/cdi/nvidia.json")


def podman_yaml(work: Path, devices: str) -> str:
    """Use podman with the spec as YAML."""
    return _podman(work, devices, "/etc/cdi/nvidia.yaml")


SCENARIOS: dict[str, Callable[[Path, str], str]] = {
    f.__name__: f
    for f in (
        runc_v1, runc_v2, crun, docker, docker_errors, docker_life, containerd, podman_json,
        podman_yaml,
    )
}  # fmt: skip


def main() -> None:
    """Run the scenario named on the command line."""
    work = Path(tempfile.mkdtemp(prefix="gpuruntime-scenario-"))
    work.chmod(0o755)
    try:
        sys.stdout.write(SCENARIOS[sys.argv[1]](work, sys.argv[2] if len(sys.argv) > 2 else "1,3"))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
