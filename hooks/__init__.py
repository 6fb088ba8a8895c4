# SPDX-License-Identifier: Apache-2.0
"""Programs that the low-level runtime runs around container start."""

from __future__ import annotations

import sys


def _tell(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Say in two lines, in place of Python's many, what kept a hook from being loaded."""
    del trace
    program = "".join(sys.argv[1:2]).rpartition("/")[2]
    why = f"{kind.__name__}: {str(error)[:500]}".rstrip(": ")
    hint = "allow the runtime 64 MiB of address space (ulimit -v), or install gpuruntime again"
    sys.stderr.write(f"{program}: runtime: cannot load the hook: {why}\nhint: {hint}\n")


if sys.argv[:1] == ["-c"]:
    # The launcher has started us. Later on, hooks.entry says what goes wrong.
    sys.excepthook = _tell
