# SPDX-License-Identifier: Apache-2.0
"""Checks of engines: whether they know our runtime, and whether their containers get it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from gpuruntime.cli.checks import engine_files, oci_hooks, platform_checks, processes, readers
from gpuruntime.cli.checks.engine_files import Engine
from gpuruntime.cli.checks.examined_machine import ExaminedMachine, modified
from gpuruntime.cli.checks.finding import Note, context, fail, ok, warn
from gpuruntime.engines import config_paths, rancher

_KUBELET = "/var/lib/kubelet"
# NVIDIA's device plugin creates its socket after it has detected GPUs.
_PLUGIN_SOCKETS = (f"{_KUBELET}/device-plugins", "nvidia*.sock")
_BUILDKIT = "/etc/buildkit/buildkitd.toml"
_SERVES_KUBERNETES = ("containerd", "crio", "k3s", "rke2", "microk8s", "k0s")
# The kernel advances the clock of file times only every few milliseconds.
_CLOCK_S = 0.02
# The limit that systemd's "infinity" sets on hosts with the default fs.nr_open.
_MANY_FILES = 1 << 20


def _is_of_gpus(name: str, path: str) -> bool:
    """Return whether the runtime *name* is a GPU runtime, ours or another toolkit's."""
    program = posixpath.basename(path)
    return name.startswith(("nvidia", "gpuruntime")) or program.startswith(
        ("nvidia-container-runtime", "gpu-container-runtime")
    )


def engines(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether each engine knows our runtime, and was started after it was configured."""
    if engine_files.is_snap(machine):
        error = config_paths.snap_refusal()
        yield fail(error.message, error.hint or "")
    installed = engine_files.installed_engines(machine)
    for engine in installed:
        others = [other.name for other in installed if other is not engine]
        yield from _engine(machine, engine, others)
    if installed:
        yield context(f"engines checked: {', '.join(engine.name for engine in installed)}")
    else:
        yield ok("no engine is installed")


def _engine(machine: ExaminedMachine, engine: Engine, others: list[str]) -> Iterator[Note]:
    """Check *engine*; *others* are the names of the host's other engines."""
    if engine.problem:
        yield fail(f"{engine.name}: {engine.problem}", "correct the file")
        return
    restart = f'run "{engine.restart}"'
    configure = _configure(engine)
    for name, path in {**engine.generated, **engine.runtimes}.items():
        if _is_of_gpus(name, path) and path and not machine.find_program(path):
            yield fail(
                f'{engine.name} has "{path}" as the runtime "{name}", which is not a program here',
                configure,
            )
            return
    dropped = [
        name
        for name, path in engine.generated.items()
        if engine_files.is_ours(machine, path)
        and name not in engine.runtimes
        and name not in rancher.DETECTED
    ]
    if dropped:
        yield fail(
            f"{engine.name} writes its config again at each start, and drops the runtime "
            f'"{dropped[0]}", which is not in its template',
            configure,
        )
        return
    ours = engine_files.our_runtimes(machine, engine)
    if not ours:
        yield from _unknown(machine, engine, others, configure)
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
    yield from _copies(machine, engine, ours[name], configure)
    is_default = " and starts containers with it by default" if engine.default in ours else ""
    since = ", started since its config was written" if engine.process else ""
    yield ok(f'{engine.name} knows the runtime "{name}"{is_default}{since}')


def _copies(machine: ExaminedMachine, engine: Engine, path: str, configure: str) -> Iterator[Note]:
    """Warn if *engine* runs another copy of our runtime than the one that is installed."""
    used, installed = machine.find_program(path), machine.find_program(engine_files.RUNTIME)
    if not installed or machine.real(used) == machine.real(installed):
        return
    if machine.read_bytes(used) != machine.read_bytes(installed):
        yield warn(
            f'{engine.name} runs "{used}", which differs from the installed "{installed}"',
            configure,
        )


def _configure(engine: Engine) -> str:
    name = "docker-rootless" if engine.name.startswith("docker of") else engine.name
    return f'run "gpuruntime runtime configure --runtime {name}", then "{engine.restart}"'.replace(
        ', then ""', ""
    )


def _unknown(
    machine: ExaminedMachine, engine: Engine, others: list[str], configure: str
) -> Iterator[Note]:
    """Report that *engine* does not know our runtime; a warning only if the engine needs it."""
    toolkits = [
        f'"{name}" is {path}' for name, path in engine.runtimes.items() if _is_of_gpus(name, path)
    ]
    hooks = [hook for hook in oci_hooks.effective(machine, engine) if hook.is_ours(machine)]
    if engine.name == "podman":
        yield ok("podman does not know our runtime, and reads CDI specs itself")
    elif toolkits:
        yield ok(f"{engine.name} has another toolkit's runtime: {toolkits[0]}")
    elif hooks:
        yield ok(f'{engine.name} runs our hook, because of "{hooks[0].file}"')
    elif engine.name == "containerd" and others and not machine.is_directory(_KUBELET):
        # docker's packages contain a containerd that only docker uses.
        yield ok(
            "containerd does not know our runtime; only containers that are started without "
            "another engine need that"
        )
    else:
        where = f' in "{engine.paths[-1]}"' if engine.paths else ""
        yield warn(f"{engine.name} does not know our runtime{where}", configure)


def pods(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether pods get our runtime by default, which device plugins need too."""
    serving = [
        engine
        for engine in engine_files.installed_engines(machine)
        if engine.name in _SERVES_KUBERNETES
    ]
    if not (machine.is_directory(_KUBELET) and serving):
        yield ok("no kubelet")
        return
    for engine in serving:
        runtimes = {**engine.generated, **engine.runtimes}
        names = [name for name, path in runtimes.items() if _is_of_gpus(name, path)]
        if not names:
            yield warn(
                f"{engine.name} has no runtime for GPUs: the device plugin finds no NVML, and "
                "advertises no GPU",
                _configure(engine),
            )
        elif engine.default not in names and machine.glob(*_PLUGIN_SOCKETS):
            yield ok(
                f'pods get "{names[0]}" with "runtimeClassName: {names[0]}"; a device plugin has '
                "registered GPUs"
            )
        elif engine.default not in names:
            yield warn(
                f'the default runtime of {engine.name} is not "{names[0]}": pods, also those of '
                f'the device plugin, get it only with "runtimeClassName: {names[0]}"',
                f'set "runtimeClassName: {names[0]}" in these pods',
            )
        else:
            yield ok(f'pods get "{engine.default}" by default')


def rootless(machine: ExaminedMachine) -> Iterator[Note]:
    """Check what rootless engines need in addition to the other checks."""
    docker_versions = [item for item in readers.installed(machine) if item.name == "docker"]
    is_default = any(_number(item.version) >= (28, 2) for item in docker_versions)
    is_running = False
    for engine in engine_files.installed_engines(machine):
        if not engine.name.startswith("docker of"):
            continue
        is_running = True
        if not engine.has_cdi and not is_default:
            yield warn(
                f'{engine.name} does not read CDI specs: "features.cdi" is not set in '
                f'"{engine.paths[0]}"',
                'run "gpuruntime runtime configure --runtime docker-rootless --cdi.enabled" as '
                "that user",
            )
        else:
            yield ok(f"{engine.name} reads CDI specs")
    if not is_running:
        yield ok("no rootless dockerd runs")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def swarm(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the GPUs that docker offers to a swarm exist, and are honoured."""
    uuids = []
    for bus_id in machine.names(platform_checks.GPUS):
        text = machine.read(f"{platform_checks.GPUS}/{bus_id}/information") or ""
        uuids += re.findall(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
    has_offer = False
    for engine in engine_files.installed_engines(machine):
        resources = engine.document.get("node-generic-resources")
        for item in resources if isinstance(resources, list) else ():
            name, _, value = str(item).partition("=")
            if "gpu" not in name.lower():
                continue
            has_offer = True
            if uuids and not any(uuid.startswith(value) for uuid in uuids):
                yield fail(
                    f'docker offers "{item}" to a swarm, and this host has no such GPU',
                    f'set "node-generic-resources" in "{engine.paths[0]}" to the UUIDs that '
                    '"nvidia-smi -L" prints',
                )
            variable = f"DOCKER_RESOURCE_{name.upper()}"
            if not machine.config.swarm:
                yield warn(
                    f'docker offers "{name}" to a swarm, and "swarm-resource" is not set: a '
                    "service does not get the GPUs that it reserves",
                    f'run "gpuruntime config --set swarm-resource={variable} --in-place"',
                )
    yield ok("the offered GPUs exist" if has_offer else "no GPUs are offered to a swarm")


def builds(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether BuildKit's worker runs build steps by our runtime."""
    daemons = processes.running(machine, "buildkitd")
    options = [processes.path_option(machine, daemon, "--config") for daemon in daemons]
    for path in {option or _BUILDKIT for option in options} or {_BUILDKIT}:
        match = re.search(r'^\s*binary\s*=\s*"([^"]+)"', machine.read(path) or "", re.MULTILINE)
        if match and engine_files.is_ours(machine, match[1]):
            yield ok(f'"{path}" names our runtime: build steps get the GPUs that images request')
            return
    yield ok("BuildKit is not configured with our runtime")


def limits(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether containers inherit a limit on open files that slows the driver's tools."""
    is_running = False
    for process in processes.running(machine, "dockerd", "containerd", "crio", "k3s-server"):
        is_running = True
        limit = processes.open_files(machine, process)
        if limit is not None and limit > _MANY_FILES:
            yield warn(
                f"{process.name} and its containers may open {limit} files: the driver's tools "
                "iterate over all of them at each start",
                f'set "LimitNOFILE=1048576" in a drop-in of {process.name}\'s service',
            )
    for engine in engine_files.installed_engines(machine):
        limits_ = engine.document.get("default-ulimits")
        nofile = limits_.get("nofile") if isinstance(limits_, dict) else None
        hard = nofile.get("Hard") if isinstance(nofile, dict) else None
        if isinstance(hard, int) and hard > _MANY_FILES:
            yield warn(
                f'"{engine.paths[0]}" lets containers open {hard} files: the driver\'s tools '
                "iterate over all of them at each start",
                'lower "default-ulimits" to 1048576',
            )
    yield ok("the limits are reasonable" if is_running else "no daemon of an engine runs")
