# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has a GPU: the driver is asked, since device nodes outlive a driver."""

from __future__ import annotations

import subprocess
from contextlib import suppress

DEADLINE_S = 20.0


class NoGpuError(Exception):
    """Why there is no GPU to use, in one line."""


def list_gpus(deadline_s: float = DEADLINE_S) -> list[str]:
    """Return the lines of `nvidia-smi -L`, one or more for each GPU.

    Raises NoGpuError where it is not installed, fails, lists no GPU or does not end in time.
    """
    command = ["nvidia-smi", "-L"]
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError:
        raise NoGpuError("no GPU here") from None
    try:
        output, _ = program.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        program.kill()
        if program.stdout is not None:
            program.stdout.close()
        # A process that hangs in the driver does not end even so: it is not waited for.
        with suppress(subprocess.TimeoutExpired):
            program.wait(1)
        raise NoGpuError(
            f'the driver does not answer "nvidia-smi -L" in {deadline_s:.0f} s'
        ) from None
    lines = output.splitlines()
    if program.returncode != 0:
        last = lines[-1] if lines else f"status {program.returncode}"
        raise NoGpuError(f'"nvidia-smi -L" failed: {last}')
    if not lines:
        raise NoGpuError("the driver reports no GPU")
    return lines
