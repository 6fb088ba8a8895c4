# SPDX-License-Identifier: Apache-2.0
"""Compute the grant for a request from one of its two sources: the inventory, or CDI specs.

Loaded only if no saved grant fits the request (gpuruntime/snapshots/grants.py). A *state* is the
result of the probes (gpuruntime/probes.py) of everything that a grant was computed from, or None
if part of that can change without a trace.
"""

from __future__ import annotations

import os
import time

from cdi.errors import CdiError
from gpuruntime import probes
from gpuruntime.errors import SpecError, UnresolvedDeviceError
from gpuruntime.grant import Grant
from gpuruntime.plan import from_inventory, stale_spec
from gpuruntime.request import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cdi.registry import Registry
    from gpuruntime.config import Config
    from gpuruntime.errors import GpuRuntimeError
    from gpuruntime.model import Inventory
    from gpuruntime.probes import State
    from gpuruntime.request.parse import Request
    from gpuruntime.snapshots.inventory_snapshot import Found

# A hint lists devices by index only: their UUIDs are longer than this.
_MAX_NAMES_IN_HINT = 20
_MAX_NAME_IN_HINT = 32


def of_machine(
    request: Request, hook: str, config: Config, read: Callable[..., Found]
) -> tuple[Grant, State | None]:
    """Return the grant for *request* from the inventory, and its state.

    *hook* is the path of the hook program; *read* is that of `inventory_for`. Raises
    DriverError, DiscoveryError, RequestError and UnresolvedDeviceError.
    """
    inventory, state = inventory_for(request, read)
    return from_inventory.grant(
        request, inventory, config, from_inventory.style(config, hook)
    ), state


def inventory_for(request: Request, read: Callable[..., Found]) -> tuple[Inventory, State | None]:
    """Return an inventory with the devices of *request*, if they exist, and its state.

    *read* calls InventorySnapshot.get; *fresh* makes it query the driver. MIG devices are created
    and destroyed without a trace: for a MIG device or a missing device the driver is
    queried. Raises DriverError, DiscoveryError, RequestError.
    """
    result = read(fresh=False)
    has_mig = _names_mig(request, result.inventory)
    if has_mig is not False and not result.is_fresh:
        result = read(fresh=True)
        has_mig = _names_mig(request, result.inventory)
    return result.inventory, None if has_mig else result.state


def _names_mig(request: Request, inventory: Inventory) -> bool | None:
    """Return whether a device of *request* is a MIG device, None if a device does not exist."""
    try:
        return any(device.mig for device in from_inventory.requested_devices(request, inventory))
    except UnresolvedDeviceError:
        return None


def of_specs(
    request: Request, config: Config, read: Callable[[], Registry]
) -> tuple[Grant, State | None]:
    """Return the grant for the devices of *request* from CDI specs, and its state.

    *read* reads the specs. Raises SpecError and UnresolvedDeviceError.
    """
    from cdi import registry as cdi_registry  # noqa: PLC0415 (a grant from the inventory has none)

    # Probed before the specs are read: a later change then invalidates the state.
    paths = _spec_paths(config.spec_dirs or cdi_registry.DEFAULT_DIRECTORIES, cdi_registry.ENDINGS)
    state = probes.read(
        {
            probes.PROGRAM: [probes.PROGRAM, [probes.VERSION]],
            "specs": [probes.IDENTITY, paths],
            "module version": [probes.CONTENT, [stale_spec.MODULE]],
        }
    )
    # A second change of a file within one tick of the clock leaves its identity as it is.
    identities = state["specs"][1].values()
    times = [time_ns for identity in identities if identity for time_ns in identity[-2:]]
    may_save = cdi_registry.is_settled(max(times, default=0), time.time_ns())
    registry = read()
    warnings = [
        f'CDI spec "{file.path}" is not used: {file.error.category}: {file.error}'
        for file in registry.files
        if file.error is not None
    ]
    if request.driver_only:
        edits = registry.common_edits(config.default_kind)
        if edits is None:
            raise _unresolved([config.default_kind], registry)
        ours = edits
    else:
        try:
            edits = registry.resolve(request.devices)
        except CdiError as error:
            missing = [name for name in request.devices if registry.find(name) is None]
            raise _unresolved(missing, registry) from error
        # We do not know what the files of another vendor depend on.
        ours = registry.resolve([name for name in request.devices if parse.is_ours(name, config)])
    state["files"] = probes.identities(mount["hostPath"] for mount in ours["mounts"])
    try:
        stale_spec.check(ours)
    except SpecError as error:
        raise _stale(error, request, config, registry) from error
    # A file without a stamp was modified too recently.
    may_save = may_save and all(file.stamp for file in registry.files)
    return Grant(edits, warnings=warnings), state if may_save else None


def _stale(error: SpecError, request: Request, config: Config, registry: Registry) -> SpecError:
    """Return *error* with a hint to regenerate the stale spec of *registry*."""
    from gpuruntime import remedies  # noqa: PLC0415 (only when a create fails)

    names = registry.names(config.default_kind) if request.driver_only else request.devices
    for name in names:
        file = registry.find(name)
        if file is None or not parse.is_ours(name, config):
            continue
        try:
            stale_spec.check(registry.resolve([name]))
        except SpecError:
            return SpecError(error.message, remedies.stale_spec(file.path, name.partition("=")[0]))
    return error


def _spec_paths(directories: Sequence[str], endings: tuple[str, ...]) -> list[str]:
    """Return *directories*, each followed by its files with one of *endings*."""
    paths = []
    # Normalized as in the registry: the kernel resolves ".." after a symlink differently.
    for directory in map(os.path.normpath, directories):
        paths.append(directory)
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        paths += [f"{directory}/{name}" for name in names if name.endswith(endings)]
    return paths


def _unresolved(names: Sequence[str], registry: Registry) -> GpuRuntimeError:
    """Return the error for *names* that no CDI spec defines, with the most helpful hint."""
    requested = ", ".join(f'"{name}"' for name in names)
    # The registry's directories: the config may name none, which means the defaults.
    directories = ", ".join(f'"{directory}"' for directory in registry.directories)
    defined = registry.devices
    if defined:
        text = f"no CDI spec in {directories} defines {requested}"
        short_names = [name for name in defined if len(name) <= _MAX_NAME_IN_HINT]
        hint = f"request one of {', '.join(short_names[:_MAX_NAMES_IN_HINT])}"
    else:
        text = f"no CDI spec found in {directories}; requested: {requested}"
        hint = f'run "gpuruntime cdi generate --output {registry.directories[-1]}/nvidia.yaml"'
    if registry.errors:
        path, reasons = next(iter(registry.errors.items()))
        others = f", and {len(registry.errors) - 1} more" if len(registry.errors) > 1 else ""
        text += f'; not used: "{path}" ({reasons[0].category}: {reasons[0]}){others}'
        if not defined:
            hint = (
                f'correct the file; "gpuruntime cdi validate {path}" lists what is wrong with it'
            )
    return UnresolvedDeviceError(text, hint)
