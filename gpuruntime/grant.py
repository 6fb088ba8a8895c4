# SPDX-License-Identifier: Apache-2.0
"""The grant: the edits for a request, before they are completed from the device nodes.

On the start path. It has its own module because a create with a saved grant does not load
gpuruntime/model.py.
"""

from __future__ import annotations

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi.wire import Edits


class Grant(Record):
    """The *edits* that give a container the devices that it requests.

    *notes* are sentences about the grant, such as on omitted files; *warnings* are about faults.
    """

    __slots__ = ("edits", "notes", "warnings")

    def __init__(
        self, edits: Edits, *, notes: Iterable[str] = (), warnings: Iterable[str] = ()
    ) -> None:
        self.edits = edits
        self.notes = tuple(notes)
        self.warnings = tuple(warnings)
