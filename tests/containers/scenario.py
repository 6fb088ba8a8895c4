# SPDX-License-Identifier: Apache-2.0
"""`scenario.py NAME [DEVICES]`: play one scenario on the simulated host that this runs in.

Prints one JSON object. Everything is below a file system of its own, which goes with the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import image
import machine
from drivers import BIN, Bundle, Containerd, Docker, FailedError, Podman, run

WORK = Path("/run/gpuruntime-test")
SPEC = "/etc/cdi/nvidia.json"
# The simulation's own files; and what the runtime keeps for itself: its config file, compiled.
KNOWN = (Path("/run/simhost"), Path("/run/gpuruntime"))

take = partial(machine.of_host, WORK, *KNOWN)


@contextlib.contextmanager
def nothing_left(found: dict[str, Any]) -> Iterator[None]:
    """Put what differs on the host after the context into *found*."""
    # The low-level runtimes make these at their first container, and keep them.
    for name in ("runc", "crun"):
        Path("/run", name).mkdir(mode=0o700, exist_ok=True)
    before = take()
    yield
    found["left"] = machine.differences(before, take)


def compare(engine: Any, devices: str) -> dict[str, Any]:
    """Run the same container without us and with us, asking for *devices* and for nothing."""
    # These come first: what an engine makes for itself at its first container is there then.
    found = {
        "plain": engine.run(devices, plain=True),
        "plain_unasked": engine.run(None, plain=True),
    }
    with nothing_left(found):
        found["asked"] = engine.run(devices)
        found["unasked"] = engine.run(None)
    return found


def runc_v1(devices: str) -> dict[str, Any]:
    """Use runc on cgroup version 1."""
    restrict_a_node()
    generate()
    return compare(Bundle(WORK), devices)


def separate_hooks(devices: str) -> dict[str, Any]:
    """Use runc with a spec that has one hook a step."""
    generate(SPEC, "--separate-hooks")
    return compare(Bundle(WORK), devices)


def runc_v2(devices: str) -> dict[str, Any]:
    """Use runc where /sys/fs/cgroup is cgroup2 alone."""
    restrict_a_node()
    generate()
    run("umount", "--recursive", "/sys/fs/cgroup")
    run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    return compare(Bundle(WORK), devices)


def crun(devices: str) -> dict[str, Any]:
    """Use crun, named in config.toml."""
    generate()
    without_unified()
    return compare(Bundle(WORK, "crun"), devices)


def docker(devices: str) -> dict[str, Any]:
    """Use dockerd with `docker run --runtime`."""
    generate()
    engine = Docker(WORK)
    with engine.started():
        return compare(engine, devices)


def docker_refused(devices: str) -> dict[str, Any]:
    """Ask docker for *devices*, which cannot be given, and for a GPU where there is no spec."""
    generate()
    engine = Docker(WORK)
    bundle = Bundle(WORK)
    started = WORK / "started"
    started.mkdir()
    found: dict[str, Any] = {"refused": {}}

    def attempt(name: str, wanted: str | None) -> None:
        words = [*engine.words(wanted), "--volume", f"{started}:/started", "--name", name]
        script = f"echo > /started/{name}; echo ran"
        done = engine.client("run", *words, image.NAME, "/bin/sh", "-c", script, check=False)
        state = engine.client("inspect", "--format={{.State.Status}}", name).stdout.strip()
        engine.client("rm", name)
        answer = {
            "status": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
            "state": state,
            "started": (started / name).exists(),
        }
        if wanted is not None:
            direct = bundle.create(wanted)
            answer["direct"] = [direct.returncode, direct.stdout, direct.stderr]
        found["refused"][name] = answer

    with engine.started():
        # Engines and their shims come up at the first container.
        engine.run(None, plain=True)
        with nothing_left(found):
            attempt("none-such", devices)
            attempt("good", "0")
            with without_spec():
                attempt("no-spec", "0")
                attempt("plain", None)
    return found


def docker_life(devices: str) -> dict[str, Any]:
    """Run further processes in one container, and restart it."""
    generate()
    engine = Docker(WORK)
    with engine.started():
        engine.run(None, plain=True)
        found: dict[str, Any] = {}
        with nothing_left(found):
            sleep = ["/bin/busybox", "sleep", "1000"]
            engine.client("run", "-d", "--name=life", *engine.words(devices), image.NAME, *sleep)
            found["before"] = engine.client("exec", "life", *image.LOOK).stdout
            found["changed before"] = engine.client("diff", "life").stdout.splitlines()
            engine.client("restart", "-t", "0", "life")
            found["after"] = engine.client("exec", "life", *image.LOOK).stdout
            found["changed after"] = engine.client("diff", "life").stdout.splitlines()
            engine.client("rm", "-f", "life")
        return found


def docker_waits(devices: str) -> dict[str, Any]:
    """Leave a container running, say so, and wait to be killed."""
    generate()
    engine = Docker(WORK)
    with engine.started():
        sleep = ["/bin/busybox", "sleep", "1000"]
        engine.client("run", "-d", "--name=life", *engine.words(devices), image.NAME, *sleep)
        print(json.dumps({"namespace": os.readlink("/proc/self/ns/pid")}), flush=True)
        time.sleep(1000)
    return {}


def containerd(devices: str) -> dict[str, Any]:
    """Use containerd with `ctr run --runc-binary`."""
    generate()
    engine = Containerd(WORK)
    with engine.started():
        return compare(engine, devices)


def podman(devices: str, spec: str = SPEC) -> dict[str, Any]:
    """Use `podman run --device`, with *spec* as generated."""
    generate(spec)
    without_unified()
    engine = Podman(WORK)
    with engine.started():
        return compare(engine, devices)


SCENARIOS = {
    "runc-v1": runc_v1,
    "runc-v2": runc_v2,
    "separate-hooks": separate_hooks,
    "crun": crun,
    "docker": docker,
    "docker-refused": docker_refused,
    "docker-life": docker_life,
    "docker-waits": docker_waits,
    "containerd": containerd,
    "podman-json": podman,
    "podman-yaml": partial(podman, spec="/etc/cdi/nvidia.yaml"),
}


def generate(target: str = SPEC, *options: str) -> None:
    """Write the CDI spec of the simulated host."""
    run(BIN / "gpuruntime", "cdi", "generate", "--output", target, *options)


@contextlib.contextmanager
def without_spec() -> Iterator[None]:
    """Have no CDI spec in the context."""
    # Not a name that is read.
    aside = f"{SPEC}.aside"
    os.rename(SPEC, aside)
    yield
    os.rename(aside, SPEC)


def without_unified() -> None:
    """Take away the hierarchy of version 2 on a hybrid host, which crun would use instead."""
    if os.path.ismount("/sys/fs/cgroup/unified"):
        run("umount", "/sys/fs/cgroup/unified")


def restrict_a_node() -> None:
    """Have a node of another mode, as the driver's parameter NVreg_DeviceFileMode makes it."""
    os.chmod("/dev/nvidia-modeset", 0o640)


def host_nodes() -> dict[str, list[str]]:
    """Return numbers, mode and owner of the host's GPU nodes, as the probe prints them."""
    found = {}
    for entry in [*os.scandir("/dev"), *os.scandir("/dev/dri")]:
        if entry.name.startswith(("nvidia", "card", "renderD")) and not entry.is_dir():
            status = entry.stat(follow_symlinks=False)
            numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            owner = f"{status.st_uid}:{status.st_gid}"
            found[entry.path] = [numbers, f"{status.st_mode & 0o7777:o}", owner]
    return found


def main(scenarios: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Play the one of *scenarios* that the command line names."""
    if "SIMHOST" not in os.environ:
        sys.exit("scenario: run this on the simulated host: simhost.py run -- scenario.py NAME")
    # Where Debian has the daemons, and not everybody's PATH.
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    WORK.mkdir()
    run("mount", "-t", "tmpfs", "-o", "mode=755", "work", WORK)
    try:
        found = scenarios[sys.argv[1]](*sys.argv[2:])
    except FailedError as error:
        sys.exit(f"scenario: {error}")
    found["namespace"] = os.readlink("/proc/self/ns/pid")
    found["host"] = host_nodes()
    print(json.dumps(found))


if __name__ == "__main__":
    main(SCENARIOS)
