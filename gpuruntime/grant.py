# SPDX-License-Identifier: Apache-2.0
"""What a container gets for its request, before nodes are looked at; on the start path."""

from __future__ import annotations

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi.wire import Edits


class Grant(Record):
    """The *edits* that give a container what it asks for.

    *notes* are sentences about it, as on what was left out, *warnings* on what may be amiss.
    """

    __slots__ = ("edits", "notes", "warnings")

    def __init__(
        self, edits: Edits, *, notes: Iterable[str] = (), warnings: Iterable[str] = ()
    ) -> None:
        self.edits = edits
        self.notes = tuple(notes)
        self.warnings = tuple(warnings)
