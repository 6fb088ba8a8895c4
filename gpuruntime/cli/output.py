# SPDX-License-Identifier: Apache-2.0
"""Print data to standard output; a partial write is an error."""

from __future__ import annotations

from gpuruntime.errors import GpuRuntimeError


def write_stdout(text: str) -> None:
    """Write *text* to standard output; raise GpuRuntimeError if that fails."""
    try:
        # Not sys.stdout, which would try a failed write again at exit.
        with open(1, "wb", closefd=False) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise GpuRuntimeError(
            f"cannot write to standard output: {error.strerror}",
            "redirect it to a file or program that accepts it",
        ) from error
