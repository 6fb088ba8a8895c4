# SPDX-License-Identifier: Apache-2.0
"""Run the control programs of MPS and of the driver, each with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil  # noqa: TID251 (no start path; the tree is ours)
import sys
from collections.abc import Mapping

from gpunode.config.effective import Config
from gpunode.mps_start import SHARED
from gpunode.services.spec_files import roots
from gpuruntime.errors import GpuRuntimeError, escape

CONTROL = "nvidia-cuda-mps-control"
SMI = "nvidia-smi"
# A daemon that works answers it with a percentage.
QUESTION = "get_default_active_thread_percentage"
# Where the MPS root of the host is mounted in a container, by convention.
_MOUNTED_ROOT = "/mps"
_MAX_SHOWN = 200


class MpsError(GpuRuntimeError):
    """A control program cannot be run, fails, or does not answer."""

    phase = "mps"


def directory(config: Config) -> str:
    """Return the MPS root as this program sees it."""
    return _MOUNTED_ROOT if os.path.isdir(_MOUNTED_ROOT) else config.mps_root


def pipe_directory(config: Config, resource: str) -> str:
    """Return the directory of the pipes of the daemon of *resource*."""
    return os.path.join(directory(config), resource, "pipe")


def memory_directory(config: Config) -> str:
    """Return the directory that containers of clients, and the daemons, have as their /dev/shm."""
    return os.path.join(directory(config), "shm")


def has_clients_memory(config: Config) -> bool:
    """Return whether this process is in a pod that has the memory of the clients as /dev/shm.

    `memory_directory` must exist.
    """
    memory = memory_directory(config)
    is_link = os.path.islink(memory)
    return os.path.isdir(_MOUNTED_ROOT) and not is_link and os.path.samefile(memory, SHARED)


def log_directory(config: Config, resource: str) -> str:
    """Return the directory of the logs of the daemon of *resource*."""
    return os.path.join(directory(config), resource, "log")


def variables(config: Config, resource: str) -> dict[str, str]:
    """Return the environment variables that name the daemon of *resource*."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory(config, resource),
        "CUDA_MPS_LOG_DIRECTORY": log_directory(config, resource),
    }


async def ask(config: Config, resource: str, command: str, deadline_s: float) -> str:
    """Return the answer of the daemon of *resource* to *command*; raise MpsError."""
    _check_pipes(config, resource)
    environment = variables(config, resource)
    return await run(config, [CONTROL], deadline_s, environment, f"{command}\n")


async def start(config: Config, resource: str, deadline_s: float) -> None:
    """Start the daemon of *resource*, whose /dev/shm is that of its clients; raise MpsError."""
    await run(config, _start_command(config), deadline_s, variables(config, resource))


async def run(
    config: Config,
    command: list[str],
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    text: str = "",
) -> str:
    """Return the output of *command*, which gets *text* on its standard input; raise MpsError.

    The program is searched for in PATH, then below the driver root.
    """
    program = _program(config, command[0])
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *command[1:],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        raise MpsError(f"cannot run {program}: {error.strerror}", "check its mode") from error
    try:
        async with asyncio.timeout(deadline_s):
            output, _ = await process.communicate(text.encode())
    except TimeoutError as error:
        raise MpsError(
            f"{' '.join(command)} has not ended within {deadline_s:g} s",
            "check that the driver answers: nvidia-smi",
        ) from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    answer = output.decode("utf-8", "replace").strip()
    if process.returncode:
        raise MpsError(
            f"{' '.join(command)} has ended with status {process.returncode}: "
            f"{escape(answer[-_MAX_SHOWN:]) or 'no output'}",
            "check the log of the MPS control daemon",
        )
    return answer


def _start_command(config: Config) -> list[str]:
    command = [_program(config, CONTROL), "-d"]
    if has_clients_memory(config):
        return command
    return [sys.executable, "-I", "-m", "gpunode.mps_start", memory_directory(config), *command]


def _check_pipes(config: Config, resource: str) -> None:
    """Raise MpsError if the daemon of *resource* cannot run."""
    pipes = pipe_directory(config, resource)
    if not os.path.isdir(pipes):
        raise MpsError(
            f'{resource}: the directory "{pipes}" of the MPS control daemon does not exist',
            "start gpu-node mps-daemon with the same --mps-root",
        )


def _program(config: Config, name: str) -> str:
    """Return the path of the program *name*; raise MpsError."""
    driver_bin = os.path.join(roots(config).driver, "usr/bin")
    program = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{driver_bin}")
    if program is None:
        raise MpsError(
            f"cannot run {name}: it is neither in PATH nor in {driver_bin}",
            "install the MPS programs of the driver, or set --nvidia-driver-root",
        )
    return program
