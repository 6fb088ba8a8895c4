# SPDX-License-Identifier: Apache-2.0
"""Turn options like docker's into the OCI config that docker makes of them."""

from __future__ import annotations

import csv
import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdi import names, reasons
from cdi.complete import complete, in_user_namespace
from cdi.edits import apply
from cdi.errors import CdiError
from cdi.registry import Registry
from cdi.wire import OciConfig
from gpuruntime.errors import RequestError, UnresolvedDeviceError
from gpuruntime.request import driver_options, parse
from gpuruntime.request.container import shortened

# The hook that docker adds for `--gpus`, and the capabilities that it accepts there.
HOOK = "nvidia-container-runtime-hook"
DOCKER_CAPABILITIES = ("compute", "compat32", "graphics", "utility", "video", "display")
_NO_DRIVER_CAPABILITIES = ("gpu", "nvidia")
MAX_COUNT = 1024
_NODES = "/dev/nvidia"
_CAP_SYS_ADMIN = "CAP_SYS_ADMIN"
# Three of docker's 14: an empty list would mean something else.
_DEFAULT_CAPABILITIES = ("CAP_CHOWN", "CAP_KILL", "CAP_SETUID")
_GPUS_FORM = 'all, 2, device=0, or "device=0,1"'
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


@dataclass(slots=True)
class EngineContainer:
    """A container as an engine is asked for it.

    *env* are entries of the image and of the request, of which the last counts. *gpu_env* are
    those that the engine adds for a GPU request of its own, None without one. *mounts* are OCI
    mounts. *devices* are the CDI names that the engine resolves itself. *runtime* is the runtime
    that is named, "" for the engine's default. *notes* are sentences about what is not in here.
    """

    env: list[str] = field(default_factory=list)
    gpu_env: list[str] | None = None
    privileged: bool = False
    capabilities: list[str] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    has_user_namespace: bool = False
    runtime: str = ""
    notes: list[str] = field(default_factory=list)


def of_options(options: Options, environ: Mapping[str, str]) -> OciConfig:
    """Return the OCI config that docker makes of *options*, limited to what the runtime reads.

    *environ* are the caller's variables. `add_devices` adds CDI devices. Raises RequestError.
    """
    mounts = [
        *(_mount(_plain(text)) for text in options.mount),
        *(_volume(_plain(text)) for text in options.volume),
    ]
    return oci_config(
        EngineContainer(
            env=environment(options.image_env, options.env, environ),
            gpu_env=None if options.gpus is None else _gpus(options.gpus),
            privileged=options.privileged,
            capabilities=list(options.cap_add),
            mounts=mounts,
            annotations=dict(_pairs(options.annotation)),
            has_user_namespace=options.userns not in (None, "", "host"),
        )
    )


def oci_config(container: EngineContainer) -> OciConfig:
    """Return the OCI config that an engine makes of *container*: what the runtime reads of it."""
    hooks: dict[str, Any] = {}
    if container.gpu_env is not None:
        hook = {"path": f"/usr/bin/{HOOK}", "args": [HOOK, "prestart"]}
        hooks = {"hooks": {"prestart": [hook]}}
    namespaces = [{"type": kind} for kind in ("mount", "pid", "network", "ipc", "uts")]
    if container.has_user_namespace:
        namespaces.append({"type": "user"})
    allow = container.privileged
    return {
        "ociVersion": "1.2.0",
        "process": {
            "env": [*container.env, *(container.gpu_env or ())],
            "capabilities": {"bounding": _capabilities(container.capabilities, everything=allow)},
        },
        "root": {"path": "rootfs"},
        "mounts": container.mounts,
        "annotations": container.annotations,
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
                f'--device "{shortened(name)}" is not a CDI device name',
                'use a name such as "nvidia.com/gpu=0"; the engine alone decides on device nodes',
            )
        file = specs.find(name)
        if file is None:
            raise UnresolvedDeviceError(
                f'the engine cannot add "{name}": {reasons.why_unresolved(specs, name)}',
                'use a name that "gpuruntime cdi list" shows',
            )
        notes.append(f'the engine itself adds "{name}" from the CDI spec "{file.path}"')
    try:
        edits = complete(specs.resolve(devices), user_namespace=in_user_namespace(document))
    except CdiError as error:
        raise UnresolvedDeviceError(
            f"the engine cannot add a device: {error}",
            "load the driver of the device, or generate the spec again",
        ) from error
    apply(edits, document)
    return notes


def _plain(text: str) -> str:
    """Return *text* of the command line with invalid UTF-8 replaced, as Go writes it."""
    return os.fsencode(text).decode("utf-8", "replace")


def environment(
    image: Iterable[str], options: Iterable[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the entries of *image*, changed by those of *options*; raise RequestError.

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
    return volume_mount(text, "--volume")


def volume_mount(text: str, where: str) -> dict[str, Any]:
    """Return the mount of *text* in docker's short form, of *where*; raise RequestError."""
    parts = text.split(":")
    # One part is the path of a volume without a name.
    source, target = ("", parts[0]) if len(parts) == 1 else parts[:2]
    if len(parts) > 3 or not target.startswith("/"):
        raise _malformed(where, text, "/dev/null:/path")
    return bind_mount(source, target)


def bind_mount(source: str, target: str) -> dict[str, Any]:
    """Return the OCI mount of a bind mount."""
    return _oci_mount("bind", source, target)


def _oci_mount(kind: str, source: str, target: str) -> dict[str, Any]:
    mount = {"destination": posixpath.normpath(target), "type": kind, "source": source}
    return {**mount, "options": ["rbind", "rprivate"]}


def _gpus(text: str) -> list[str]:
    """Return the variables that docker sets for `--gpus`; raise RequestError.

    Docker's own device driver sets them, where docker does not use CDI.
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
            raise _malformed("--gpus", text, _GPUS_FORM)
    return gpu_variables(count, devices, words, "--gpus")


def gpu_variables(
    count: str | None, devices: str | None, capabilities: Iterable[str], where: str
) -> list[str]:
    """Return the variables that docker sets for a GPU request of *where*; raise RequestError.

    *count* is a number, "all" or "-1"; *devices* are ids with commas.
    """
    if count is not None and devices is not None:
        raise RequestError(f"{where} has both a count and devices", "remove one of the two")
    capabilities = list(capabilities)
    accepted = (*DOCKER_CAPABILITIES, *_NO_DRIVER_CAPABILITIES)
    unknown = [word for word in capabilities if word not in accepted]
    if unknown:
        raise RequestError(
            f'{where} has the capability "{shortened(unknown[0])}", which docker does not accept',
            f"use {', '.join(DOCKER_CAPABILITIES)}",
        )
    variables = [] if devices is None else [f"{parse.VISIBLE_DEVICES}={devices}"]
    if devices is None:
        variables = _counted(count or "1", where)
    driver_capabilities = [word for word in capabilities if word in DOCKER_CAPABILITIES]
    if driver_capabilities:
        variables.append(f"{driver_options.DRIVER_CAPABILITIES}={','.join(driver_capabilities)}")
    return variables


def add_gpu_request(
    container: EngineContainer,
    *,
    driver: str,
    count: str | None,
    ids: Sequence[str],
    capabilities: Sequence[str],
    where: str,
) -> None:
    """Add a device request of docker's API to *container*; raise RequestError.

    A request for another driver's devices is a note.
    """
    if driver == "cdi" or (ids and all(map(names.is_qualified, ids))):
        container.devices += ids
    elif driver in ("", "nvidia"):
        variables = gpu_variables(count, ",".join(ids) or None, capabilities, where)
        container.gpu_env = [*(container.gpu_env or ()), *variables]
    else:
        container.notes.append(f'{where} is for the driver "{shortened(driver)}"')


def add_device(container: EngineContainer, text: str) -> None:
    """Add a device as `--device` of an engine names it: a CDI name, or a path of the host."""
    if names.is_qualified(text):
        container.devices.append(text)
        return
    path = text.partition(":")[0]
    if path.startswith(_NODES):
        container.notes.append(
            f'the engine itself adds the node "{shortened(path)}", without the driver\'s files'
        )


def _counted(count: str, where: str) -> list[str]:
    if count in ("all", "-1"):
        return [f"{parse.VISIBLE_DEVICES}=all"]
    if not (count.isascii() and count.isdigit() and len(count) < 5 and int(count) <= MAX_COUNT):
        raise _malformed(where, count, _GPUS_FORM)
    # Docker counts from the first.
    indices = ",".join(map(str, range(int(count))))
    return [f"{parse.VISIBLE_DEVICES}={indices}"] if indices else []


def _fields(option: str, text: str, alone: str = "") -> list[tuple[str, str]]:
    """Return the keys and values of a line of CSV; *alone* is the key of a value without one."""
    try:
        (fields,) = csv.reader([text], strict=True)
    except (csv.Error, ValueError):
        fields = []
    if not fields:
        raise _malformed(option, text, "KEY=VALUE,KEY=VALUE")
    pairs = []
    for part in fields:
        name, equals, value = part.strip().partition("=")
        if alone and not equals:
            name, value = alone, name
        pairs.append((name.lower(), value))
    return pairs


def _malformed(option: str, text: str, form: str) -> RequestError:
    return RequestError(f'{option} "{shortened(text)}" is malformed', f"write it as {form}")
