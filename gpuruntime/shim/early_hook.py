# SPDX-License-Identifier: Apache-2.0
"""Run hooks before the low-level runtime, for a container whose root crun makes read-only first.

On the start path, for the creates that gpuruntime/plan/early_commands.py selects. A failure here
changes nothing: the same hook runs again at its usual time, and does what is missing or fails with
the reason.
"""

from __future__ import annotations

import os

from cdi import strictjson
from gpuruntime import child_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuruntime.plan.early_commands import EarlyCommand

# The capacity that every pipe has.
_MAX_STATE_BYTES = 4096


def run(commands: Sequence[EarlyCommand], bundle: str) -> None:
    """Run *commands* for the container in *bundle*, one after the other."""
    state = {"ociVersion": "1.0.2", "status": "creating", "bundle": os.path.realpath(bundle)}
    data = strictjson.dumps(state).encode()
    for command in commands:
        if len(data) <= _MAX_STATE_BYTES:
            _run(command, data)


def _run(command: EarlyCommand, state: bytes) -> None:
    """Run *command* with *state* on its standard input, and wait for it."""
    try:
        child = child_process.spawn(command.path, command.arguments, {}, state, has_output=False)
    except OSError:
        return
    child.finish(command.timeout_s, limit=0)
