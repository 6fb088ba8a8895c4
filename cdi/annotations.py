# SPDX-License-Identifier: Apache-2.0
"""Annotations: devices that a container's annotations request, and the rules for a spec's; pure.

CDI SPEC.md, "annotations", and the Kubernetes API's rules for annotations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from cdi import names
from cdi.errors import CdiError

PREFIX = "cdi.k8s.io/"
# Kubernetes' limits.
MAX_NAME_CHARS = 63
MAX_PREFIX_CHARS = 253
MAX_TOTAL_BYTES = 256 << 10

_LABEL = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\Z")
_NAME = re.compile(r"[a-z0-9](?:[-_.a-z0-9]*[a-z0-9])?\Z")
_END = re.compile(rb"[A-Za-z0-9]\Z")
_INSIDE = re.compile(rb"[A-Za-z0-9_.-]*\Z")


def parse(annotations: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    """Return the keys of *annotations*, sorted, that ask for devices, and the devices.

    Any key that begins with PREFIX does. Repeated devices are kept. Raises CdiError "device" if
    a value is not a list of qualified names, without blanks or an empty name.
    """
    found = _mapping(annotations)
    keys = sorted(key for key in found if isinstance(key, str) and key.startswith(PREFIX))
    devices: list[str] = []
    for key in keys:
        value = found[key]
        if not isinstance(value, str):
            raise CdiError("device", f'the value of "{key}" is not a string')
        devices += _checked(value.split(","), f'annotation "{key}": ')
    return keys, devices


def update(
    annotations: Mapping[str, str] | None, plugin: str, device_id: str, devices: Iterable[str]
) -> dict[str, str]:
    """Return *annotations* and one more, by which *plugin* asks for *devices* as *device_id*.

    Raises CdiError: the key's categories (see `request_key`), "key-used" and "device".
    """
    _mapping(annotations)
    result = dict(annotations or {})
    key = request_key(plugin, device_id)
    if key in result:
        raise CdiError("key-used", f'the annotation "{key}" is there already')
    result[key] = ",".join(_checked(list(devices), ""))
    return result


def request_key(plugin: str, device_id: str) -> str:
    """Return the key by which *plugin*, usually `vendor.class`, asks for devices as *device_id*.

    Slashes of the id become underscores. Raises CdiError "plugin-empty", "device-id-empty",
    "key-too-long", "key-ends" or "key-character".
    """
    for category, what, part in (
        ("plugin-empty", "plugin", plugin),
        ("device-id-empty", "device id", device_id),
    ):
        if not isinstance(part, str):
            raise CdiError("key-character", f"the {what} is not a string")
        if not part:
            raise CdiError(category, f"the {what} is empty")
    name = f"{plugin}_{device_id.replace('/', '_')}"
    # Bytes: what is not ASCII has several, none of which is allowed anywhere.
    data = name.encode("utf-8", "surrogatepass")
    if len(data) > MAX_NAME_CHARS:
        raise CdiError("key-too-long", f'"{name}" has more than {MAX_NAME_CHARS} bytes')
    if not _END.match(data[:1]):
        raise CdiError("key-ends", f'"{name}" does not begin with a letter or digit')
    if not _INSIDE.match(data[1:-1]):
        text = f'"{name}" has other characters than letters, digits, "_", "-", "."'
        raise CdiError("key-character", text)
    if not _END.match(data[-1:]):
        raise CdiError("key-ends", f'"{name}" does not end with a letter or digit')
    return PREFIX + name


def check_key(key: str) -> None:
    """Raise CdiError "annotation" unless *key* is `prefix/name` or `name` by Kubernetes' rule."""
    text = _key_problem(key)
    if text:
        raise CdiError("annotation", f'annotation "{key}": {text}')


def check(annotations: Mapping[str, str] | None) -> None:
    """Raise CdiError "annotation" unless *annotations* of a spec are by Kubernetes' rule."""
    for key, text in annotation_problems(annotations):
        where = "annotations" if key is None else f'annotation "{key}"'
        raise CdiError("annotation", f"{where}: {text}")


def annotation_problems(
    annotations: Mapping[str, str] | None,
) -> Iterator[tuple[str | None, str]]:
    """Yield (key or None, what is wrong) for what Kubernetes would refuse in *annotations*."""
    size = 0
    for key, value in _mapping(annotations).items():
        text = _key_problem(key)
        if text:
            yield str(key), text
        if not isinstance(value, str):
            yield str(key), "its value is not a string"
        size += _size(key) + _size(value)
    if size > MAX_TOTAL_BYTES:
        yield None, f"keys and values have {size} bytes, more than {MAX_TOTAL_BYTES}"


def _key_problem(key: object) -> str:
    """Return what is wrong with *key*, "" if nothing is."""
    if not isinstance(key, str):
        return "the key is not a string"
    prefix, slash, name = key.lower().rpartition("/")
    if slash and not (len(prefix) <= MAX_PREFIX_CHARS and _DNS_SUBDOMAIN.match(prefix)):
        return f'"{prefix}" is no DNS subdomain of at most {MAX_PREFIX_CHARS} characters'
    if not (len(name) <= MAX_NAME_CHARS and _NAME.match(name)):
        limit = f'at most {MAX_NAME_CHARS} letters, digits, "-", "_", "."'
        return f'"{name}" is no name of {limit}'
    return ""


def _size(value: object) -> int:
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0


def _mapping(annotations: object) -> Mapping[object, object]:
    """Return *annotations*, of which anything may be said until somebody has looked."""
    if annotations is None:
        return {}
    if not isinstance(annotations, Mapping):
        raise CdiError("wrong-type", "annotations are not a map")
    return annotations


def _checked(devices: list[str], where: str) -> list[str]:
    """Return *devices*; raise CdiError "device" unless all are qualified names."""
    for device in devices:
        if not isinstance(device, str):
            raise CdiError("device", f"{where}a device is not a string")
        try:
            names.parse_qualified(device)
        except CdiError as error:
            raise CdiError("device", f"{where}{error.message}") from error
    return devices
