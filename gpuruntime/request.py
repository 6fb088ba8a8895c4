# SPDX-License-Identifier: Apache-2.0
"""What a container asks for: its OCI config → device names; pure.

On the start path. The image writes these variables: their values are data, never paths.
"""

from __future__ import annotations

import re

from cdi import names
from gpuruntime.errors import RequestError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cdi.wire import OciConfig

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
# A config.json without any of these byte strings asks for nothing.
TRIGGERS = (b"NVIDIA_",)
MAX_REQUEST_CHARS = 64 << 10
_ESCAPE = re.compile(rb"\\u00([2-7][0-9A-Fa-f])")
_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./=:")


class Request(Record):
    """Devices by qualified name, in order, each once; none of them with `driver_only`."""

    __slots__ = ("devices", "driver_only")

    def __init__(self, devices: tuple[str, ...], *, driver_only: bool = False) -> None:
        self.devices = devices
        self.driver_only = driver_only

    def __bool__(self) -> bool:
        return bool(self.devices) or self.driver_only


def may_ask(data: bytes) -> bool:
    """Tell whether the bytes of a config.json may contain a request at all; errs towards True."""
    if any(word in data for word in TRIGGERS):
        return True
    # A trigger may be spelled with escapes; what Go escapes by habit (<, >, &) is harmless.
    return any(int(match.group(1), 16) in _WORD for match in _ESCAPE.finditer(data))


def from_oci(config: OciConfig, default_kind: str) -> Request:
    """Read the request from the environment of *config*; bare names get *default_kind*.

    Unset, empty and `void` ask for nothing, `none` for the driver alone, `all` for every GPU.
    Raises RequestError for what cannot be read.
    """
    value = _variable(config, VISIBLE_DEVICES)
    if value is None:
        return Request(())
    if len(value) > MAX_REQUEST_CHARS:
        raise RequestError(
            f"{VISIBLE_DEVICES} has {len(value)} characters", "name the devices, or use all"
        )
    tokens = [token for token in (part.strip() for part in value.split(",")) if token]
    if "void" in tokens:
        return Request(())
    special = next((token for token in tokens if token in ("all", "none")), None)
    if special == "none":
        return Request((), driver_only=True)
    if special:
        tokens = [special]
    return Request(tuple(dict.fromkeys(_qualified(token, default_kind) for token in tokens)))


def _qualified(token: str, default_kind: str) -> str:
    return token if names.is_qualified(token) else f"{default_kind}={token}"


def _variable(config: OciConfig, name: str) -> str | None:
    """Return the value of environment variable *name*; of repeats the last, as runc has it."""
    value = None
    for entry in (config.get("process") or {}).get("env") or ():
        key, equals, text = entry.partition("=")
        if equals and key == name:
            value = text
    return value
