# SPDX-License-Identifier: Apache-2.0
"""The grant: the edits that answer a request, before device nodes are looked at.

On the start path. It has a module of its own because a create whose grant is saved does not load
gpuruntime/model.py.
"""

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
