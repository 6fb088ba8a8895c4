# SPDX-License-Identifier: Apache-2.0
"""Find the driver's version in what the module reports and in names of libraries; pure.

On the start path.
"""

from __future__ import annotations

import re

# "Kernel Module  550.163.01  …", or "Open Kernel Module for x86_64  550.163.01  …".
_MODULE_VERSION = re.compile(r"Kernel Module\b.*?\s([0-9]+(?:\.[0-9]+)+)(?:\s|$)")
VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+\Z")


def of_module_text(text: str) -> str:
    """Return the version in the text that the loaded module reports, "" if it has none."""
    match = _MODULE_VERSION.search(text)
    return match[1] if match else ""


def of_name(name: str) -> str:
    """Return the driver's version in the name of a library, "" if it has none."""
    suffix = name.partition(".so.")[2]
    return suffix if VERSION.match(suffix) else ""
