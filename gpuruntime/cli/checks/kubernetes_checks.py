# SPDX-License-Identifier: Apache-2.0
"""Checks of a Kubernetes node: its kubelet, who offers the GPUs, and what an operator left."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from gpuruntime.cli.checks import engine_files, processes, readers
from gpuruntime.cli.checks.engine_files import Engine
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn

KUBELET = "/var/lib/kubelet"
SERVES_KUBERNETES = ("containerd", "crio", "k3s", "rke2", "microk8s", "k0s")
_KUBELETS = ("kubelet", "k3s-server", "k3s-agent", "k3s", "rke2")
_PLUGIN, _INCUMBENT = "gpu-node device-plugin", "nvidia-device-plugin"
# Directory and names of the sockets of its registration with the kubelet.
_DRA_SOCKETS = ("plugins_registry", "gpu.nvidia.com*.sock")
_DRA_PROGRAMS = ("gpu-kubelet-plugin",)
# The first versions that hand on the CDI names of the kubelet.
_CDI_VERSIONS = {"containerd": (1, 7), "crio": (1, 28), "cri-o": (1, 28)}
_OPERATOR_PROGRAMS = ("gpu-operator", "nvidia-toolkit", "nvidia-ctk-installer")
# Where its toolkit container puts programs.
_TOOLKIT = "/usr/local/nvidia/toolkit"
_READY = ("/run/nvidia/validations", "*-ready")
_DRIVER_VERSION = "/proc/driver/nvidia/version"
_DROP_IN_NAMES = ("gpuruntime", "nvidia")


def kubelet_directory(machine: ExaminedMachine) -> str:
    """Return the directory of the kubelet that runs on *machine*, or the usual one."""
    for process in processes.running(machine, *_KUBELETS):
        option = processes.path_option(machine, process, "--root-dir")
        for argument in process.options("--kubelet-arg"):
            name, _, value = argument.partition("=")
            option = value if name == "root-dir" else option
        if option:
            return posixpath.normpath(option)
    return KUBELET


def directory(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the kubelet's directory is the one that device plugins use."""
    path = kubelet_directory(machine)
    if not machine.is_directory(path):
        yield ok("no kubelet")
    elif machine.real(path) != machine.real(KUBELET):
        yield warn(
            f'the kubelet uses "{path}", and device plugins look for its socket in "{KUBELET}": '
            "without a change the kubelet never hears of the GPUs",
            f'replace "{KUBELET}" with "{path}" in the volumes of the DaemonSets, and add '
            f'"--kubelet-socket={path}/device-plugins/kubelet.sock"',
        )
    else:
        yield ok(f'the kubelet uses "{path}"')


def offers(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether one program offers the GPUs to the kubelet, and whether its devices arrive."""
    top = kubelet_directory(machine)
    if not machine.is_directory(top):
        yield ok("no kubelet")
        return
    plugins = _plugins(machine)
    sockets = machine.glob(f"{top}/device-plugins", "nvidia*.sock")
    has_dra = bool(
        processes.running(machine, *_DRA_PROGRAMS)
        or machine.glob(f"{top}/{_DRA_SOCKETS[0]}", _DRA_SOCKETS[1])
    )
    if len(plugins) > 1:
        yield fail(
            f"{len(plugins)} device plugins run: {', '.join(plugins)}; the last to register has "
            "the GPUs, and after each restart of the kubelet that may be another one",
            "delete all DaemonSets of device plugins but one, or keep them away from this node "
            "by their node selectors",
        )
    if has_dra and (plugins or sockets):
        yield fail(
            "the DRA driver and a device plugin both offer the GPUs: two pods can get one GPU",
            "keep one of them away from this node, by its node selector",
        )
    if has_dra:
        yield from _claims(machine)
    names = " and ".join(plugins or (["the DRA driver"] if has_dra else []))
    yield ok(f"the GPUs are offered by {names}" if names else "no device plugin runs")


def _plugins(machine: ExaminedMachine) -> list[str]:
    """Return the device plugins for GPUs that run, each with its number."""
    plugins = [
        f"{_INCUMBENT} (process {process.pid})"
        for process in processes.running(machine, _INCUMBENT)
    ]
    # The kernel names a script's process after the script; the first word is its interpreter.
    for process in processes.running(machine, "gpu-node"):
        words = [posixpath.basename(word) for word in process.words]
        if "gpu-node" in words and words[words.index("gpu-node") + 1 :][:1] == ["device-plugin"]:
            plugins.append(f"{_PLUGIN} (process {process.pid})")
    return plugins


def _claims(machine: ExaminedMachine) -> Iterator[Note]:
    """Report engines that do not hand on the CDI names of claims."""
    versions = {reader.name: reader.version for reader in readers.installed(machine)}
    for engine in _serving(machine):
        version = versions.get(engine.name, "")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        oldest = _CDI_VERSIONS.get(engine.name)
        if engine.has_cdi is False:
            yield fail(
                f"CDI is off in {engine.name}: pods with claims start without their GPUs",
                f'run "gpuruntime runtime configure --runtime {engine.name} --cdi.enabled", then '
                f'"{engine.restart}"',
            )
        elif oldest and len(numbers) == 2 and numbers < oldest:
            yield fail(
                f"{engine.name} {version} does not hand on the CDI names of claims: pods with "
                "claims start without their GPUs",
                f"upgrade {engine.name} to {'.'.join(map(str, oldest))} or newer",
            )


def _serving(machine: ExaminedMachine) -> list[Engine]:
    engines = engine_files.installed_engines(machine)
    return [engine for engine in engines if engine.name in SERVES_KUBERNETES]


def drop_ins(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether containerd imports the drop-ins that register a runtime for GPUs."""
    count = 0
    for engine in engine_files.installed_engines(machine):
        if engine.name != "containerd" or not engine.paths:
            continue
        config = engine.paths[0]
        directory = posixpath.join(posixpath.dirname(config), "conf.d")
        for path in machine.glob(directory, "*.toml"):
            if not any(name in posixpath.basename(path) for name in _DROP_IN_NAMES):
                continue
            count += 1
            if path not in engine.paths:
                yield fail(
                    f'"{config}" does not import "{path}": containerd ignores it, and its '
                    "runtime does not exist for pods",
                    'run "gpuruntime runtime configure --runtime containerd", then '
                    f'"{engine.restart}"',
                )
    yield ok(f"{count} drop-in(s) of runtimes for GPUs are imported" if count else "no drop-in")


def operator(machine: ExaminedMachine) -> Iterator[Note]:
    """Check for what the GPU operator leaves on a node that it no longer manages."""
    if processes.running(machine, *_OPERATOR_PROGRAMS):
        yield ok("the GPU operator manages this node")
        return
    for engine in _serving(machine):
        for name, program in engine.runtimes.items():
            if program.startswith(f"{_TOOLKIT}/") and not machine.exists(program):
                yield fail(
                    f'the runtime "{name}" of {engine.name} is "{program}", which the GPU '
                    "operator has removed: pods of that runtime do not start",
                    f'remove "{name}" from the config of {engine.name}, then run '
                    f'"{engine.restart}"',
                )
    ready = machine.glob(*_READY)
    if machine.exists(_TOOLKIT):
        yield warn(
            f'"{_TOOLKIT}" is left of the GPU operator', f'delete it: run "rm -r {_TOOLKIT}"'
        )
    if ready and not machine.exists(_DRIVER_VERSION):
        yield warn(
            f'"{ready[0]}" is left of a validation, and the driver is not loaded: what waits for '
            "that file does not wait",
            f'delete it: run "rm {ready[0]}"',
        )
    yield ok("nothing is left of the GPU operator")
