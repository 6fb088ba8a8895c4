# SPDX-License-Identifier: Apache-2.0
"""The base of operations: the steps of a hook's plan, carried out below a container's root."""

from __future__ import annotations

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuruntime.system.paths import Root


class Operation(Record):
    """A step that can describe itself, and be executed below a root."""

    __slots__ = ()

    # The path of the host's ldconfig, if the step starts it. A process that starts another one
    # cannot be confined to the hook's system calls.
    ldconfig = ""

    def for_config(self, document: dict[str, Any]) -> Operation:
        """Return the step for the container whose config.json is *document*."""
        del document
        return self

    if TYPE_CHECKING:

        def describe(self) -> str:
            """Return the step in one line."""

        def execute(self, root: Root, warn: Callable[[str], None]) -> None:
            """Carry the step out below *root*; raise MountError or LdcacheError."""
