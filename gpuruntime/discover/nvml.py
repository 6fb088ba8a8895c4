# SPDX-License-Identifier: Apache-2.0
"""Ask NVML about the GPUs, in a child process with a deadline; the only import of pynvml.

A driver in trouble can block NVML for ever, in a state no signal ends. So the library is loaded
in a child, opened by path, and a child that does not answer is left behind.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys

from gpuruntime.errors import DriverError, escape
from gpuruntime.model import Gpu

DEADLINE_S = 30.0
_ANSWER_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Answer:
    """What NVML says: the driver's version, the GPUs, and why any GPU is left out."""

    driver_version: str
    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...]


def query(library: str, deadline_s: float = DEADLINE_S) -> Answer:
    """Ask the NVML at the host path *library* (`nvidia-smi -L` shows the same).

    Raises DriverError if it cannot be loaded, fails, or does not answer in *deadline_s* seconds.
    """
    command = [sys.executable, "-I", "-m", "gpuruntime.discover.nvml", library]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        close_fds=True,
        start_new_session=True,
        cwd="/",
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
    )
    try:
        output, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        # Not waited for: in the driver's ioctl not even SIGKILL may end it.
        os.killpg(child.pid, signal.SIGKILL)
        raise DriverError(
            f'the driver did not answer "{library}" in {deadline_s:g} s',
            'look for NVRM and Xid lines in "dmesg"',
        ) from None
    try:
        answer = json.loads(output[:_ANSWER_BYTES])
    except ValueError:
        raise DriverError(
            f'"{library}" ended the process that asked it, status {child.returncode}',
            'check that "nvidia-smi -L" works on the host',
        ) from None
    if "error" in answer:
        raise DriverError(
            f'NVML of "{library}": {answer["error"]}',
            'check that "nvidia-smi -L" works on the host',
        )
    gpus = tuple(Gpu(**gpu) for gpu in answer["gpus"])
    return Answer(answer["driver_version"], gpus, tuple(answer["problems"]))


def _ask(library: str) -> dict[str, object]:
    """Load *library* and ask; runs in the child."""
    import pynvml  # noqa: PLC0415 (only the child may hold NVML)

    # pynvml finds the library by name only; ours is the one below the driver root.
    pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInit()
    gpus, problems = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                {
                    "index": index,
                    "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                    "minor": pynvml.nvmlDeviceGetMinorNumber(handle),
                    "name": _name(handle),
                }
            )
        except pynvml.NVMLError as error:
            # One GPU that fell off the bus does not cost the others.
            problems.append(f"GPU {index} is left out: {error}")
    return {
        "driver_version": _text(pynvml.nvmlSystemGetDriverVersion()),
        "gpus": gpus,
        "problems": problems,
    }


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _name(handle: object) -> str:
    """Return the product's name, or "" from an NVML that does not know it."""
    import pynvml  # noqa: PLC0415 (only the child may hold NVML)

    try:
        return _text(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:
        return ""


def main() -> None:
    """Answer on stdout as one JSON object; entry of the child."""
    import pynvml  # noqa: PLC0415 (only the child may hold NVML)

    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Whatever a vendor library prints must not be taken for the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = _ask(sys.argv[1])
    except (pynvml.NVMLError, OSError) as error:
        answer = {"error": escape(str(error))}
    with os.fdopen(out, "w") as stream:
        json.dump(answer, stream)


if __name__ == "__main__":
    main()
