# SPDX-License-Identifier: Apache-2.0
"""The XIDs that differ from the rule: an XID makes its GPU unhealthy until it has been quiet.

`application` XIDs are faults of a program, not of the GPU, and are ignored by default. After a
`needs_reset` XID only a reset makes the GPU healthy again. Names are short forms of those in the
driver's documentation.
"""

from __future__ import annotations

from typing import NamedTuple


class Xid(NamedTuple):
    """What is particular about an XID."""

    name: str
    application: bool = False
    needs_reset: bool = False


XIDS: dict[int, Xid] = {
    13: Xid("graphics engine exception", application=True),
    31: Xid("GPU memory page fault", application=True),
    43: Xid("GPU stopped processing", application=True),
    45: Xid("preemptive cleanup", application=True),
    48: Xid("double-bit ECC error", needs_reset=True),
    61: Xid("internal microcontroller breakpoint"),
    62: Xid("internal microcontroller halt"),
    63: Xid("row remapping or page retirement pending", needs_reset=True),
    64: Xid("row remapping or page retirement failed", needs_reset=True),
    68: Xid("NVDEC exception", application=True),
    69: Xid("graphics engine class error"),
    74: Xid("NVLink error", needs_reset=True),
    79: Xid("GPU has fallen off the bus", needs_reset=True),
    92: Xid("high rate of single-bit ECC errors"),
    94: Xid("contained ECC error"),
    95: Xid("uncontained ECC error", needs_reset=True),
    109: Xid("context switch timeout", application=True),
    119: Xid("GSP timeout", needs_reset=True),
    120: Xid("GSP error", needs_reset=True),
}
