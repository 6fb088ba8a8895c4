# SPDX-License-Identifier: Apache-2.0
"""What the API server has of this node: its units, its devices of DRA, and RuntimeClasses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from lightkube import Client
from lightkube.generic_resource import create_global_resource
from lightkube.resources.core_v1 import Node
from lightkube.resources.node_v1 import RuntimeClass

from gpunode.api import client as api
from gpunode.api.errors import NOT_FOUND, ApiServerError
from gpunode.validation.cluster_checks import NodeUnits

_ResourceSlice = create_global_resource("resource.k8s.io", "v1", "ResourceSlice", "resourceslices")


class NodeView:
    """The node *name*; *connect* returns a client before the first request."""

    def __init__(self, connect: Callable[[], Client], name: str) -> None:
        self._connect = connect
        self._client: Client | None = None
        self.name = name

    def units(self) -> NodeUnits:
        """Return the units of the node; raise ApiServerError."""
        client = self._connected()
        with api.request(f'read the node "{self.name}"'):
            status = client.get(Node, self.name).status
        if status is None:
            return NodeUnits()
        return NodeUnits(dict(status.capacity or {}), dict(status.allocatable or {}))

    def dra_devices(self) -> Mapping[str, int]:
        """Return the number of devices in the node's ResourceSlices by driver.

        {} if the cluster has no DRA. Raises ApiServerError.
        """
        client = self._connected()
        counts: Counter[str] = Counter()
        try:
            with api.request(f'list the ResourceSlices of the node "{self.name}"'):
                for item in client.list(_ResourceSlice, fields={"spec.nodeName": self.name}):
                    spec = item.get("spec") or {}
                    counts[str(spec.get("driver", ""))] += len(spec.get("devices") or ())
        except ApiServerError as error:
            if error.status == NOT_FOUND:
                return {}
            raise
        return counts

    def runtime_classes(self) -> Mapping[str, str]:
        """Return the handlers of the RuntimeClasses by name; raise ApiServerError."""
        client = self._connected()
        with api.request("list the RuntimeClasses"):
            return {
                item.metadata.name: item.handler
                for item in client.list(RuntimeClass)
                if item.metadata is not None and item.metadata.name is not None
            }

    def _connected(self) -> Client:
        if self._client is None:
            self._client = self._connect()
        return self._client
