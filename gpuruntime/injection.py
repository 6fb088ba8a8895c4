# SPDX-License-Identifier: Apache-2.0
"""An OCI config and the operator's config → what is added to the container: decided, not done.

On the start path. The shim does what is decided here, `gpuruntime explain` prints it. What there
is to know of the machine comes from a Host, which nothing here changes, but for one thing: the
Host may be asked to make device nodes that are missing.
"""

from __future__ import annotations

import os
import posixpath
import re

from cdi.complete import complete, in_user_namespace
from cdi.edits import allows_all, apply
from cdi.errors import CdiError
from gpuruntime import automatic, programs, request, resolve, stale
from gpuruntime import config as settings
from gpuruntime.automatic import Grant
from gpuruntime.errors import DiscoveryError, DriverError, SpecError, UnresolvedDeviceError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol

    from cdi.registry import Registry
    from cdi.wire import Edits, OciConfig
    from gpuruntime.config import Config
    from gpuruntime.errors import GpuRuntimeError
    from gpuruntime.model import Inventory
    from gpuruntime.request import Request

    class Host(Protocol):
        """What `decide` asks of the machine."""

        def inventory(self, *, fresh: bool) -> tuple[Inventory, bool]:
            """Return what the machine has, and whether that was asked of the driver just now.

            With *fresh* it is. Raises DriverError and DiscoveryError.
            """

        def registry(self) -> Registry:
            """Return the CDI specs."""

        def program(self, name: str) -> str:
            """Return the path of the hook program *name*; raise ConfigError if there is none."""

        def make_nodes(self, minors: Sequence[int]) -> bool:
            """Have the driver make its nodes and those of *minors*; tell whether it was tried."""


# What a prestart hook of the incumbent's looks for on PATH, and no variable of the image.
_PRESTART_ENV = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
# A hint names the devices by index, not each by its UUID as well.
_MAX_NAMES_IN_HINT = 20
_MAX_NAME_IN_HINT = 32
_GPU_NODE = re.compile(r"/dev/nvidia([0-9]{1,4})\Z")
# What `missing-gpu = "warn"` lets pass: what is not there, not what may not be had.
_MISSING = (UnresolvedDeviceError, DriverError, DiscoveryError, SpecError)


class Injection(Record):
    """What is decided: for the request *asked*, the completed *edits*, None for none at all.

    *prestart* is a hook to add, *removed* the indices of prestart hooks to take away. *warnings*
    and *notes* are sentences about it. *error* is why a container starts without what it asks for.
    """

    __slots__ = ("asked", "edits", "error", "notes", "prestart", "removed", "warnings")

    def __init__(
        self,
        asked: Request,
        edits: Edits | None = None,
        *,
        prestart: dict[str, Any] | None = None,
        removed: Sequence[int] = (),
        warnings: Sequence[str] = (),
        notes: Sequence[str] = (),
        error: GpuRuntimeError | None = None,
    ) -> None:
        self.asked = asked
        self.edits = edits
        self.prestart = prestart
        self.removed = tuple(removed)
        self.warnings = tuple(warnings)
        self.notes = tuple(notes)
        self.error = error

    def apply(self, document: OciConfig) -> bool:
        """Do to *document* what is decided; tell whether that changes anything."""
        if self.removed:
            hooks = document["hooks"]
            kept = [hook for i, hook in enumerate(hooks["prestart"]) if i not in self.removed]
            if kept:
                hooks["prestart"] = kept
            else:
                del hooks["prestart"]
        if self.edits is not None:
            there = len(_device_rules(document))
            apply(self.edits, document)
            if self.asked.mode == settings.LEGACY:
                # What asks for them is still there, for the hook: here we may have been before.
                _drop_repeated(_device_rules(document), there)
        if self.prestart is not None:
            if document.get("hooks") is None:
                document["hooks"] = {}
            hooks = document["hooks"]
            hooks["prestart"] = [*(hooks.get("prestart") or ()), self.prestart]
        return bool(self.removed or self.edits is not None or self.prestart is not None)


def decide(document: OciConfig, config: Config, host: Host) -> Injection:
    """Return what the container of *document* gets under *config*.

    Raises GpuRuntimeError for what is malformed, not allowed or not there, the last unless the
    operator says that such containers start.
    """
    asked = request.from_oci(document, config)
    engine_hooks = _engine_hooks(document)
    is_legacy = (asked.mode or config.mode) == settings.LEGACY
    # Where we are in front of the low-level runtime, nothing is left for it to do.
    removed = () if is_legacy else engine_hooks
    if not asked:
        return Injection(asked, removed=removed)
    try:
        find = _automatic if asked.is_automatic else _from_specs
        found = find(asked, config, host)
        edits = _completed(found.edits, asked, document, config, host)
    except _MISSING as error:
        if config["missing-gpu"] != "warn":
            raise
        warning = f"starts without what it asks for: {error}"
        return Injection(asked, removed=engine_hooks, warnings=(warning,), error=error)
    warnings = [*found.warnings]
    if allows_all(document) and asked.ids != (resolve.ALL,):
        warnings.append("its device rules allow every device, whichever it asks for: privileged")
    lost = _lost_on_reload(edits, document)
    if lost:
        warnings.append(
            f'no "/dev/char" link for {", ".join(lost)}: the container loses them at '
            '"systemctl daemon-reload"; run "gpuruntime system create-dev-char-symlinks"'
        )
    return Injection(
        asked,
        edits,
        prestart=_prestart(document, host) if is_legacy and not engine_hooks else None,
        removed=removed,
        warnings=warnings,
        notes=found.notes,
    )


def _automatic(asked: Request, config: Config, host: Host) -> Grant:
    """Return the edits for what the machine has now."""
    inventory = inventory_for(asked, host.inventory)
    # A hook of ours would find nothing to do in the legacy mode.
    path = "" if asked.mode == settings.LEGACY else host.program(programs.HOOK)
    return automatic.grant(asked, inventory, config, automatic.style(config, path))


def inventory_for(asked: Request, read: Callable[..., tuple[Inventory, bool]]) -> Inventory:
    """Return an inventory that has what *asked* names, if the machine has it.

    *read* is as `Host.inventory`. MIG devices come and go without a trace: for them, and for what
    is not found, the driver is asked. Raises DriverError, DiscoveryError, RequestError.
    """
    inventory, is_fresh = read(fresh=False)
    try:
        has_mig = any(device.mig for device in automatic.devices(asked, inventory))
    except UnresolvedDeviceError:
        has_mig = True
    if has_mig and not is_fresh:
        inventory, _ = read(fresh=True)
    return inventory


def _from_specs(asked: Request, config: Config, host: Host) -> Grant:
    """Return the edits of CDI specs for the devices of *asked*."""
    known = host.registry()
    warnings = [
        f'CDI spec "{file.path}" is not used: {file.error.category}: {file.error}'
        for file in known.files
        if file.error is not None
    ]
    if asked.driver_only:
        edits = known.common_edits(config.default_kind)
        if edits is None:
            raise _unresolved([config.default_kind], known)
    else:
        try:
            edits = known.resolve(asked.devices)
        except CdiError as error:
            missing = [name for name in asked.devices if known.find(name) is None]
            raise _unresolved(missing, known) from error
    ours = [name for name in asked.devices if request.is_ours(name, config)]
    if asked.driver_only or ours:
        # Of another vendor's files we cannot say what they depend on.
        stale.check(edits if asked.driver_only else known.resolve(ours))
    return Grant(edits, warnings=warnings)


def _unresolved(names: Sequence[str], known: Registry) -> GpuRuntimeError:
    """Return the error for *names* that no CDI spec defines, with the most helpful hint."""
    wanted = ", ".join(f'"{name}"' for name in names)
    # Not those of the config: it may name none, which means the usual ones.
    where = ", ".join(f'"{directory}"' for directory in known.directories)
    names_known = known.devices
    if names_known:
        text = f"no CDI spec in {where} defines {wanted}"
        short = [name for name in names_known if len(name) <= _MAX_NAME_IN_HINT]
        hint = f"ask for one of {', '.join(short[:_MAX_NAMES_IN_HINT])}"
    else:
        text = f"no CDI spec found in {where}, wanted {wanted}"
        hint = f'run "gpuruntime cdi generate --output {known.directories[-1]}/nvidia.yaml"'
    if known.errors:
        path, reasons = next(iter(known.errors.items()))
        more = f", and {len(known.errors) - 1} more" if len(known.errors) > 1 else ""
        text += f'; not used: "{path}" ({reasons[0].category}: {reasons[0]}){more}'
    return UnresolvedDeviceError(text, hint)


def _completed(
    edits: Edits, asked: Request, document: OciConfig, config: Config, host: Host
) -> Edits:
    """Return *edits* completed from the host's nodes, which the driver may have to make first."""
    user_namespace = in_user_namespace(document)
    if user_namespace:
        edits = _without_groups(edits)
    try:
        return _seen(edits, asked, user_namespace=user_namespace)
    except CdiError as error:
        found = error
    if (
        found.category == "host-device-missing"
        and config["nvidia-container-cli.load-kmods"]
        and host.make_nodes(_minors(edits))
    ):
        try:
            return _seen(edits, asked, user_namespace=user_namespace)
        except CdiError as error:
            found = error
    raise UnresolvedDeviceError(
        f"cannot give a device to the container: {found}",
        'run "nvidia-modprobe -u -c 0" on the host, or "gpuruntime cdi refresh" for a spec of old',
    ) from found


def _seen(edits: Edits, asked: Request, *, user_namespace: bool) -> Edits:
    """Return *edits* completed from the nodes that are there; raise CdiError."""
    completed = complete(edits, user_namespace=user_namespace)
    if asked.is_automatic:
        # Who wrote a spec may call a node by another name.
        stale.check_nodes(completed)
    return completed


def _minors(edits: Edits) -> list[int]:
    """Return the numbers of the GPUs whose nodes *edits* have."""
    found = (_GPU_NODE.match(node["path"]) for node in edits.get("deviceNodes") or ())
    return [int(match[1]) for match in found if match]


def _without_groups(edits: Edits) -> Edits:
    """Return *edits* without groups of the host, which are others or none in a user namespace."""
    found = edits.copy()
    found.pop("additionalGids", None)
    found["deviceNodes"] = [node.copy() for node in edits.get("deviceNodes") or ()]
    for node in found["deviceNodes"]:
        node.pop("gid", None)
    return found


def _device_rules(document: OciConfig) -> list[dict[str, Any]]:
    resources = (document.get("linux") or {}).get("resources") or {}
    return resources.get("devices") or []


def _drop_repeated(rules: list[dict[str, Any]], there: int) -> None:
    """Take those behind the first *there* of *rules* away that would change nothing.

    That is one which is among these, if none behind it denies anything.
    """
    last_denial = max((i for i in range(there) if not rules[i].get("allow")), default=-1)
    in_force = rules[last_denial + 1 : there]
    rules[there:] = [rule for rule in rules[there:] if rule not in in_force]


def _lost_on_reload(edits: Edits, document: OciConfig) -> list[str]:
    """Return the nodes whose device rules systemd would not find again.

    It knows a device by its link in /dev/char only, and NVIDIA's have none in /sys/dev/char.
    """
    # The form of systemd's cgroups is SLICE:PREFIX:NAME.
    if str((document.get("linux") or {}).get("cgroupsPath")).count(":") != 2:
        return []
    numbers = {
        node["path"]: f"char/{node['major']}:{node['minor']}"
        for node in edits.get("deviceNodes") or ()
        if node["type"] == "c"
    }
    return [
        path
        for path, name in numbers.items()
        if not (os.path.lexists(f"/dev/{name}") or os.path.lexists(f"/sys/dev/{name}"))
    ]


def _prestart_hooks(document: OciConfig) -> Sequence[dict[str, Any]]:
    return (document.get("hooks") or {}).get("prestart") or ()


def _engine_hooks(document: OciConfig) -> list[int]:
    """Return the indices of prestart hooks that would inject devices by themselves."""
    return [
        i
        for i, hook in enumerate(_prestart_hooks(document))
        if posixpath.basename(str(hook.get("path"))) in request.ENGINE_HOOKS
    ]


def _prestart(document: OciConfig, host: Host) -> dict[str, Any] | None:
    """Return the hook that mounts the driver's files in the legacy mode, None if it is there."""
    path = host.program(programs.PRESTART_HOOK)
    # The operator can give it any name.
    if any(hook.get("path") == path for hook in _prestart_hooks(document)):
        return None
    return {
        "path": path,
        "args": [posixpath.basename(path), "prestart"],
        "env": list(_PRESTART_ENV),
    }
