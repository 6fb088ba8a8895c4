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
# For a container that requests none.
DEFAULT = (COMPUTE, UTILITY)
ALL = (COMPAT32, COMPUTE, DISPLAY, GRAPHICS, NGX, UTILITY, VIDEO)
# Capability → the one that it requires, or that has the same files.
_BRINGS = {VIDEO: COMPUTE, DISPLAY: GRAPHICS}


def closed(names: Collection[str]) -> set[str]:
    """Return the capabilities *names* and those that they require."""
    return {*names, *(_BRINGS[name] for name in names if name in _BRINGS)}
