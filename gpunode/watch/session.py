# SPDX-License-Identifier: Apache-2.0
"""The NVML that the watcher's child has loaded, asked about the whole node."""

from __future__ import annotations

import functools
import os

from gpunode.watch import survey, telemetry
from gpuruntime import errors, remedies
from gpuruntime.discover import inventory, nvml, nvml_calls, user_space_version
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import LeftOutDevice
from gpuruntime.snapshots import inventory_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

    from gpuruntime.discover.nvml_calls import Nvml
    from gpuruntime.model import Inventory

_ENERGY = "nvmlDeviceGetTotalEnergyConsumption"


class Session:
    """The NVML that this process has loaded, and its last answers."""

    def __init__(self, driver_root: str, dev_root: str, proc: str, sys: str) -> None:
        self._driver_root = driver_root
        self._dev_root = dev_root
        self._proc = proc
        self._sys = sys
        self._nvml: Nvml | None = None
        self._response: dict[str, Any] = {}
        self._signature: list[Any] = []
        self.library = ""
        self.load = _load_identity(driver_root, proc, sys)
        # NVML index → why the GPU is lost.
        self._lost: dict[int, str] = {}
        # NVML index → UUID of the GPUs that have answered.
        self._uuids: dict[int, str] = {}
        # UUID → millijoules since the GPU was initialised.
        self.energy: dict[str, int] = {}

    def survey(self) -> dict[str, Any]:
        """Return the values of a model.NodeModel; raise GpuRuntimeError or NvmlError."""
        problems: list[str] = []
        machine = self._discover(problems)
        nvml_ = self.nvml
        response = self._response
        lost = self._lost_devices()
        problems += map(str, lost)
        left_out = [
            *(machine.left_out if machine else nvml.answer_of(response).left_out),
            *lost,
        ]
        unusable = {device.uuid for device in left_out if device.uuid}
        gpus = []
        for gpu in _usable(response["gpus"], unusable):
            migs = _usable(gpu["mig_devices"], unusable)
            try:
                gpus.append(
                    survey.node_gpu(nvml_, {**gpu, "mig_devices": migs}, self._sys, problems)
                )
            except nvml_calls.NvmlError as error:
                problems.append(f"GPU {gpu['index']} is left out: {error}")
        links = survey.links(nvml_, [item["gpu"] for item in gpus], problems)
        # A driver that has gone meanwhile makes its GPUs look lost: this call fails then.
        nvml_.ask("nvmlDeviceGetCount")
        return {
            "driver_version": response["driver_version"]
            or (machine.driver.version if machine else ""),
            "cuda_version": response["cuda_version"],
            "gpus": gpus,
            "links": links,
            "left_out": [inventory_json.plain(device) for device in left_out],
            "inventory": inventory_json.encode(machine) if machine else None,
            "problems": [*(machine.problems if machine else response["problems"]), *problems],
        }

    def _discover(self, problems: list[str]) -> Inventory | None:
        """Return the inventory, None if only NVML answers; raise GpuRuntimeError without that."""
        discover = functools.partial(
            inventory.discover,
            self._driver_root,
            self._dev_root,
            environment=False,
            query=self._query,
            proc=self._proc,
            sys=self._sys,
        )
        try:
            return discover()
        except DiscoveryError as error:
            if not self._response:
                raise
            # Missing device nodes may be made later.
            problems.append(errors.escape(error.message))
        try:
            return discover(strict=False)
        except DiscoveryError as error:
            problems.append(errors.escape(error.message))
            return None

    def _query(self, library: str, _deadline_s: float) -> nvml.AnsweredQuery:
        """Return the answer of NVML, which is loaded once, as a query; raise DriverError."""
        if self._nvml is None:
            try:
                self._nvml = nvml_calls.Nvml(library)
                self._nvml.ask("nvmlInit")
            except nvml_calls.NvmlError as error:
                raise nvml.failure(library, str(error), error.code, self._proc) from None
            except (OSError, ImportError) as error:
                raise nvml.failure(library, errors.escape(str(error)), None, self._proc) from None
            self.library = library
        try:
            # First, so that a change during the description shows in the next comparison.
            self._signature = self._sign()
            self._response = nvml_calls.describe(self._nvml, self._proc)
        except nvml_calls.NvmlError as error:
            raise nvml.failure(library, str(error), error.code, self._proc) from None
        return nvml.AnsweredQuery(nvml.answer_of(self._response))

    @property
    def nvml(self) -> Nvml:
        """The loaded library."""
        assert self._nvml is not None
        return self._nvml

    def has_changed(self) -> bool:
        """Return whether a GPU or a MIG device has come, gone or changed its mode."""
        return self._sign() != self._signature

    @property
    def has_lost_gpu(self) -> bool:
        """Whether a GPU no longer answered when it was last asked."""
        return bool(self._lost)

    @property
    def lost_uuids(self) -> list[str]:
        """The UUIDs of the GPUs that no longer answered when they were last asked."""
        return [self._uuids[index] for index in self._lost if index in self._uuids]

    def _lost_devices(self) -> list[LeftOutDevice]:
        """Return the lost GPUs that NVML still describes, from values that it has saved."""
        return [
            LeftOutDevice(
                name=str(gpu["index"]),
                uuid=gpu["uuid"],
                bus_id=gpu["bus_id"],
                reason=self._lost[gpu["index"]],
                hint=remedies.RESET_GPU,
            )
            for gpu in self._response["gpus"]
            if gpu["index"] in self._lost
        ]

    def _sign(self) -> list[Any]:
        """Return values that differ after a change of the GPUs; note lost GPUs and energies.

        Raises NvmlError.
        """
        signs: list[Any] = []
        lost = {}
        for index in range(self.nvml.ask("nvmlDeviceGetCount")):
            try:
                signs.append(self._sign_of(self.nvml, index))
            except nvml_calls.NvmlError as error:
                signs.append(error.code)
                if error.code in nvml_calls.LOST:
                    lost[index] = str(error)
        # The thread that waits for events reads it.
        self._lost = lost
        return signs

    def _sign_of(self, nvml_: Nvml, index: int) -> tuple[Any, ...]:
        device = nvml_.ask("nvmlDeviceGetHandleByIndex", index)
        uuid = self._uuids[index] = nvml_.text("nvmlDeviceGetUUID", device)
        # This call reaches the GPU; a lost one still has a UUID for some drivers.
        energy = nvml_calls.optional(nvml_.ask, _ENERGY, device)
        if energy is None:
            nvml_calls.optional(nvml_.ask, "nvmlDeviceGetTemperature", device, 0)
        else:
            self.energy[uuid] = energy
        mode = nvml_calls.optional(nvml_.ask, "nvmlDeviceGetMigMode", device)
        return uuid, mode, _mig_uuids(nvml_, device) if mode and mode[0] else []

    def measure(self) -> list[dict[str, Any]]:
        """Return the measurements of all devices that answer."""
        nvml_ = self.nvml
        measurements = []
        for gpu in self._response["gpus"]:
            try:
                device = nvml_.ask("nvmlDeviceGetHandleByIndex", gpu["index"])
                devices = [(gpu["uuid"], device, False)]
                for mig in gpu["mig_devices"]:
                    handle = nvml_.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, mig["index"])
                    devices.append((mig["uuid"], handle, True))
            except nvml_calls.NvmlError:
                continue
            measurements += [
                telemetry.measure(nvml_, uuid, handle, is_mig=is_mig)
                for uuid, handle, is_mig in devices
            ]
        return measurements


def _usable(devices: Sequence[dict[str, Any]], unusable: Collection[str]) -> list[dict[str, Any]]:
    """Return those of *devices* that have a UUID, which is not in *unusable*."""
    return [device for device in devices if device["uuid"] and device["uuid"] not in unusable]


def _mig_uuids(nvml_: Nvml, gpu: object) -> list[str]:
    """Return the UUIDs of the MIG devices of *gpu*, "" for one without an answer."""
    uuids = []
    for index in range(nvml_calls.optional(nvml_.ask, "nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
        mig = nvml_calls.unless_error(nvml_.ask, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
        if mig is not None:
            uuids.append(nvml_calls.unless_error(nvml_.text, "nvmlDeviceGetUUID", mig) or "")
    return uuids


def _load_identity(driver_root: str, proc: str, sys: str) -> str:
    """Return a text that differs between two loads of the driver's kernel module."""
    version = user_space_version.of_module(DriverRoot(driver_root)) or nvml.module_version(proc)
    inodes = []
    for path in (f"{sys}/module/nvidia", f"{proc}/driver/nvidia/version"):
        try:
            inodes.append(os.stat(path).st_ino)
        except OSError:
            inodes.append(0)
    return f"{version} {inodes[0]} {inodes[1]}"
