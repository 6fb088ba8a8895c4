# SPDX-License-Identifier: Apache-2.0
"""Checks of engines: do they know our runtime, since when, and do their containers get it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from gpuruntime.cli.checks import driver_checks, engine_files, processes, readers
from gpuruntime.cli.checks.engine_files import Engine
from gpuruntime.cli.checks.examined_machine import ExaminedMachine, modified
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.engines import config_paths, rancher

_KUBELET = "/var/lib/kubelet"
_BUILDKIT = ("/etc/buildkit/buildkitd.toml", "/etc/buildkitd.toml")
_SERVES_KUBERNETES = ("containerd", "crio", "k3s", "rke2", "microk8s", "k0s")
# Times of files come from a clock that the kernel moves on some times a second only.
_CLOCK_S = 0.02
# systemd's own "infinity" on hosts that have not raised fs.nr_open.
_MANY_FILES = 1 << 20


def _ours(machine: ExaminedMachine, engine: Engine) -> dict[str, str]:
    return {
        name: path for name, path in engine.runtimes.items() if path and _is_ours(machine, path)
    }


def _is_ours(machine: ExaminedMachine, path: str) -> bool:
    found = machine.find_program(path)
    return bool(found) and machine.is_ours(found)


def _is_of_gpus(name: str, path: str) -> bool:
    """Return whether the runtime *name* is meant to give GPUs, ours or another."""
    program = posixpath.basename(path)
    return name.startswith(("nvidia", "gpuruntime")) or program.startswith(
        ("nvidia-container-runtime", "gpu-container-runtime")
    )


def engines(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether each engine knows us, and has been started since it was told."""
    if engine_files.is_snap(machine):
        error = config_paths.snap_refusal()
        yield fail(error.message, error.hint or "")
    found = engine_files.installed_engines(machine)
    for engine in found:
        yield from _engine(machine, engine)
    if not found:
        yield ok("no engine found")


def _engine(machine: ExaminedMachine, engine: Engine) -> Iterator[Note]:
    if engine.problem:
        yield fail(f"{engine.name}: {engine.problem}", "correct the file")
        return
    restart = f'run "{engine.restart}"'
    configure = _configure(engine)
    for name, path in {**engine.generated, **engine.runtimes}.items():
        if _is_of_gpus(name, path) and path and not machine.find_program(path):
            yield fail(
                f'{engine.name} has "{path}" as the runtime "{name}", which is no program here',
                configure,
            )
            return
    ours = _ours(machine, engine)
    lost = [
        name
        for name, path in engine.generated.items()
        if _is_ours(machine, path) and name not in engine.runtimes and name not in rancher.DETECTED
    ]
    if lost:
        yield fail(
            f'{engine.name} makes its config anew at each start, and forgets the runtime "'
            f'{lost[0]}", which is not in its template',
            configure,
        )
        return
    ours = ours or {n: p for n, p in engine.generated.items() if _is_ours(machine, p)}
    if not ours:
        yield from _unknown(engine, configure)
        return
    changed, path = modified(machine, engine.paths)
    if engine.process and changed > engine.process.started + _CLOCK_S:
        yield fail(
            f'{engine.name} was started before "{path}" was written: unless it was '
            "reloaded since, it does not use the new content",
            restart,
        )
        return
    name = next(iter(ours))
    is_default = " and starts containers with it by default" if engine.default in ours else ""
    since = ", started since its config was written" if engine.process else ""
    yield ok(f'{engine.name} knows the runtime "{name}"{is_default}{since}')


def _configure(engine: Engine) -> str:
    name = "docker-rootless" if engine.name.startswith("docker of") else engine.name
    return f'run "gpuruntime runtime configure --runtime {name}", then "{engine.restart}"'.replace(
        ', then ""', ""
    )


def _unknown(engine: Engine, configure: str) -> Iterator[Note]:
    """Say what it means that *engine* does not know us: for some, CDI is all that is needed."""
    others = [
        f'"{name}" is {path}' for name, path in engine.runtimes.items() if _is_of_gpus(name, path)
    ]
    if engine.name == "podman":
        yield ok("podman does not know our runtime, and reads CDI specs itself")
    elif others:
        yield ok(f"{engine.name} has another toolkit's runtime: {others[0]}")
    else:
        where = f' in "{engine.paths[0]}"' if engine.paths else ""
        yield warn(f"{engine.name} does not know our runtime{where}", configure)


def pods(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether pods get our runtime without asking, which plugins for devices need too."""
    serving = [
        engine
        for engine in engine_files.installed_engines(machine)
        if engine.name in _SERVES_KUBERNETES
    ]
    if not (machine.is_directory(_KUBELET) and serving):
        yield ok("no kubelet here")
        return
    for engine in serving:
        runtimes = {**engine.generated, **engine.runtimes}
        names = [name for name, path in runtimes.items() if _is_of_gpus(name, path)]
        if not names:
            yield warn(
                f"{engine.name} has no runtime for GPUs: the device plugin finds no NVML, and "
                "offers no GPU",
                _configure(engine),
            )
        elif engine.default not in names:
            yield warn(
                f'the default runtime of {engine.name} is not "{names[0]}": pods, the device '
                f'plugin too, get it by "runtimeClassName: {names[0]}" only',
                "name it in those pods, or configure it with --set-as-default",
            )
        else:
            yield ok(f'pods get "{engine.default}" by default')


def rootless(machine: ExaminedMachine) -> Iterator[Note]:
    """See what engines of users without root lack, beside what the other checks say."""
    docker_versions = [item for item in readers.installed(machine) if item.name == "docker"]
    is_default = any(_number(item.version) >= (28, 2) for item in docker_versions)
    told = False
    for engine in engine_files.installed_engines(machine):
        if not engine.name.startswith("docker of"):
            continue
        told = True
        if not engine.has_cdi and not is_default:
            yield warn(
                f'{engine.name} does not read CDI specs: "features.cdi" is not set in '
                f'"{engine.paths[0]}"',
                'run "gpuruntime runtime configure --runtime docker-rootless --cdi.enabled" as '
                "that user",
            )
        else:
            yield ok(f"{engine.name} reads CDI specs")
    if not told:
        yield ok("no dockerd of a user runs")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def swarm(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether docker's node resources name GPUs that there are, and we look for them."""
    uuids = []
    for bus_id in machine.names(driver_checks.GPUS):
        text = machine.read(f"{driver_checks.GPUS}/{bus_id}/information") or ""
        uuids += re.findall(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
    told = False
    for engine in engine_files.installed_engines(machine):
        resources = engine.document.get("node-generic-resources")
        for item in resources if isinstance(resources, list) else ():
            name, _, value = str(item).partition("=")
            if "gpu" not in name.lower():
                continue
            told = True
            if uuids and not any(uuid.startswith(value) for uuid in uuids):
                yield fail(
                    f'docker offers "{item}" to a swarm, and there is no such GPU here',
                    f'give "node-generic-resources" the UUIDs of this host in '
                    f'"{engine.paths[0]}", as "nvidia-smi -L" shows them',
                )
            variable = f"DOCKER_RESOURCE_{name.upper()}"
            if not machine.config.swarm:
                yield warn(
                    f'docker offers "{name}" to a swarm, and "swarm-resource" is not set: what a '
                    "service reserves is not what it gets",
                    f'run "gpuruntime config --set swarm-resource={variable} --in-place"',
                )
    yield ok("what docker offers to a swarm is here" if told else "no GPUs offered to a swarm")


def builds(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether somebody expects GPUs in image builds from our runtime."""
    for path in _BUILDKIT:
        found = re.search(r'^\s*binary\s*=\s*"([^"]+)"', machine.read(path) or "", re.MULTILINE)
        if found and _is_ours(machine, found[1]):
            yield warn(
                f'"{path}" has our runtime as its worker\'s: builds call "run", which is passed '
                "through without GPUs",
                'ask for them in the build, with "RUN --device=nvidia.com/gpu=all"',
            )
            return
    yield ok("none is told to use our runtime")


def limits(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether containers inherit a limit of open files that makes the driver's tools slow."""
    told = False
    for process in processes.running(machine, "dockerd", "containerd", "crio", "k3s-server"):
        told = True
        limit = processes.open_files(machine, process)
        if limit is not None and limit > _MANY_FILES:
            yield warn(
                f"{process.name} and its containers may open {limit} files: the driver's tools "
                "go through them all at each start",
                f'set "LimitNOFILE=1048576" in a drop-in of {process.name}\'s service',
            )
    for engine in engine_files.installed_engines(machine):
        limits_ = engine.document.get("default-ulimits")
        nofile = limits_.get("nofile") if isinstance(limits_, dict) else None
        hard = nofile.get("Hard") if isinstance(nofile, dict) else None
        if isinstance(hard, int) and hard > _MANY_FILES:
            yield warn(
                f'"{engine.paths[0]}" lets containers open {hard} files: the driver\'s tools go '
                "through them all at each start",
                'lower "default-ulimits" to 1048576',
            )
    yield ok("limits of open files are reasonable" if told else "no daemon of an engine runs")
