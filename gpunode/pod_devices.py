# SPDX-License-Identifier: Apache-2.0
"""Which pods use which devices, from the kubelet's list of pod resources; pure.

The kubelet lists a device under the name that its plugin or its DRA driver has given it. Each form
of name is resolved to the UUID of a GPU or a MIG device of the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpunode.model import NodeGpu

DOMAIN = "nvidia.com/"
DRA_DRIVER = "gpu.nvidia.com"
# The forms of GKE's plugin: a GPU by minor number, one of its MIG devices, one of its shares.
_GKE = re.compile(
    r"nvidia(?P<minor>[0-9]{1,4})(/gi(?P<instance>[0-9]{1,4}))?(/vgpu(?P<share>.+))?\Z"
)
# The names of our DRA driver: a GPU by minor number, one of its MIG devices by profile and start.
_DRA = re.compile(
    r"gpu-(?P<minor>[0-9]{1,4})(-mig-(?P<profile>[0-9a-z+-]+)-[0-9]{1,4}-(?P<start>[0-9]{1,2}))?\Z"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A device of a DRA claim, in the words of the kubelet."""

    name: str
    namespace: str
    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod, with the devices that it holds.

    *devices* are ids by resource name, *claims* the devices of its DRA claims.
    """

    namespace: str
    pod: str
    name: str
    devices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a device; *share* is the number of the unit if the device is shared."""

    namespace: str
    pod: str
    container: str
    share: str = ""
    claim: Claim | None = None


class Uses:
    """The uses of the devices of a node.

    *unresolved* are ids of NVIDIA resources that name no device of the node.
    """

    def __init__(
        self,
        gpus: Sequence[NodeGpu],
        containers: Sequence[Container],
        resources: Sequence[str] = (),
    ) -> None:
        """Resolve the devices of *containers*.

        *resources* are names of further resources; those of the domain nvidia.com always count.
        """
        self._names = _Names(gpus)
        self.unresolved: list[str] = []
        uses: dict[str, dict[Use, None]] = {}
        for container in containers:
            for uuid, use in self._of(container, frozenset(resources)):
                # The kubelet lists a device once for each of its NUMA nodes.
                uses.setdefault(uuid, {})[use] = None
        self._uses = {
            uuid: tuple(sorted(of_device, key=_order)) for uuid, of_device in uses.items()
        }

    def of(self, uuid: str) -> tuple[Use, ...]:
        """Return the uses of the GPU or MIG device *uuid*, in a stable order."""
        return self._uses.get(uuid, ())

    def _of(self, container: Container, resources: frozenset[str]) -> Iterator[tuple[str, Use]]:
        owner = (container.namespace, container.pod, container.name)
        for resource, ids in container.devices:
            if not resource.startswith(DOMAIN) and resource not in resources:
                continue
            for device in ids:
                uuid, share = self._names.of_plugin(device)
                if uuid:
                    yield uuid, Use(*owner, share)
                else:
                    self.unresolved.append(device)
        for claim in container.claims:
            if claim.driver == DRA_DRIVER:
                uuid = self._names.of_claim(claim.device)
                if uuid:
                    yield uuid, Use(*owner, claim=claim)
                else:
                    self.unresolved.append(claim.device)


class _Names:
    """The devices of a node by the names that plugins and DRA drivers give them."""

    def __init__(self, gpus: Sequence[NodeGpu]) -> None:
        self._uuids = {gpu.gpu.uuid for gpu in gpus}
        self._by_minor: dict[int, str] = {}
        self._by_instance: dict[tuple[int, int], str] = {}
        self._by_place: dict[tuple[int, str, int | None], str] = {}
        for gpu in gpus:
            self._by_minor[gpu.gpu.minor] = gpu.gpu.uuid
            for mig in gpu.mig_devices:
                self._uuids.add(mig.device.uuid)
                self._by_instance[gpu.gpu.minor, mig.device.gpu_instance] = mig.device.uuid
                place = (gpu.gpu.minor, _compact(mig.attributes.profile), mig.attributes.start)
                self._by_place[place] = mig.device.uuid

    def of_plugin(self, device: str) -> tuple[str, str]:
        """Return the UUID that the id *device* names, "" if none, and the number of the share."""
        name, _, share = device.partition("::")
        if name in self._uuids:
            return name, share
        match = _GKE.match(device)
        if match is None:
            return "", ""
        minor, instance = int(match["minor"]), match["instance"]
        uuid = (
            self._by_minor.get(minor)
            if instance is None
            else self._by_instance.get((minor, int(instance)))
        )
        return uuid or "", match["share"] or ""

    def of_claim(self, device: str) -> str:
        """Return the UUID of the claim's *device*, "" if it is not a device of the node."""
        match = _DRA.match(device)
        if match is None:
            return ""
        minor, profile = int(match["minor"]), match["profile"]
        if profile is None:
            return self._by_minor.get(minor, "")
        return self._by_place.get((minor, profile, int(match["start"])), "")


def _compact(profile: str) -> str:
    """Return *profile* as it is in names of devices: `1g5gb`."""
    return profile.replace(".", "").replace("+", "-")


def _order(use: Use) -> tuple[str, ...]:
    return (use.namespace, use.pod, use.container, use.share, use.claim.name if use.claim else "")
