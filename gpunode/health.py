# SPDX-License-Identifier: Apache-2.0
"""The health of devices: a pure state machine over the monotonic times of its input.

A fault of a GPU is a fault of every MIG device and every share of it; a fault of a GPU instance
only of its MIG devices. A fault ends when the GPU answers, and either has been quiet for some time
or was reset; after some XIDs only a reset ends it. While the driver does not answer, no device is
healthy, because no container could start; that ends as soon as it answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpunode.devices import Device
from gpunode.model import DriverState, DriverStatus, Event, EventKind, NodeModel, Update
from gpunode.xid_table import XIDS, Xid

DISABLE_VARIABLE = "DP_DISABLE_HEALTHCHECKS"
ENABLE_VARIABLE = "DP_ENABLE_HEALTHCHECKS"
_EVERY = "all"
_EVERY_XID = "xids"
DEFAULT_QUIET_S = 600.0
# The driver reports no events for a moment: nothing is wrong with the GPUs themselves.
_WAIT_FAILED_QUIET_S = 30.0
# What NVML reports as the instance if there is none.
_NO_INSTANCE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Which XIDs make a device unhealthy, and how long it must be quiet to be healthy again.

    An XID of *enabled* acts whatever else says that it is ignored. *problems* are words of the
    variables that are neither numbers nor `all` or `xids`.
    """

    quiet_s: float = DEFAULT_QUIET_S
    enabled: frozenset[int] = frozenset()
    enables_all: bool = False
    disabled: frozenset[int] = frozenset()
    disables_xids: bool = False
    disables_all: bool = False
    problems: tuple[str, ...] = ()

    def acts_on(self, xid: int) -> bool:
        """Return whether the event *xid* makes its device unhealthy."""
        if self.enables_all or xid in self.enabled:
            return True
        if self.disables_xids or xid in self.disabled:
            return False
        return not XIDS.get(xid, Xid("")).application


def policy(environment: Mapping[str, str], quiet_s: float = DEFAULT_QUIET_S) -> HealthPolicy:
    """Return the policy by the two variables of *environment*."""
    disabled, words = _numbers(environment.get(DISABLE_VARIABLE, ""))
    enabled, others = _numbers(environment.get(ENABLE_VARIABLE, ""))
    unknown = [
        *(f'{DISABLE_VARIABLE} has "{word}"' for word in words - {_EVERY, _EVERY_XID}),
        *(f'{ENABLE_VARIABLE} has "{word}"' for word in others - {_EVERY}),
    ]
    return HealthPolicy(
        quiet_s=quiet_s,
        enabled=enabled,
        enables_all=_EVERY in others,
        disabled=disabled,
        disables_xids=bool(words & {_EVERY, _EVERY_XID}),
        disables_all=_EVERY in words,
        problems=tuple(f"{problem}, which is not an XID" for problem in sorted(unknown)),
    )


def _numbers(text: str) -> tuple[frozenset[int], set[str]]:
    """Return the numbers and the other words of *text*, which commas separate."""
    words = {word.strip().lower() for word in text.split(",")} - {""}
    numbers = {word for word in words if word.isascii() and word.isdigit() and len(word) < 10}
    return frozenset(map(int, numbers)), words - numbers


@dataclass(frozen=True, slots=True)
class Target:
    """What a fault is of: a GPU, or one GPU or compute instance of it; all GPUs if uuid is ""."""

    uuid: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None

    def has(self, device: Device) -> bool:
        """Return whether a fault of this target is one of *device*."""
        if self.uuid and self.uuid != device.gpu_uuid:
            return False
        if self.gpu_instance is None or not device.is_mig:
            return True
        if self.gpu_instance != device.gpu_instance:
            return False
        return self.compute_instance in (None, device.compute_instance)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault since the time *since*; *quiet_from* is the last time at which it occurred."""

    reason: str
    since: float
    quiet_from: float
    quiet_s: float
    needs_reset: bool = False


@dataclass(frozen=True, slots=True)
class HealthState:
    """All faults, the GPUs that do not answer, and why the driver does not, "" if it does.

    *known* are the GPUs that the driver has listed since it was loaded; *lost* are those of them
    that it does not list now. *is_current*: the driver answers, so that faults may end.
    """

    faults: Mapping[Target, Fault] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    driver_reason: str = ""
    is_current: bool = False

    def reason(self, device: Device) -> str:
        """Return why *device* is unhealthy, "" if it is healthy."""
        if self.driver_reason:
            return self.driver_reason
        if device.gpu_uuid in self.lost:
            return "the GPU does not answer"
        for target, fault in self.faults.items():
            if target.has(device):
                return fault.reason
        return ""

    def next_change(self) -> float | None:
        """Return the time at which the next fault may end, None if none ends by itself."""
        times = [
            fault.quiet_from + fault.quiet_s
            for target, fault in self.faults.items()
            if not fault.needs_reset and target.uuid not in self.lost
        ]
        return min(times) if self.is_current and times else None


def advance(state: HealthState, update: Update, now: float, rule: HealthPolicy) -> HealthState:
    """Return the state after *update* at the time *now*; its events are those since the last."""
    for event in update.events:
        state = _after(state, event, update.model, rule)
    is_current = update.status.state is DriverState.READY and update.model is not None
    reason = _driver_reason(state.driver_reason, update.status)
    state = replace(state, driver_reason=reason, is_current=is_current)
    if not is_current:
        return state
    assert update.model is not None
    present = frozenset(gpu.gpu.uuid for gpu in update.model.gpus)
    faults = dict(state.faults)
    for uuid in state.lost & present:
        # It answers again; the time of quiet begins.
        _add(faults, Target(uuid), "the GPU did not answer", now, rule.quiet_s)
    known = state.known | present
    lost = known - present
    remaining = {
        target: fault
        for target, fault in faults.items()
        if fault.needs_reset or target.uuid in lost or now < fault.quiet_from + fault.quiet_s
    }
    return replace(state, faults=remaining, known=known, lost=lost)


def _after(
    state: HealthState, event: Event, model: NodeModel | None, rule: HealthPolicy
) -> HealthState:
    """Return the state after *event*."""
    kind = event.kind
    if kind is EventKind.DRIVER_CHANGED:
        # The module initializes each GPU that it finds; what it does not find is not there.
        return replace(state, faults={}, known=frozenset(), lost=frozenset())
    target = _target(event, model)
    faults = dict(state.faults)
    if kind in (EventKind.RESET, EventKind.MIG_CHANGED):
        # Other MIG devices are new ones, without the faults of those before.
        is_reset = kind is EventKind.RESET
        for old in list(faults):
            is_of_gpu = not event.uuid or old.uuid == target.uuid
            if is_of_gpu and (is_reset or old.gpu_instance is not None):
                del faults[old]
    elif kind is EventKind.XID:
        if rule.acts_on(event.xid) and _is_known(target, state, model):
            details = XIDS.get(event.xid, Xid(""))
            name = f" ({details.name})" if details.name else ""
            reason = f"XID {event.xid}{name}"
            needs_reset = details.needs_reset
            _add(faults, target, reason, event.time, rule.quiet_s, needs_reset=needs_reset)
    elif kind is EventKind.EVENTS_FAILED:
        if not rule.disables_all and _is_known(target, state, model):
            reason = "the driver cannot report events of the GPU"
            _add(faults, target, reason, event.time, rule.quiet_s)
    elif kind is EventKind.WAIT_FAILED and not rule.disables_all:
        quiet = min(rule.quiet_s, _WAIT_FAILED_QUIET_S)
        _add(faults, Target(), "the driver cannot report events", event.time, quiet)
    return replace(state, faults=faults)


def _add(
    faults: dict[Target, Fault],
    target: Target,
    reason: str,
    time: float,
    quiet_s: float,
    *,
    needs_reset: bool = False,
) -> None:
    """Add a fault, or renew that of *target*; the reason that needs a reset is kept."""
    old = faults.get(target)
    if old is not None:
        reason = old.reason if old.needs_reset else reason
        needs_reset = needs_reset or old.needs_reset
        quiet_s = max(quiet_s, old.quiet_s)
    since = time if old is None else old.since
    faults[target] = Fault(reason, since, time, quiet_s, needs_reset)


def _target(event: Event, model: NodeModel | None) -> Target:
    """Return the target of *event*, which may name a MIG device by its UUID or its instances."""
    for gpu in model.gpus if model else ():
        for mig in gpu.gpu.mig_devices:
            if event.uuid == mig.uuid:
                return Target(gpu.gpu.uuid, mig.gpu_instance, mig.compute_instance)
    gpu_instance, compute_instance = (
        None if number == _NO_INSTANCE else number
        for number in (event.gpu_instance, event.compute_instance)
    )
    return Target(event.uuid, gpu_instance, None if gpu_instance is None else compute_instance)


def _is_known(target: Target, state: HealthState, model: NodeModel | None) -> bool:
    """Return whether the driver has listed the GPU of *target*; others must not suffer from it."""
    uuids: Iterable[str] = (gpu.gpu.uuid for gpu in model.gpus) if model else ()
    return target.uuid in (*uuids, *state.known)


def _driver_reason(before: str, status: DriverStatus) -> str:
    """Return why no device can be used; a driver that is asked for the first time keeps it."""
    if status.state is DriverState.READY:
        return ""
    if status.state is DriverState.STARTING:
        return before
    return f"the driver is {status.state.value}" + (f": {status.reason}" if status.reason else "")
