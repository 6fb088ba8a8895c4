# SPDX-License-Identifier: Apache-2.0
"""Publish labels to the API server: as those of the node, or as a NodeFeature object.

Both are server-side applied: a label of ours that is no longer published is removed, and labels of
others stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightkube import Client
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.core_v1 import Node

from gpunode.api import client as api

_NODE_LABEL = "nfd.node.kubernetes.io/node-name"
_NodeFeature = create_namespaced_resource(
    "nfd.k8s-sigs.io", "v1alpha1", "NodeFeature", "nodefeatures"
)


class NodeLabels:
    """The labels of the node *name*."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name

    def publish(self, node_labels: Mapping[str, str]) -> None:
        """Replace our labels of the node; raise ApiServerError."""
        node = Node(metadata=ObjectMeta(name=self.name, labels=dict(node_labels)))
        with api.request(f'set labels of the node "{self.name}"'):
            self.client.apply(node, force=True)


class NodeFeature:
    """The object of node feature discovery for the node *name*, in *namespace*.

    It is removed with its *owners*, the pod and its DaemonSet.
    """

    def __init__(
        self, client: Client, name: str, namespace: str, owners: tuple[OwnerReference, ...] = ()
    ) -> None:
        self.client = client
        self.name = name
        self.namespace = namespace
        self.owners = owners

    def publish(self, node_labels: Mapping[str, str]) -> None:
        """Replace the object; raise ApiServerError."""
        feature = _NodeFeature(
            metadata=ObjectMeta(
                name=f"nvidia-features-for-{self.name}",
                namespace=self.namespace,
                labels={_NODE_LABEL: self.name},
                ownerReferences=list(self.owners) or None,
            ),
            spec={
                "features": {"flags": {}, "attributes": {}, "instances": {}},
                "labels": dict(node_labels),
            },
        )
        with api.request(f'write the NodeFeature object of the node "{self.name}"'):
            self.client.apply(feature, force=True)
