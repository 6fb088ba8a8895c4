# SPDX-License-Identifier: Apache-2.0
"""Find the driver's version in what the module reports and in names of libraries; pure.

On the start path.
"""

from __future__ import annotations

# Not by `re`, whose import costs a Python start.
# "Kernel Module  550.163.01  …", or "Open Kernel Module for x86_64  550.163.01  …".
_MODULE = "Kernel Module"


def is_version(text: str) -> bool:
    """Return whether *text* is a driver version: two numbers or more with dots between them."""
    numbers = text.split(".")
    return len(numbers) > 1 and all(number.isascii() and number.isdigit() for number in numbers)


def of_module_text(text: str) -> str:
    """Return the version in the text that the loaded module reports, "" if it has none."""
    for line in text.split("\n"):
        rest = line.partition(_MODULE)[2]
        for word in rest.split() if rest[:1].isspace() else ():
            if is_version(word):
                return word
    return ""


def of_name(name: str) -> str:
    """Return the driver's version in the name of a library, "" if it has none."""
    suffix = name.partition(".so.")[2]
    return suffix if is_version(suffix) else ""
