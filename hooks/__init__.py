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
    text = f"{program}: runtime: cannot load the hook: {why}\nhint: {hint}"
    sys.stderr.write(f"{text}\n")
    try:
        from gpuruntime.snapshots import hook_log  # noqa: PLC0415 (what is missing may be this)

        hook_log.record(text, 1)
    except Exception:  # noqa: BLE001 (it has been said)
        return


if sys.argv[:1] == ["-c"]:
    # The launcher has started us. Later on, hooks.entry says what goes wrong.
    sys.excepthook = _tell
