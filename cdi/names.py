# SPDX-License-Identifier: Apache-2.0
"""Qualified device names, `vendor/class=device`: parse and check.

On the start path; pure. CDI SPEC.md, "Kind".
"""

from __future__ import annotations

from cdi.errors import CdiError

# Sets of characters, not patterns: importing `re` costs as much as the interpreter's start.
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_ALPHANUMERIC = _LETTERS | frozenset("0123456789")
_IN_NAME = _ALPHANUMERIC | frozenset("_.-")
_IN_DEVICE = _IN_NAME | frozenset(":")


def is_name(text: str) -> bool:
    """Return whether *text* can name a vendor or a class."""
    return text[:1] in _LETTERS and text[-1] in _ALPHANUMERIC and _IN_NAME.issuperset(text)


def is_device(text: str) -> bool:
    """Return whether *text* can name a device."""
    return text[:1] in _ALPHANUMERIC and text[-1] in _ALPHANUMERIC and _IN_DEVICE.issuperset(text)


def check_vendor(vendor: str) -> None:
    """Raise CdiError "vendor" unless *vendor* can name a vendor."""
    if not is_name(vendor):
        raise CdiError("vendor", f'"{vendor}" is not a vendor name')


def check_class(name: str) -> None:
    """Raise CdiError "class" unless *name* can name a class."""
    if not is_name(name):
        raise CdiError("class", f'"{name}" is not a class name')


def check_device(name: str) -> None:
    """Raise CdiError "device-name" unless *name* can name a device."""
    if not is_device(name):
        raise CdiError("device-name", f'"{name}" is not a device name')


def split_kind(kind: str) -> tuple[str, str]:
    """Split *kind* at its first slash into (vendor, class); ("", kind) if a side is missing."""
    vendor, slash, name = kind.partition("/")
    return (vendor, name) if slash and vendor and name else ("", kind)


def split_device(device: str) -> tuple[str, str, str]:
    """Split *device* into (vendor, class, name) unchecked; ("", "", device) if bare."""
    kind, equals, name = device.partition("=")
    if device.startswith("/") or not (equals and kind and name):
        return "", "", device
    vendor, cls = split_kind(kind)
    return (vendor, cls, name) if vendor else ("", "", device)


def parse_qualified(device: str) -> tuple[str, str, str]:
    """Return (vendor, class, name) of a qualified name; raise CdiError if it is not one."""
    vendor, cls, name = split_device(device)
    if not vendor:
        raise CdiError("vendor", f'"{device}" is not of the form vendor/class=device')
    check_vendor(vendor)
    check_class(cls)
    check_device(name)
    return vendor, cls, name


def is_qualified(device: str) -> bool:
    """Return whether *device* is a qualified name."""
    try:
        parse_qualified(device)
    except CdiError:
        return False
    return True
