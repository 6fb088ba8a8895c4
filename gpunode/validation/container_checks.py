# SPDX-License-Identifier: Apache-2.0
"""Check whether a container of the engine's GPU runtime gets its GPUs, and can call CUDA."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import posixpath
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from gpunode.engine import GPU_RUNTIMES
from gpunode.validation.trial import TrialError
from gpuruntime.cli.checks import engine_files
from gpuruntime.cli.checks.engine_files import Engine
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok

_REMOVAL_S, _STEP_S = 2.0, 0.02
_NAME = "gpu-node-validate"
# More than the deadlines of a trial together.
_DEADLINE_S = 100.0
_DOCTOR = 'run "gpuruntime doctor" on the host'
_NEEDS = "the check needs a GPU whose driver answers, and an engine with an OCI runtime for GPUs"
# CUresult → what it means, and the action.
_CUDA_ERRORS = {
    100: ("CUDA finds no GPU", f"look at the component driver; {_NEEDS}"),
    802: ("the GPUs' NVLink fabric is not ready", "start nvidia-fabricmanager on the host"),
    803: ("libcuda is not of the version of the loaded driver", _DOCTOR),
}
# Engines that a kubelet uses come first.
_OF_KUBELET = ("containerd", "crio", "k3s", "rke2", "k0s", "microk8s")
_ORDER = (*_OF_KUBELET, "docker", "podman")


def toolkit(machine: ExaminedMachine) -> Iterator[Note]:
    """Create a container that requests all GPUs, and look at its nodes and driver files."""
    engine, runtime = gpu_runtime(machine)
    result = _trial(machine, runtime, calls_cuda=False)
    nodes = result["nodes"]
    if not nodes:
        yield fail(
            f'a container of "{runtime}" with NVIDIA_VISIBLE_DEVICES=all has no "/dev/nvidia*"',
            _DOCTOR,
        )
    if not result["nvml"]:
        yield fail(f'a container of "{runtime}" has no library of the driver', _DOCTOR)
    yield ok(f'a container of {engine}\'s runtime "{runtime}" has {len(nodes)} GPU(s)')


def cuda(machine: ExaminedMachine) -> Iterator[Note]:
    """Run a program that calls cuInit in a container that requests all GPUs."""
    if not machine.glob("/proc/driver/nvidia/gpus", "*"):
        yield fail(f"cuInit was not called, for the driver has no GPU: {_NEEDS}", _DOCTOR)
        return
    _, runtime = gpu_runtime(machine)
    yield cuda_note(_trial(machine, runtime, calls_cuda=True)["cuda"])


def cuda_note(result: dict[str, Any]) -> Note:
    """Return the note about the *result* of the program in the container."""
    if "problem" in result:
        return fail(f"libcuda cannot be loaded in a container: {result['problem']}", _DOCTOR)
    code, library = result["code"], result["library"]
    if code != 0:
        meaning, action = _CUDA_ERRORS.get(code, ("CUDA cannot be used", _DOCTOR))
        return fail(f"cuInit returned {code} in a container: {meaning}", action)
    if not result["injected"]:
        return fail(f'the container loaded its own "{library}" instead of the host\'s', _DOCTOR)
    return ok(f'cuInit succeeded in a container, through "{library}"')


def gpu_runtime(machine: ExaminedMachine) -> tuple[str, str]:
    """Return an engine and the path of the OCI runtime for GPUs in its config.

    Raises TrialError if no engine has one, or its program is missing.
    """
    engines = _ordered_engines(machine)
    missing = ""
    for engine in engines:
        ours = engine_files.our_runtimes(machine, engine)
        runtimes = {**engine.generated, **engine.runtimes}
        named = [path for path in runtimes.values() if _is_gpu_runtime(path)]
        for path in [*ours.values(), *named]:
            program = machine.find_program(path)
            if program:
                return engine.name, program
            missing = f'the runtime "{path}" of {engine.name} is not a program'
    if missing:
        raise TrialError(missing, "install it, or correct the config of the engine")
    names = ", ".join(engine.name for engine in engines)
    problem = f"no OCI runtime for GPUs is in the config of {names}" if names else "no engine"
    raise TrialError(
        f"{problem}: {_NEEDS}",
        'run "gpuruntime runtime configure --runtime=containerd", with the name of your engine',
    )


def kubernetes_engine(machine: ExaminedMachine) -> Engine | None:
    """Return the engine of *machine* that a kubelet can use, None if there is none."""
    engines = [engine for engine in _ordered_engines(machine) if engine.name in _OF_KUBELET]
    return engines[0] if engines else None


def names_of_gpu_runtimes(engine: Engine) -> list[str]:
    """Return the names of the runtimes for GPUs in the config of *engine*."""
    runtimes = {**engine.generated, **engine.runtimes}
    return [name for name, path in runtimes.items() if _is_gpu_runtime(path)]


def _ordered_engines(machine: ExaminedMachine) -> list[Engine]:
    """Return the engines of *machine*, those that a kubelet uses first."""
    rank = {name: number for number, name in enumerate(_ORDER)}
    engines = engine_files.installed_engines(machine)
    return sorted(engines, key=lambda engine: rank.get(engine.name, len(rank)))


def _is_gpu_runtime(path: str) -> bool:
    return posixpath.basename(path).startswith(GPU_RUNTIMES)


def _trial(machine: ExaminedMachine, runtime: str, *, calls_cuda: bool) -> dict[str, Any]:
    """Return the result of a trial container; raise TrialError."""
    if os.geteuid() != 0:
        raise TrialError("only root can create a container by the runtime", "run this as root")
    # By the process that started this check, which removes the cgroup if it has to kill us.
    name = f"{_NAME}-{os.getppid()}-{os.getpid()}"
    settings = {
        "name": name,
        "runtime": runtime,
        "host_root": machine.root,
        "calls_cuda": calls_cuda,
    }
    unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = [*unshare, sys.executable, "-m", "gpunode.validation.trial", json.dumps(settings)]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        result: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise TrialError(
            f'"{runtime}" does not create a container in {_DEADLINE_S:g} s', _DOCTOR
        ) from error
    except (OSError, ValueError) as error:
        lines = done.stderr.strip().splitlines() if isinstance(error, ValueError) else [str(error)]
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise TrialError(
            f"cannot make namespaces for a container: {reason}",
            "run this as root, in a pod that is privileged",
        ) from error
    if "problem" in result:
        raise TrialError(result["problem"], result["action"])
    return result


def remove_cgroups(pid: int) -> None:
    """Remove the cgroups of containers that checks of the process *pid* have left when killed."""
    deadline = time.monotonic() + _REMOVAL_S
    while paths := [
        path
        for directory in ("/sys/fs/cgroup", "/sys/fs/cgroup/*")
        for path in glob.glob(f"{directory}/{_NAME}-{pid}-*")
    ]:
        for path in paths:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        if time.monotonic() > deadline:
            return
        # Processes that were killed leave their cgroup a little later.
        time.sleep(_STEP_S)
