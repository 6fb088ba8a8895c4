# SPDX-License-Identifier: Apache-2.0
"""Typed access to the values of a file that `gpuruntime explain` reads; pure.

*where* names the value in the file, such as `services.web.devices`. A value of another type is a
RequestError that names it.
"""

from __future__ import annotations

from typing import Any

from cdi import document
from gpuruntime.errors import RequestError
from gpuruntime.request.container import shortened


def mapping(value: object, where: str) -> dict[str, Any]:
    """Return the map *value*, {} for null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(where, "a map")
    return value


def items(value: object, where: str) -> list[Any]:
    """Return the list *value*, [] for null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(where, "a list")
    return value


def text(value: object, where: str) -> str:
    """Return the string that *value* is or stands for, "" for null."""
    if value is None:
        return ""
    if not isinstance(value, (str, int, float)):
        raise _wrong(where, "a string")
    return document.scalar_text(value)


def texts(value: object, where: str) -> list[str]:
    """Return the list of strings *value*."""
    return [text(item, f"{where}[{i}]") for i, item in enumerate(items(value, where))]


def flag(value: object, where: str) -> bool:
    """Return the boolean *value*, False for null."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(where, "true or false")
    return value


def pairs(value: object, where: str) -> dict[str, str]:
    """Return the map of strings *value*."""
    return {
        str(name): text(item, f"{where}.{name}") for name, item in mapping(value, where).items()
    }


def _wrong(where: str, kind: str) -> RequestError:
    return RequestError(f"{shortened(where)} is not {kind}", "correct the file")
