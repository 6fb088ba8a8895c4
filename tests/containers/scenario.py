# SPDX-License-Identifier: Apache-2.0
"""`scenario.py NAME [DEVICES]`: play one scenario on this simulated host.

Prints one JSON object. All files are in a tmpfs that ends with the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import image
import machine
from drivers import (
    BIN,
    CAPABILITY,
    FIRST_ID,
    OURS,
    TREE,
    Bundle,
    Containerd,
    Docker,
    FailedError,
    Podman,
    RuntimePodman,
    make_rootless,
    open_to_others,
    run,
)
from ways import (
    CRUN,
    DOCKER,
    FEW,
    HOOK_PATH,
    LEGACY,
    LEGACY_WAYS,
    MODE,
    REFUSED,
    WAYS,
    Way,
)

WORK = Path("/run/gpuruntime-test")
SPEC = "/etc/cdi/nvidia.json"
CONFIG = Path("/etc/gpuruntime/config.toml")
CDI_HOOK = "nvidia-ctk.path"
# Options of `cdi generate` for the specs of the ways.
SPEC_OPTIONS: tuple[tuple[str, ...], ...] = ((), ("--separate-hooks",))
WITH_CRUN = {"nvidia-container-runtime.runtimes": ["crun"]}
# The files of the simulation, and the compiled configuration that the runtime caches.
KNOWN = (Path("/run/simhost"), Path("/run/gpuruntime"))

take = partial(machine.of_host, WORK, *KNOWN)


@contextlib.contextmanager
def nothing_left(results: dict[str, Any]) -> Iterator[None]:
    """Add the differences on the host after the context to *results*."""
    # The low-level runtimes create these at their first container and keep them.
    for name in ("runc", "crun"):
        Path("/run", name).mkdir(mode=0o700, exist_ok=True)
    before = take()
    yield
    results["left"] = [*results.get("left", ()), *machine.differences(before, take)]


def compare(engine: Any, devices: str) -> dict[str, Any]:
    """Run a container that requests *devices*, without and with our runtime."""
    # First: the engine creates its own files at its first container.
    results = {"plain": engine.run(devices, plain=True)}
    with nothing_left(results):
        results["asked"] = engine.run(devices)
    return results


def go_all(engine: Any, names: Iterable[str], **config: object) -> dict[str, Any]:
    """Run a container for each of *names* in WAYS, with *config* in each config.toml."""
    # First, as in `compare`.
    results: dict[str, Any] = {"plain": engine.run("1,3", plain=True), "ways": {}}
    prepare_host()
    with nothing_left(results):
        for name in names:
            way = WAYS[name]
            with host_of(way, **config):
                results["ways"][name] = engine.run(way.devices, more=way.more)
    return results


def runc_v1() -> dict[str, Any]:
    """Use runc with cgroup version 1, whose device rules differ."""
    restrict_a_node()
    return go_all(Bundle(WORK), FEW)


def runc_v2() -> dict[str, Any]:
    """Use runc where /sys/fs/cgroup is cgroup2."""
    restrict_a_node()
    cgroup2_alone()
    return go_all(Bundle(WORK), WAYS)


def emulated(emulator: str, launcher: str) -> dict[str, Any]:
    """Use runc, and a *launcher* of another architecture as the runtime and as the hook.

    The result "called" has the names under which it was started.
    """
    cgroup2_alone()
    called = WORK / "called"
    programs = {}
    for name in ("gpu-container-runtime", "gpu-cdi-hook"):
        path = WORK / name
        path.write_text(
            f'#!/bin/sh\necho {name} >> {called}\nexec {emulator} -0 {path} {launcher} "$@"\n'
        )
        path.chmod(0o755)
        programs[name] = str(path)
    engine = Bundle(WORK, program=programs["gpu-container-runtime"])
    # The CDI specs of the other ways name the hook of this architecture.
    results = go_all(engine, ("auto", "unasked"), **{CDI_HOOK: programs["gpu-cdi-hook"]})
    return {**results, "called": sorted(set(called.read_text().split()))}


def crun() -> dict[str, Any]:
    """Use crun, named in config.toml."""
    without_unified()
    return go_all(Bundle(WORK, "crun"), CRUN, **WITH_CRUN)


def legacy() -> dict[str, Any]:
    """Use runc in the legacy mode and others, with and without a hook of the engine.

    A program that records its calls replaces our hook and the hook of the engine.
    """
    bundle = Bundle(WORK)
    ours, engines = recorder(WORK / "ours"), recorder(WORK / "nvidia-container-runtime-hook")
    results: dict[str, Any] = {"plain": bundle.run("1,3", plain=True), "ways": {}, "engine": {}}
    prepare_host()
    hook = {"path": str(engines), "args": [engines.name, "prestart"]}
    with nothing_left(results):
        for kind, prestart in (("ways", []), ("engine", [hook])):
            bundle.prestart = prestart
            for name, way in LEGACY_WAYS.items():
                with host_of(way, **{HOOK_PATH: str(ours)}):
                    output = bundle.run(way.devices, more=way.more)
                calls = {"ours": recorded(ours), "engine's": recorded(engines)}
                results[kind][name] = {"output": output, "calls": calls}
    return results


class DefaultDocker(Docker):
    """A dockerd whose default runtime is ours."""

    settings: ClassVar[dict[str, Any]] = {**Docker.settings, "default-runtime": "gpuruntime"}


def docker() -> dict[str, Any]:
    """Use dockerd with `docker run --runtime`: all cases that share one daemon."""
    # dockerd supports `--gpus` only if this program is on its PATH at its start.
    hook = recorder(Path("/usr/bin/nvidia-container-runtime-hook"))
    engine = DefaultDocker(WORK)
    with engine.started():
        results = go_all(engine, DOCKER)
        with host_of(Way(None, None, config={**LEGACY, HOOK_PATH: str(hook)})):
            results["legacy"] = {"output": engine.run("1,3"), "calls": recorded(hook)}
        results["gpus"] = {name: gpus_option(engine, hook, name) for name in ("auto", "legacy")}
        results["our hook"] = our_hook(engine, hook, results)
        results["by runc"] = by_runc(engine, results)
        results["options"] = docker_options(engine, results)
        results["refused"] = refused(engine, results)
        results["life"] = life(engine, results)
    return results


def docker_v2() -> dict[str, Any]:
    """Use dockerd where /sys/fs/cgroup is cgroup2."""
    cgroup2_alone()
    hook = recorder(Path("/usr/bin/nvidia-container-runtime-hook"))
    engine = Docker(WORK)
    with engine.started():
        results = go_all(engine, FEW)
        hook.unlink()
        hook.symlink_to(BIN / "gpu-container-runtime-hook")
        results["by runc"] = by_runc(engine, results)
    return results


class RemappedDocker(Docker):
    """A dockerd whose containers have a user namespace with mapped ids.

    It uses a separate containerd, as in distributions: hooks with the mapped ids cannot enter the
    directories of a containerd that dockerd starts itself.
    """

    settings: ClassVar[dict[str, Any]] = {**Docker.settings, "userns-remap": "daemon"}

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Run both daemons, with the image loaded, within the context."""
        containerd = Containerd(self.work)
        self.options = [f"--containerd={containerd.socket}"]
        with containerd.started(), super().started():
            yield


def docker_remapped() -> dict[str, Any]:
    """Use dockerd with ids mapped."""
    for file in ("subuid", "subgid"):
        Path("/etc", file).write_text(f"daemon:{FIRST_ID}:65536\n")
    engine = RemappedDocker(WORK)
    with engine.started():
        results = go_all(engine, FEW)
        with nothing_left(results), host_of(Way(None, None)):
            words = ["--rm", "--userns=host", *engine.words("1,3"), image.NAME]
            results["of the host"] = engine.client("run", *words, *image.LOOK).stdout
    return results


def gpus_option(engine: Docker, hook: Path, mode: str) -> dict[str, Any]:
    """Run a container with `docker run --gpus`, through our runtime."""
    words = [*engine.words(None), "--gpus", '"device=1,3"']
    with host_of(Way(None, None, config={MODE: mode})):
        output = engine.client("run", "--rm", *words, image.NAME, *image.LOOK).stdout
    return {"output": output, "calls": recorded(hook)}


def our_hook(engine: Docker, hook: Path, results: dict[str, Any]) -> str:
    """Run a container with `--gpus`, where *hook*, the path that docker looks up, is our hook.

    The default runtime of docker is ours, in the legacy mode.
    """
    hook.unlink()
    hook.symlink_to(BIN / "gpu-container-runtime-hook")
    with nothing_left(results), host_of(Way(None, None, config=LEGACY)):
        words = ["--rm", "--network=none", "--gpus", '"device=1,3"', image.NAME]
        return engine.client("run", *words, *image.LOOK).stdout


def by_runc(engine: Docker, results: dict[str, Any]) -> dict[str, str]:
    """Run containers with `--gpus` by runc, with our hook alone."""
    gpus_words = ["--network=none", "--runtime=runc", "--gpus"]
    # The control: a bind mount of the node, without a grant, which the cgroup refuses.
    bound_words = ["--network=none", "--runtime=runc", "--volume=/dev/nvidia1:/dev/nvidia1"]
    look = [image.NAME, *image.LOOK]
    looks = {}
    with nothing_left(results), host_of(Way(None, None)):
        looks["control"] = engine.client("run", "--rm", *bound_words, *look).stdout
        looks["two"] = engine.client("run", "--rm", *gpus_words, '"device=1,3"', *look).stdout
        looks["all"] = engine.client("run", "--rm", *gpus_words, "all", *look).stdout
        sleep = [image.NAME, "/bin/busybox", "sleep", "1000"]
        engine.client("run", "-d", "--name=by-runc", *gpus_words, '"device=1,3"', *sleep)
        looks["exec"] = engine.client("exec", "by-runc", *image.LOOK).stdout
        engine.client("update", "--restart=no", "--cpu-shares=512", "by-runc")
        looks["updated"] = engine.client("exec", "by-runc", *image.LOOK).stdout
        engine.client("restart", "-t", "0", "by-runc")
        looks["restarted"] = engine.client("exec", "by-runc", *image.LOOK).stdout
        engine.client("rm", "-f", "by-runc")
    return looks


def docker_options(engine: Docker, results: dict[str, Any]) -> dict[str, str]:
    """Run containers with docker options that change the root or the choice of the runtime."""
    cases = {
        "by default": ["--network=none", "--env", "NVIDIA_VISIBLE_DEVICES=1,3"],
        "gpus": [*engine.words("runtime.nvidia.com/gpu=all"), "--gpus", "all"],
        "read-only": ["--read-only", *engine.words("1,3")],
    }
    with nothing_left(results), host_of(Way(None, None)):
        return {
            name: engine.client("run", "--rm", *words, image.NAME, *image.LOOK).stdout
            for name, words in cases.items()
        }


def refused(engine: Docker, results: dict[str, Any]) -> dict[str, Any]:
    """Run docker containers whose request must fail, and control containers between them."""
    bundle = Bundle(WORK)
    started = WORK / "started"
    started.mkdir()
    refusals = {}
    # Engines start their shims at the first container.
    engine.run(None, plain=True)
    with nothing_left(results):
        for name, way in REFUSED.items():
            words = [*engine.words(way.devices, more=way.more), "--name", name]
            words += ["--volume", f"{started}:/started"]
            script = f"echo > /started/{name}; echo ran"
            with host_of(way):
                done = engine.client(
                    "run", *words, image.NAME, "/bin/sh", "-c", script, check=False
                )
                state = engine.client("inspect", "--format={{.State.Status}}", name).stdout.strip()
                engine.client("rm", name)
                refusals[name] = {
                    "status": done.returncode,
                    "stdout": done.stdout,
                    "stderr": done.stderr,
                    "state": state,
                    "started": (started / name).exists(),
                }
                if done.returncode != 0:
                    direct = bundle.create(way.devices, more=way.more)
                    refusals[name]["direct"] = [direct.returncode, direct.stdout, direct.stderr]
    return refusals


def life(engine: Docker, results: dict[str, Any]) -> dict[str, Any]:
    """Run further processes in a container, and restart it."""
    looks: dict[str, Any] = {}
    with nothing_left(results):
        sleep = ["/bin/busybox", "sleep", "1000"]
        engine.client("run", "-d", "--name=life", *engine.words("2"), image.NAME, *sleep)
        looks["before"] = engine.client("exec", "life", *image.LOOK).stdout
        looks["changed before"] = engine.client("diff", "life").stdout.splitlines()
        engine.client("restart", "-t", "0", "life")
        looks["after"] = engine.client("exec", "life", *image.LOOK).stdout
        looks["changed after"] = engine.client("diff", "life").stdout.splitlines()
        engine.client("update", "--cpu-shares=512", "--pids-limit=100", "life")
        looks["updated"] = engine.client("exec", "life", *image.LOOK).stdout
        engine.client("rm", "-f", "life")
    return looks


def docker_waits(devices: str) -> dict[str, Any]:
    """Start a container, print the namespace, and wait to be killed."""
    engine = Docker(WORK)
    with engine.started():
        sleep = ["/bin/busybox", "sleep", "1000"]
        engine.client("run", "-d", "--name=life", *engine.words(devices), image.NAME, *sleep)
        print(json.dumps({"namespace": os.readlink("/proc/self/ns/pid")}), flush=True)
        time.sleep(1000)
    return {}


def containerd() -> dict[str, Any]:
    """Use containerd with `ctr run --runc-binary`."""
    engine = Containerd(WORK)
    program = Path("/usr/bin/nvidia-container-cli")
    program.symlink_to(BIN / "gpuruntime")
    with engine.started():
        results = go_all(engine, FEW)
        with nothing_left(results):
            results["gpus"] = ctr_gpus(engine)
    return results


def ctr_gpus(engine: Containerd) -> dict[str, Any]:
    """Run a container with `ctr run --gpus`, then with the command in the hint of the error."""
    look = [image.NAME, "gpus", *image.LOOK]
    done = engine.client("run", "--rm", "--gpus", "1", *look, check=False)
    result = {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    command = re.search(r"ctr run (--runc-binary) \S+ (--env) (\S+) ", done.stderr)
    if command is not None:
        binary, env, variable = command.groups()
        words = [binary, OURS, "--cap-add", CAPABILITY, env, variable]
        result["as told"] = engine.client("run", "--rm", *words, *look).stdout
    return result


def podman(devices: str, spec: str = SPEC) -> dict[str, Any]:
    """Use `podman run --device`, with *spec* as generated."""
    generate(spec)
    without_unified()
    engine = Podman(WORK)
    with engine.started():
        return compare(engine, devices)


def podman_runtime() -> dict[str, Any]:
    """Use `podman --runtime`."""
    without_unified()
    engine = RuntimePodman(WORK)
    with engine.started():
        return go_all(engine, FEW, **WITH_CRUN)


def rootless(kind: type[Podman]) -> Podman:
    """Return a podman of an unprivileged user."""
    without_unified()
    home = WORK / "home"
    (home / "run").mkdir(parents=True)
    engine = kind(home, proc_driver=False)
    image.archive_in(home)
    open_to_others(Path(sys.base_prefix), TREE)
    make_rootless(engine)
    return engine


def podman_rootless() -> dict[str, Any]:
    """Use `podman run --device` without root."""
    generate()
    engine = rootless(Podman)
    with engine.started():
        return compare(engine, "1,3")


def podman_rootless_runtime() -> dict[str, Any]:
    """Use `podman --runtime` without root."""
    engine = rootless(RuntimePodman)
    with engine.started():
        return go_all(engine, FEW, **WITH_CRUN)


SCENARIOS = {
    "runc-v1": runc_v1,
    "runc-v2": runc_v2,
    "crun": crun,
    "legacy": legacy,
    "emulated": emulated,
    "docker": docker,
    "docker-v2": docker_v2,
    "docker-remapped": docker_remapped,
    "docker-waits": docker_waits,
    "containerd": containerd,
    "podman-runtime": podman_runtime,
    "podman-rootless": podman_rootless,
    "podman-rootless-runtime": podman_rootless_runtime,
    "podman-json": podman,
    "podman-yaml": partial(podman, spec="/etc/cdi/nvidia.yaml"),
}


def generate(target: str = SPEC, *options: str) -> None:
    """Write the CDI spec of the simulated host."""
    run(BIN / "gpuruntime", "cdi", "generate", "--output", target, *options)


def prepare_host() -> None:
    """Create the directory of config.toml and generate the CDI specs of all ways."""
    CONFIG.parent.mkdir(exist_ok=True)
    for number, options in enumerate(SPEC_OPTIONS):
        generate(str(WORK / f"spec-{number}.json"), *options)


@contextlib.contextmanager
def host_of(way: Way, **config: object) -> Iterator[None]:
    """Prepare the host for *way*, with *config* added to config.toml, within the context."""
    toml = replace(way, config={**config, **way.config}).toml
    if toml:
        CONFIG.write_text(toml)
    if way.spec is not None:
        shutil.copy(WORK / f"spec-{SPEC_OPTIONS.index(way.spec)}.json", SPEC)
    try:
        yield
    finally:
        for path in (CONFIG, Path(SPEC)):
            path.unlink(missing_ok=True)


def recorder(path: Path) -> Path:
    """Write a hook to *path* that records its arguments and its standard input."""
    path.write_text(
        f'#!/bin/sh\n{{ echo "$(basename "$0") $*"; cat; }} >> "{WORK}/{path.name}.called"\n'
    )
    path.chmod(0o755)
    return path


def recorded(path: Path) -> list[str]:
    """Return the lines that the hook at *path* has recorded since the last call."""
    file = WORK / f"{path.name}.called"
    if not file.exists():
        return []
    lines = file.read_text().splitlines()
    file.unlink()
    return lines


def without_unified() -> None:
    """Unmount the version 2 hierarchy of a hybrid host, which crun would use instead."""
    if os.path.ismount("/sys/fs/cgroup/unified"):
        run("umount", "/sys/fs/cgroup/unified")


def cgroup2_alone() -> None:
    """Mount the version 2 hierarchy on /sys/fs/cgroup, as on current distributions."""
    run("umount", "--recursive", "/sys/fs/cgroup")
    run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")


def restrict_a_node() -> None:
    """Change the mode of a node, as the driver parameter NVreg_DeviceFileMode does."""
    os.chmod("/dev/nvidia-modeset", 0o640)


def host_nodes() -> dict[str, list[str]]:
    """Return numbers, mode and owner of each GPU node of the host, as the probe prints them."""
    nodes = {}
    for entry in [*os.scandir("/dev"), *os.scandir("/dev/dri")]:
        if entry.name.startswith(("nvidia", "card", "renderD")) and not entry.is_dir():
            status = entry.stat(follow_symlinks=False)
            numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            owner = f"{status.st_uid}:{status.st_gid}"
            nodes[entry.path] = [numbers, f"{status.st_mode & 0o7777:o}", owner]
    return nodes


def main(scenarios: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Play the scenario that the command line names."""
    if "SIMHOST" not in os.environ:
        sys.exit("scenario: run this on the simulated host: simhost.py run -- scenario.py NAME")
    # Debian installs the daemons there; not every PATH contains it.
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    WORK.mkdir()
    run("mount", "-t", "tmpfs", "-o", "mode=755", "work", WORK)
    try:
        results = scenarios[sys.argv[1]](*sys.argv[2:])
    except FailedError as error:
        sys.exit(f"scenario: {error}")
    results["namespace"] = os.readlink("/proc/self/ns/pid")
    results["host"] = host_nodes()
    print(json.dumps(results))


if __name__ == "__main__":
    main(SCENARIOS)
