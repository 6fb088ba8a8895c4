# SPDX-License-Identifier: Apache-2.0
"""Parse annotations that request devices, and check those of a spec; pure.

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
    """Return the sorted keys of *annotations* that request devices, and the devices.

    These are the keys that begin with PREFIX. Repeated devices are kept. Raises CdiError "device"
    if a value is not a list of qualified names, or contains blanks or an empty name.
    """
    mapping = _mapping(annotations)
    keys = sorted(key for key in mapping if isinstance(key, str) and key.startswith(PREFIX))
    devices: list[str] = []
    for key in keys:
        value = mapping[key]
        if not isinstance(value, str):
            raise CdiError("device", f'the value of "{key}" is not a string')
        devices += _checked(value.split(","), f'annotation "{key}": ')
    return keys, devices


def update(
    annotations: Mapping[str, str] | None, plugin: str, device_id: str, devices: Iterable[str]
) -> dict[str, str]:
    """Return *annotations* and one more, in which *plugin* requests *devices* as *device_id*.

    Raises CdiError: the key's categories (see `request_key`), "key-used" and "device".
    """
    _mapping(annotations)
    result = dict(annotations or {})
    key = request_key(plugin, device_id)
    if key in result:
        raise CdiError("key-used", f'the annotation "{key}" already exists')
    result[key] = ",".join(_checked(list(devices), ""))
    return result


def request_key(plugin: str, device_id: str) -> str:
    """Return the key with which *plugin*, usually `vendor.class`, requests *device_id*.

    Slashes of the id become underscores. Raises CdiError "plugin-empty", "device-id-empty",
    "key-too-long", "key-ends" or "key-character".
    """
    for category, part_name, part in (
        ("plugin-empty", "plugin", plugin),
        ("device-id-empty", "device id", device_id),
    ):
        if not isinstance(part, str):
            raise CdiError("key-character", f"the {part_name} is not a string")
        if not part:
            raise CdiError(category, f"the {part_name} is empty")
    name = f"{plugin}_{device_id.replace('/', '_')}"
    # Bytes: a character outside ASCII has several, and none of them is allowed.
    data = name.encode("utf-8", "surrogatepass")
    if len(data) > MAX_NAME_CHARS:
        raise CdiError("key-too-long", f'"{name}" has more than {MAX_NAME_CHARS} bytes')
    if not _END.match(data[:1]):
        raise CdiError("key-ends", f'"{name}" does not begin with a letter or digit')
    if not _INSIDE.match(data[1:-1]):
        text = f'"{name}" has characters other than letters, digits, "_", "-", "."'
        raise CdiError("key-character", text)
    if not _END.match(data[-1:]):
        raise CdiError("key-ends", f'"{name}" does not end with a letter or digit')
    return PREFIX + name


def check_key(key: str) -> None:
    """Raise CdiError "annotation" unless *key* is `prefix/name` or `name` by Kubernetes' rules."""
    text = _key_problem(key)
    if text:
        raise CdiError("annotation", f'annotation "{key}": {text}')


def check(annotations: Mapping[str, str] | None) -> None:
    """Raise CdiError "annotation" unless a spec's *annotations* follow Kubernetes' rules."""
    for key, text in annotation_problems(annotations):
        where = "annotations" if key is None else f'annotation "{key}"'
        raise CdiError("annotation", f"{where}: {text}")


def annotation_problems(
    annotations: Mapping[str, str] | None,
) -> Iterator[tuple[str | None, str]]:
    """Yield (key or None, message) for each problem that Kubernetes finds in *annotations*."""
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
    """Return the problem with *key*, "" if there is none."""
    if not isinstance(key, str):
        return "the key is not a string"
    prefix, slash, name = key.lower().rpartition("/")
    if slash and not (len(prefix) <= MAX_PREFIX_CHARS and _DNS_SUBDOMAIN.match(prefix)):
        return f'"{prefix}" is not a DNS subdomain of at most {MAX_PREFIX_CHARS} characters'
    if not (len(name) <= MAX_NAME_CHARS and _NAME.match(name)):
        limit = f'at most {MAX_NAME_CHARS} letters, digits, "-", "_", "."'
        return f'"{name}" is not a name of {limit}'
    return ""


def _size(value: object) -> int:
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0


def _mapping(annotations: object) -> Mapping[object, object]:
    """Return *annotations*, {} for None; raise CdiError "wrong-type" if it is not a map."""
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
