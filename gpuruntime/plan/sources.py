# SPDX-License-Identifier: Apache-2.0
"""Compute the grant for a request from one of its two sources: the inventory, or CDI specs.

Loaded only if no saved grant fits the request (gpuruntime/snapshots/grants.py). A *state* is the
host's answers to the probes (gpuruntime/probes.py) of everything that a grant was computed from,
or None if part of that can change without a trace.
"""

from __future__ import annotations

import os
import time

from cdi.errors import CdiError
from cdi.registry import DEFAULT_DIRECTORIES, ENDINGS, is_settled
from gpuruntime import probes
from gpuruntime.errors import SpecError, UnresolvedDeviceError
from gpuruntime.grant import Grant
from gpuruntime.plan import from_inventory, stale_spec
from gpuruntime.request import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cdi.registry import Registry
    from gpuruntime.config import Config
    from gpuruntime.errors import GpuRuntimeError
    from gpuruntime.model import Inventory
    from gpuruntime.probes import State
    from gpuruntime.request.parse import Request
    from gpuruntime.snapshots.inventory_snapshot import Found

# A hint names the devices by index, not each by its UUID as well.
_MAX_NAMES_IN_HINT = 20
_MAX_NAME_IN_HINT = 32


def of_machine(
    asked: Request, hook: str, config: Config, read: Callable[..., Found]
) -> tuple[Grant, State | None]:
    """Return what *asked* gets of what the machine has now, and the state that goes with it.

    *hook* is the path of the hook program; *read* is as for `inventory_for`. Raises DriverError,
    DiscoveryError, RequestError and UnresolvedDeviceError.
    """
    inventory, state = inventory_for(asked, read)
    return from_inventory.grant(
        asked, inventory, config, from_inventory.style(config, hook)
    ), state


def inventory_for(asked: Request, read: Callable[..., Found]) -> tuple[Inventory, State | None]:
    """Return an inventory that has what *asked* names, if the machine has it, and its state.

    *read* takes whether the driver is to be asked, *fresh*, and returns what InventorySnapshot.get
    does. MIG devices come and go without a trace: for them, and for what is not found, the driver
    is asked. Raises DriverError, DiscoveryError, RequestError.
    """
    found = read(fresh=False)
    has_mig = _names_mig(asked, found.inventory)
    if has_mig is not False and not found.is_fresh:
        found = read(fresh=True)
        has_mig = _names_mig(asked, found.inventory)
    return found.inventory, None if has_mig else found.state


def _names_mig(asked: Request, inventory: Inventory) -> bool | None:
    """Return whether a device of *asked* is of MIG, None if one of them is not there."""
    try:
        return any(device.mig for device in from_inventory.requested_devices(asked, inventory))
    except UnresolvedDeviceError:
        return None


def of_specs(
    asked: Request, config: Config, read: Callable[[], Registry]
) -> tuple[Grant, State | None]:
    """Return what CDI specs give for the devices of *asked*, and the state that goes with it.

    *read* reads the specs. Raises SpecError and UnresolvedDeviceError.
    """
    # Before they are read: what changes meanwhile does not go with it.
    paths = _spec_paths(config.spec_dirs or DEFAULT_DIRECTORIES)
    state = probes.read(
        {
            probes.PROGRAM: [probes.PROGRAM, [probes.VERSION]],
            "specs": [probes.IDENTITY, paths],
            "module version": [probes.CONTENT, [stale_spec.MODULE]],
        }
    )
    may_save = _is_settled(state["specs"][1], time.time_ns())
    known = read()
    warnings = [
        f'CDI spec "{file.path}" is not used: {file.error.category}: {file.error}'
        for file in known.files
        if file.error is not None
    ]
    if asked.driver_only:
        edits = known.common_edits(config.default_kind)
        if edits is None:
            raise _unresolved([config.default_kind], known)
        ours = edits
    else:
        try:
            edits = known.resolve(asked.devices)
        except CdiError as error:
            missing = [name for name in asked.devices if known.find(name) is None]
            raise _unresolved(missing, known) from error
        # Of another vendor's files we cannot say what they depend on.
        ours = known.resolve([name for name in asked.devices if parse.is_ours(name, config)])
    state["files"] = probes.identities(mount["hostPath"] for mount in ours["mounts"])
    try:
        stale_spec.check(ours)
    except SpecError as error:
        raise _stale(error, asked, config, known) from error
    # A file without a stamp was written just now.
    may_save = may_save and all(file.stamp for file in known.files)
    return Grant(edits, warnings=warnings), state if may_save else None


def _stale(error: SpecError, asked: Request, config: Config, known: Registry) -> SpecError:
    """Return *error* with the action that writes the stale spec of *known* again."""
    from gpuruntime import remedies  # noqa: PLC0415 (only on the failing way)

    names = known.names(config.default_kind) if asked.driver_only else asked.devices
    for name in names:
        file = known.find(name)
        if file is None or not parse.is_ours(name, config):
            continue
        try:
            stale_spec.check(known.resolve([name]))
        except SpecError:
            return SpecError(error.message, remedies.stale_spec(file.path, name.partition("=")[0]))
    return error


def _is_settled(identities: Mapping[str, list[int] | None], now_ns: int) -> bool:
    """Return whether what has *identities* would have others if it changed once more.

    A directory that gets a second name within the clock's tick would not.
    """
    times = [time_ns for found in identities.values() if found for time_ns in found[-2:]]
    return is_settled(max(times, default=0), now_ns)


def _spec_paths(directories: Sequence[str]) -> list[str]:
    found = []
    # As the registry has them: to the kernel, ".." behind a link is another directory.
    for directory in map(os.path.normpath, directories):
        found.append(directory)
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        found += [f"{directory}/{name}" for name in names if name.endswith(ENDINGS)]
    return found


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
        if not names_known:
            hint = (
                f'correct the file; "gpuruntime cdi validate {path}" lists what is wrong with it'
            )
    return UnresolvedDeviceError(text, hint)
