# SPDX-License-Identifier: Apache-2.0
"""Checks of the NVLink fabric: its manager, the state of each GPU, the channels of IMEX."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuruntime import remedies
from gpuruntime.cli.checks import platform_checks, processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.discover import nvml_fabric, user_space
from gpuruntime.errors import DiscoveryError, DriverError
from gpuruntime.formats import driver_version

MANAGER = "nv-fabricmanager"
IMEX = "nvidia-imex"
LOG = "/var/log/fabricmanager.log"
_RESTART = 'run "systemctl restart nvidia-fabricmanager"'
_BRIDGE = "0x0680"
_CHANNELS = "nvidia-caps-imex-channels"
_MAX_LOG_BYTES = 4 << 20
_MISMATCH = re.compile(
    r"driver interface version ([0-9.]{3,30}) don't match with driver version ([0-9.]{3,30})"
)
# Less than the deadline of a check, so that the error can still be reported.
_DEADLINE_S = 12.0


def has_switches(machine: ExaminedMachine) -> bool:
    """Return whether the host has NVSwitches, by their device nodes or on the PCI bus."""
    nodes = machine.glob("/dev", "nvidia-nvswitch[0-9]*")
    return bool(nodes or remedies.drivers_on_bus(machine, _BRIDGE))


def fabric(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the NVLink fabric is ready: until then CUDA fails with error 802."""
    notes = [*_manager(machine), *_channels(machine), *_states(machine)]
    yield from notes
    if not notes:
        yield ok("no NVLink fabric")


def _manager(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the fabric manager runs and has the version of the driver."""
    if not has_switches(machine):
        return
    loaded = driver_version.of_module_text(machine.read("/proc/driver/nvidia/version") or "")
    if processes.running(machine, MANAGER):
        yield ok(f"there are NVSwitches, and {MANAGER} runs")
        return
    mismatches = _MISMATCH.findall(machine.read(LOG, _MAX_LOG_BYTES) or "")
    # An old line of the log is about another driver.
    if mismatches and mismatches[-1][1].rstrip(".") == loaded:
        version = mismatches[-1][0].rstrip(".")
        yield fail(
            f"{MANAGER} {version} does not start with driver {loaded}: the versions differ",
            f"install the fabric manager of version {loaded}",
        )
    else:
        yield fail(f"there are NVSwitches, and {MANAGER} does not run", _RESTART)


def _channels(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether a node that shares memory with others has channels for containers."""
    is_registered = re.search(
        rf"^ *\d+ {_CHANNELS}$", machine.read("/proc/devices") or "", re.MULTILINE
    )
    channels = machine.glob(f"/dev/{_CHANNELS}", "channel[0-9]*")
    if channels:
        count = len(channels)
        yield ok(f"{count} IMEX channel{'' if count == 1 else 's'}")
    elif is_registered and processes.running(machine, IMEX):
        yield warn(
            f'{IMEX} runs, and there is no channel in "/dev/{_CHANNELS}": containers have none',
            'create one: set "NVreg_CreateImexChannel0=1" as an option of the module nvidia',
        )


def _states(machine: ExaminedMachine) -> Iterator[Note]:
    """Check the state of the fabric of each GPU, on this machine only."""
    if not machine.is_live or not platform_checks.needs_module(machine):
        return
    root = machine.driver_root().open()
    if root is None:
        return
    try:
        library = user_space.find_nvml(root, elsewhere=())
        deadline_s = min(float(machine.config["discovery-timeout"]), _DEADLINE_S)
        states = nvml_fabric.query(library, deadline_s)
    except (DriverError, DiscoveryError):
        # The check "answer" reports it.
        return
    action = _RESTART if has_switches(machine) else f"check the fabric manager, and {IMEX}"
    for state in states:
        name = f"the NVLink fabric of GPU {state.index}"
        if state.state == nvml_fabric.NOT_STARTED:
            yield fail(f"{name} has not started: CUDA fails with error 802", action)
        elif state.state == nvml_fabric.IN_PROGRESS:
            yield warn(f"{name} is not ready yet", "wait, and run doctor again")
        elif state.status:
            yield fail(f"{name} failed with error {state.status} of NVML", action)
    ready = sum(state.state == nvml_fabric.COMPLETED and not state.status for state in states)
    if ready:
        yield ok(f"the NVLink fabric of {ready} GPU{'' if ready == 1 else 's'} is ready")
