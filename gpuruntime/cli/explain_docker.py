# SPDX-License-Identifier: Apache-2.0
"""Turn options like docker's into the OCI config that docker would make of them."""

from __future__ import annotations

import csv
import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdi import names, reasons
from cdi.complete import complete, in_user_namespace
from cdi.edits import apply
from cdi.errors import CdiError
from cdi.registry import Registry
from cdi.wire import OciConfig
from gpuruntime.errors import RequestError, UnresolvedDeviceError
from gpuruntime.request.container import shortened

# The hook that docker adds for `--gpus`, and the words that it takes for capabilities there.
HOOK = "nvidia-container-runtime-hook"
DOCKER_CAPABILITIES = ("compute", "compat32", "graphics", "utility", "video", "display")
_NO_DRIVER_CAPABILITIES = ("gpu", "nvidia")
MAX_COUNT = 1024
_CAP_SYS_ADMIN = "CAP_SYS_ADMIN"
# Of docker's 14: whether there are any tells one config from one without the member.
_DEFAULT_CAPABILITIES = ("CAP_CHOWN", "CAP_KILL", "CAP_SETUID")
_SOURCE = ("source", "src")
_TARGET = ("target", "destination", "dst")
_FLAGS = ("readonly", "ro", "consistency")
_PREFIXES = ("bind-", "volume-", "tmpfs-", "image-")


@dataclass(frozen=True, slots=True)
class Options:
    """The options like docker's, as on the command line."""

    env: tuple[str, ...] = ()
    image_env: tuple[str, ...] = ()
    privileged: bool = False
    cap_add: tuple[str, ...] = ()
    mount: tuple[str, ...] = ()
    volume: tuple[str, ...] = ()
    annotation: tuple[str, ...] = ()
    gpus: str | None = None
    device: tuple[str, ...] = ()
    userns: str | None = None


def of_options(options: Options, environ: Mapping[str, str]) -> OciConfig:
    """Return the OCI config that docker makes of *options*, as far as it matters here.

    *environ* are the caller's variables. `add_devices` adds CDI devices. Raises RequestError.
    """
    env = _environment(options.image_env, options.env, environ)
    hooks: dict[str, Any] = {}
    if options.gpus is not None:
        env += _gpus(options.gpus)
        hook = {"path": f"/usr/bin/{HOOK}", "args": [HOOK, "prestart"]}
        hooks = {"hooks": {"prestart": [hook]}}
    mounts = [
        *(_mount(_plain(text)) for text in options.mount),
        *(_volume(_plain(text)) for text in options.volume),
    ]
    namespaces = [{"type": kind} for kind in ("mount", "pid", "network", "ipc", "uts")]
    if options.userns not in (None, "", "host"):
        namespaces.append({"type": "user"})
    allow = options.privileged
    return {
        "ociVersion": "1.2.0",
        "process": {
            "env": env,
            "capabilities": {"bounding": _capabilities(options.cap_add, everything=allow)},
        },
        "root": {"path": "rootfs"},
        "mounts": [mount for mount in mounts if mount],
        "annotations": dict(_pairs(options.annotation)),
        "linux": {
            "namespaces": namespaces,
            "resources": {"devices": [{"allow": allow, "access": "rwm"}]},
        },
        **hooks,
    }


def add_devices(document: OciConfig, devices: Sequence[str], specs: Registry) -> list[str]:
    """Change *document* as an engine does for `--device` with CDI names; return notes on it.

    The engine reads the specs itself, before the runtime sees config.json. Raises RequestError
    and UnresolvedDeviceError.
    """
    notes = []
    for name in devices:
        if not names.is_qualified(name):
            raise RequestError(
                f'--device "{shortened(name)}" is no name of CDI',
                'write it as "nvidia.com/gpu=0"; devices of the host are up to the engine',
            )
        file = specs.find(name)
        if file is None:
            raise UnresolvedDeviceError(
                f'the engine cannot add "{name}": {reasons.why_unresolved(specs, name)}',
                'ask for names that "gpuruntime cdi list" shows',
            )
        notes.append(
            f'the engine itself adds "{name}", from the CDI spec "{file.path}"; '
            "what the runtime adds is beside that"
        )
    try:
        edits = complete(specs.resolve(devices), user_namespace=in_user_namespace(document))
    except CdiError as error:
        raise UnresolvedDeviceError(
            f"the engine cannot add a device: {error}",
            "load the driver of the device, or write the spec again",
        ) from error
    apply(edits, document)
    return notes


def _plain(text: str) -> str:
    """Return *text* of the command line with what is no UTF-8 replaced, as Go writes it."""
    return os.fsencode(text).decode("utf-8", "replace")


def _environment(
    image: Iterable[str], options: Iterable[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the entries of *image*, changed by those of *options*.

    In *options*, a name alone takes the value from *environ*, or else removes the variable.
    """
    variables: dict[str, str] = {}
    for text in image:
        name, equals, _ = text.partition("=")
        if not (name and equals):
            raise _malformed("--image-env", text, "NAME=VALUE")
        variables[name] = _plain(text)
    for text in options:
        name, equals, _ = text.partition("=")
        if not name:
            raise _malformed("--env", text, "NAME=VALUE or NAME")
        if equals:
            variables[name] = _plain(text)
        elif name in environ:
            variables[name] = _plain(f"{name}={environ[name]}")
        else:
            variables.pop(name, None)
    return list(variables.values())


def _capabilities(added: Iterable[str], *, everything: bool) -> list[str]:
    upper = [name.upper() for name in map(_plain, added)]
    capabilities = [name if name.startswith("CAP_") else f"CAP_{name}" for name in upper]
    if everything or "CAP_ALL" in capabilities:
        capabilities.append(_CAP_SYS_ADMIN)
    return sorted({*_DEFAULT_CAPABILITIES, *capabilities} - {"CAP_ALL"})


def _pairs(texts: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in map(_plain, texts):
        name, _, value = text.partition("=")
        if not name:
            raise _malformed("--annotation", text, "NAME=VALUE")
        yield name, value


def _mount(text: str) -> dict[str, Any]:
    """Return the mount of `--mount`, also in the form of `--volume`; raise RequestError."""
    if text.startswith("/"):
        return _volume(text)
    members = dict(_fields("--mount", text))
    keys = {*_SOURCE, *_TARGET, *_FLAGS, "type"}
    for name in members:
        if name not in keys and not name.startswith(_PREFIXES):
            raise RequestError(
                f'--mount "{shortened(text)}" has the unknown key "{shortened(name)}"',
                "write it as type=bind,source=/dev/null,target=/path",
            )
    source = next((members[name] for name in _SOURCE if name in members), "")
    target = next((members[name] for name in _TARGET if name in members), "")
    kind = members.get("type", "volume")
    if not target.startswith("/") or (kind == "bind" and not source.startswith("/")):
        raise _malformed("--mount", text, "type=bind,source=/dev/null,target=/path")
    return _oci_mount(kind, source, target)


def _volume(text: str) -> dict[str, Any]:
    """Return the mount of docker's `--volume`; raise RequestError."""
    parts = text.split(":")
    # One part is the path of a volume without a name.
    source, target = ("", parts[0]) if len(parts) == 1 else parts[:2]
    if len(parts) > 3 or not target.startswith("/"):
        raise _malformed("--volume", text, "/dev/null:/path")
    return _oci_mount("bind", source, target)


def _oci_mount(kind: str, source: str, target: str) -> dict[str, Any]:
    mount = {"destination": posixpath.normpath(target), "type": kind, "source": source}
    return {**mount, "options": ["rbind", "rprivate"]}


def _gpus(text: str) -> list[str]:
    """Return the variables that docker sets for `--gpus`; raise RequestError.

    Its own driver for these devices does so, which is there where docker does not use CDI.
    """
    count: str | None = None
    devices: str | None = None
    words: list[str] = []
    for name, value in _fields("--gpus", _plain(text), alone="count"):
        if name == "count" and count is None:
            count = value
        elif name == "device" and devices is None:
            devices = value
        elif name == "capabilities":
            words += value.split(",")
        elif not (name == "options" or (name == "driver" and value in ("", "nvidia"))):
            raise _malformed("--gpus", text, 'all, 2, device=0, or "device=0,1"')
    if count is not None and devices is not None:
        raise RequestError("--gpus has a count and devices", "give it one of the two")
    unknown = [w for w in words if w not in (*DOCKER_CAPABILITIES, *_NO_DRIVER_CAPABILITIES)]
    if unknown:
        raise RequestError(
            f'--gpus has the capability "{shortened(unknown[0])}", which docker does not take',
            f"name some of {', '.join(DOCKER_CAPABILITIES)}",
        )
    variables = [] if devices is None else [f"NVIDIA_VISIBLE_DEVICES={devices}"]
    if devices is None:
        variables = _counted(count or "1")
    wanted = [word for word in words if word in DOCKER_CAPABILITIES]
    if wanted:
        variables.append(f"NVIDIA_DRIVER_CAPABILITIES={','.join(wanted)}")
    return variables


def _counted(count: str) -> list[str]:
    if count in ("all", "-1"):
        return ["NVIDIA_VISIBLE_DEVICES=all"]
    if not (count.isascii() and count.isdigit() and len(count) < 5 and int(count) <= MAX_COUNT):
        raise _malformed("--gpus", count, 'all, 2, device=0, or "device=0,1"')
    # Docker counts from the first.
    indices = ",".join(map(str, range(int(count))))
    return [f"NVIDIA_VISIBLE_DEVICES={indices}"] if indices else []


def _fields(option: str, text: str, alone: str = "") -> list[tuple[str, str]]:
    """Return the keys and values of a line of CSV; a value without a key is one of *alone*."""
    try:
        (fields,) = csv.reader([text], strict=True)
    except (csv.Error, ValueError):
        fields = []
    if not fields:
        raise _malformed(option, text, "KEY=VALUE,KEY=VALUE")
    pairs = []
    for field in fields:
        name, equals, value = field.strip().partition("=")
        if alone and not equals:
            name, value = alone, name
        pairs.append((name.lower(), value))
    return pairs


def _malformed(option: str, text: str, form: str) -> RequestError:
    return RequestError(f'{option} "{shortened(text)}" cannot be read', f"write it as {form}")
