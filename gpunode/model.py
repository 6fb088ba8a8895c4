# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a node as frozen values: what the watcher sends and every service derives from.

The values extend those of gpuruntime.model: a NodeGpu has the Gpu that the runtime knows, and what
only the services of a node need. Values that the driver does not report are None or "".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuruntime.model import Gpu, Inventory, LeftOutDevice, MigDevice


class DriverState(enum.Enum):
    """Whether the driver answers."""

    STARTING = "starting"  # no answer yet, and the deadline of the first answer has not passed
    ABSENT = "absent"  # no library or no kernel module
    MISMATCHED = "mismatched"  # library and kernel module are of different versions
    FAILED = "failed"  # NVML reports another error
    HANGING = "hanging"  # the last request has no answer within its deadline
    READY = "ready"


@dataclass(frozen=True, slots=True)
class MigAttributes:
    """The size of a MIG device.

    *profile* is the name of its profile, `1g.5gb`, `1c.3g.20gb` or `1g.5gb+me`. *start* and *size*
    are the memory slices of its GPU instance; the other numbers count the instance's units.
    """

    profile: str
    gpu_slices: int
    compute_slices: int
    memory_mib: int
    start: int | None = None
    size: int | None = None
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


@dataclass(frozen=True, slots=True)
class NodeMigDevice:
    """A MIG device with its size."""

    device: MigDevice
    attributes: MigAttributes


@dataclass(frozen=True, slots=True)
class NodeGpu:
    """A GPU with its place in the machine, its memory and its MIG devices.

    *numa_node* is None if sysfs has none or a negative one. *mig_capable* is False for a GPU
    without MIG; *mig_pending* is the mode after the next reset, None if it is the current one.
    *device_id* and *subsystem_id* are the 32-bit PCI identifiers, `0x20B010DE`. *compute_mode* is
    `default`, `exclusive-process` or `prohibited`. *cluster_uuid* and *clique_id* are those of the
    NVLink fabric.
    """

    gpu: Gpu
    memory_mib: int | None = None
    numa_node: int | None = None
    mig_capable: bool = False
    mig_pending: bool | None = None
    mig_devices: tuple[NodeMigDevice, ...] = ()
    device_id: str = ""
    subsystem_id: str = ""
    compute_mode: str = ""
    cluster_uuid: str = ""
    clique_id: int | None = None


class Topology(enum.IntEnum):
    """The common ancestor of two GPUs on the PCI bus, the closer the greater."""

    UNKNOWN = 0
    SYSTEM = 10  # different CPU sockets
    NODE = 20  # the same CPU
    HOST_BRIDGE = 30
    SWITCHES = 40  # several PCIe switches
    SWITCH = 50  # one PCIe switch
    BOARD = 60


@dataclass(frozen=True, slots=True)
class Link:
    """How two GPUs are connected: over PCI, and by the number of active NVLinks between them."""

    topology: Topology = Topology.UNKNOWN
    nvlinks: int = 0


@dataclass(frozen=True, slots=True)
class NodeModel:
    """One answer of the driver about the whole node.

    *links* has an item for each ordered pair of UUIDs that the driver answered for; GPUs that are
    lost have none. *inventory* is what CDI specs are generated from. *left_out* are the devices
    that cannot be used, with their reasons.
    """

    driver_version: str
    cuda_version: str
    gpus: tuple[NodeGpu, ...]
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    left_out: tuple[LeftOutDevice, ...] = ()
    inventory: Inventory | None = None
    problems: tuple[str, ...] = ()


class EventKind(enum.Enum):
    """What happened to a device."""

    XID = "xid"
    EVENTS_UNSUPPORTED = "events-unsupported"  # the GPU reports no events
    EVENTS_FAILED = "events-failed"  # events of the GPU cannot be requested
    WAIT_FAILED = "wait-failed"  # the wait for events failed: of all devices
    LOST = "lost"  # the GPU no longer answers, or is gone from the bus
    BACK = "back"  # a GPU that was lost answers again
    RESET = "reset"  # the GPU was reset
    MIG_CHANGED = "mig-changed"
    DRIVER_CHANGED = "driver-changed"  # another version, or the module was loaded again


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one GPU, or to all of them if *uuid* is "".

    *gpu_instance* and *compute_instance* are set if the driver names a MIG device. *time* is that
    of the monotonic clock, in seconds.
    """

    kind: EventKind
    time: float
    uuid: str = ""
    xid: int = 0
    gpu_instance: int | None = None
    compute_instance: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """The state of the driver since *since*, monotonic seconds.

    *reason* and *hint* are set if it is not READY.
    """

    state: DriverState
    since: float
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """What the watcher sends: the driver's state, the last model (None before one), new events."""

    status: DriverStatus
    model: NodeModel | None
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a GPU or MIG device; *memory_mib* is None if it is not reported."""

    pid: int
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class GpuTelemetry:
    """Measurements of one GPU or MIG device, by the names of docs/reference/metrics.md.

    Values that the driver does not report are absent. *processes* are those that compute on the
    device.
    """

    uuid: str
    values: Mapping[str, float]
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The last measurements of all devices, and how many seconds ago they were made."""

    age_s: float
    devices: tuple[GpuTelemetry, ...]
