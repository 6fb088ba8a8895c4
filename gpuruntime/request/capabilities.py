# SPDX-License-Identifier: Apache-2.0
"""Driver capabilities: which exist, and which include others; pure.

On the start path. NVIDIA_DRIVER_CAPABILITIES of the container names them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

COMPAT32 = "compat32"
COMPUTE = "compute"
DISPLAY = "display"
GRAPHICS = "graphics"
NGX = "ngx"
UTILITY = "utility"
VIDEO = "video"
# What a container gets that asks for none.
DEFAULT = (COMPUTE, UTILITY)
ALL = (COMPAT32, COMPUTE, DISPLAY, GRAPHICS, NGX, UTILITY, VIDEO)
# A capability without which the one on the left cannot work, or which has the same files.
_BRINGS = {VIDEO: COMPUTE, DISPLAY: GRAPHICS}


def closed(wanted: Collection[str]) -> set[str]:
    """Return *wanted* with the capabilities that these bring."""
    return {*wanted, *(_BRINGS[name] for name in wanted if name in _BRINGS)}
