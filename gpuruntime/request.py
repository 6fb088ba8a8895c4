# SPDX-License-Identifier: Apache-2.0
"""What a container asks for, and may: its OCI config and the operator's policy → devices; pure.

On the start path. The image may ask, by variables, labels and mounts; only the policy grants.
What it writes is data here, never a path or a pattern.
"""

from __future__ import annotations

import posixpath
import re

from cdi import names
from gpuruntime.errors import RequestError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from cdi.wire import OciConfig

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
# A mount of /dev/null below here asks for the device that the rest of its destination names.
MOUNT_ROOT = "/var/run/nvidia-container-devices"
# Every device of the host, for who looks after them: not what an image may ask for by itself.
MANAGEMENT_VENDOR = "management.nvidia.com"
OUR_VENDORS = ("nvidia.com", "runtime.nvidia.com", MANAGEMENT_VENDOR)
MAX_REQUEST_CHARS = 64 << 10
MAX_REQUESTS = 10_000
_ESCAPE = re.compile(rb"\\u00([2-7][0-9A-Fa-f])")
_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./=:")


class Policy(Record):
    """What the operator allows.

    *default_kind* is that of names without a kind. *env_when_unprivileged*: variables count in
    containers without CAP_SYS_ADMIN too. *mounts*: requests by mounts count. *swarm*: variables
    that stand in for NVIDIA_VISIBLE_DEVICES. *annotations*: prefixes of keys whose values ask.
    """

    __slots__ = ("annotations", "default_kind", "env_when_unprivileged", "mounts", "swarm")

    def __init__(
        self,
        default_kind: str,
        *,
        env_when_unprivileged: bool = True,
        mounts: bool = False,
        swarm: tuple[str, ...] = (),
        annotations: tuple[str, ...] = ("cdi.k8s.io/",),
    ) -> None:
        self.default_kind = default_kind
        self.env_when_unprivileged = env_when_unprivileged
        self.mounts = mounts
        self.swarm = swarm
        self.annotations = annotations


class Request(Record):
    """Devices by qualified name, in order, each once; none of them with *driver_only*.

    *ignored* are sentences about what was asked for and does not count.
    """

    __slots__ = ("devices", "driver_only", "ignored")

    def __init__(
        self,
        devices: tuple[str, ...],
        *,
        driver_only: bool = False,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.devices = devices
        self.driver_only = driver_only
        self.ignored = ignored

    def __bool__(self) -> bool:
        return bool(self.devices) or self.driver_only


def triggers(policy: Policy) -> tuple[bytes, ...]:
    """Return byte strings without any of which a config.json asks for nothing."""
    words = ["NVIDIA_", "CUDA_VERSION", *policy.swarm, *policy.annotations]
    if policy.mounts:
        words.append(posixpath.basename(MOUNT_ROOT))
    return tuple(word.encode() for word in words if word)


def may_ask(data: bytes, policy: Policy) -> bool:
    """Tell whether the bytes of a config.json may contain a request at all; errs towards True."""
    if any(word in data for word in triggers(policy)):
        return True
    # A trigger may be spelled with escapes; what Go escapes by habit (<, >, &) is harmless.
    return any(int(match.group(1), 16) in _WORD for match in _ESCAPE.finditer(data))


def from_oci(config: OciConfig, policy: Policy) -> Request:
    """Return the request of *config*: by annotations, else by mounts, else by variables.

    Of variables, unset, empty and `void` ask for nothing, `none` for the driver alone, `all` for
    every GPU. Raises RequestError for what cannot be read, or is not to be had by asking.
    """
    environment = _environment(config)
    ignored: list[str] = []
    # Whoever injected already has left this: asking twice must not give more.
    injected = "void" in _tokens(environment.get(VISIBLE_DEVICES, ""))
    for source, asked in (
        ("annotations", _from_annotations(config, policy)),
        ("mounts", _from_mounts(config)),
    ):
        if not asked:
            continue
        if source == "mounts" and not policy.mounts:
            ignored.append(f"devices asked for by mounts are not allowed: {_shown(asked)}")
            continue
        found = [_qualified(name, policy) for name in asked]
        if injected:
            others = [name for name in found if not _is_ours(name, policy)]
            if len(others) < len(found):
                ignored.append(f"devices are there already; {source} ask for {_shown(asked)}")
            found = others
        if found:
            return _request(found, config, policy, ignored)
    return _from_environment(environment, config, policy, ignored)


def _from_environment(
    environment: dict[str, str], config: OciConfig, policy: Policy, ignored: list[str]
) -> Request:
    there = [name for name in policy.swarm if name in environment]
    if there:
        tokens = [token for name in there for token in _tokens(environment[name])]
    elif VISIBLE_DEVICES in environment:
        tokens = _tokens(environment[VISIBLE_DEVICES])
    elif environment.get("CUDA_VERSION") and not environment.get("NVIDIA_REQUIRE_CUDA"):
        # Images of CUDA before 8 ask for every GPU by having no variable of ours.
        tokens = ["all"]
    else:
        tokens = []
    if not tokens or "void" in tokens:
        return Request((), ignored=tuple(ignored))
    if not (policy.env_when_unprivileged or _is_privileged(config)):
        what = f"devices asked for by variables in an unprivileged container: {_shown(tokens)}"
        return Request((), ignored=(*ignored, what))
    special = next((token for token in tokens if token in ("all", "none")), None)
    if special == "none":
        return Request((), driver_only=True, ignored=tuple(ignored))
    if special:
        tokens = [special]
    return _request([_qualified(token, policy) for token in tokens], config, policy, ignored)


def _request(found: list[str], config: OciConfig, policy: Policy, ignored: list[str]) -> Request:
    if len(found) > MAX_REQUESTS:
        raise RequestError(f"{len(found)} devices are asked for", "name the devices once, or all")
    if not policy.default_kind.startswith(f"{MANAGEMENT_VENDOR}/") and not _is_privileged(config):
        for name in found:
            if name.startswith(f"{MANAGEMENT_VENDOR}/"):
                raise RequestError(
                    f'"{name}" is for privileged containers',
                    'ask for devices of "nvidia.com/gpu", or run the container privileged',
                )
    return Request(tuple(dict.fromkeys(found)), ignored=tuple(ignored))


def _from_annotations(config: OciConfig, policy: Policy) -> list[str]:
    annotations: Any = config.get("annotations") or {}
    if not policy.annotations or not isinstance(annotations, dict):
        return []
    found: list[str] = []
    for key in sorted(annotations):
        if key.startswith(policy.annotations):
            value = annotations[key]
            if not isinstance(value, str):
                raise RequestError(f'the annotation "{key}" is not a string', "give it names")
            found += [name for name in _checked(value, key).split(",") if name]
    return found


def _from_mounts(config: OciConfig) -> list[str]:
    found: dict[str, None] = {}
    for mount in config.get("mounts") or ():
        source = mount.get("source")
        if not isinstance(source, str) or posixpath.normpath(source or ".") != "/dev/null":
            continue
        place = posixpath.normpath(mount.get("destination") or ".")
        if not place.startswith(f"{MOUNT_ROOT}/"):
            continue
        name = _checked(place[len(MOUNT_ROOT) :].strip("/"), "a mount's destination")
        kind, _, rest = name.partition("/")
        if kind == "imex":
            # Not a device of CDI.
            continue
        if kind == "cdi":
            vendor, _, rest = rest.partition("/")
            cls, separator, device = rest.partition("/")
            name = f"{vendor}/{cls}={device}" if separator else f"{vendor}/{rest}"
            if not names.is_qualified(name):
                continue
        found[name] = None
    return list(found)


def _tokens(value: str) -> list[str]:
    return [token for token in (part.strip() for part in value.split(",")) if token]


def _shown(asked: Iterable[str]) -> str:
    """Return the first of the names that an image wrote."""
    return ", ".join(f'"{name[:64]}"' for name in list(asked)[:8])


def _checked(value: str, where: str) -> str:
    if len(value) > MAX_REQUEST_CHARS:
        raise RequestError(f"{where} has {len(value)} characters", "name the devices, or use all")
    return value


def _qualified(token: str, policy: Policy) -> str:
    return token if names.is_qualified(token) else f"{policy.default_kind}={token}"


def _is_ours(name: str, policy: Policy) -> bool:
    kind = name.partition("=")[0]
    return kind == policy.default_kind or kind.partition("/")[0] in OUR_VENDORS


def _is_privileged(config: OciConfig) -> bool:
    """Tell whether the container has CAP_SYS_ADMIN to lose."""
    capabilities = (config.get("process") or {}).get("capabilities")
    bounding = capabilities.get("bounding") if isinstance(capabilities, dict) else None
    return isinstance(bounding, list) and "CAP_SYS_ADMIN" in bounding


def _environment(config: OciConfig) -> dict[str, str]:
    """Return the container's variables; of repeats the last counts, as with runc."""
    found = {}
    for entry in (config.get("process") or {}).get("env") or ():
        name, equals, value = entry.partition("=")
        if equals:
            found[name] = _checked(value, name) if name == VISIBLE_DEVICES else value
    return found
