# SPDX-License-Identifier: Apache-2.0
"""What the manager of MIG reads and writes in the API server: labels and events of its node, pods.

Labels are changed by a patch that names the version which was read, so that a change by another
client in between is not lost.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from lightkube import Client
from lightkube.models.core_v1 import EventSource, ObjectReference
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources import core_v1
from lightkube.types import PatchType

from gpunode.api import client as api
from gpunode.mig.node import NodeView

# Events of a node are in this namespace.
_EVENTS_NAMESPACE = "default"
_RIGHTS = "give the service account the rights of docs/kubernetes/mig.md"
_MAX_MESSAGE = 1000
_ENDED = ("Succeeded", "Failed")


class MigNode:
    """The node *name*, and the pods of *namespace* on it."""

    def __init__(self, client: Client, name: str, namespace: str) -> None:
        self._client = client
        self._name = name
        self._namespace = namespace

    def read(self) -> NodeView:
        """Return the node; raise ApiServerError."""
        with _request(f'read the node "{self._name}"'):
            metadata = self._client.get(core_v1.Node, self._name).metadata or ObjectMeta()
        labels = metadata.labels or {}
        return NodeView(labels, metadata.resourceVersion or "", metadata.uid or "")

    def set_labels(self, labels: Mapping[str, str], version: str) -> None:
        """Set *labels* of the node; raise ApiServerError, CONFLICT if it has another *version*."""
        metadata = {"labels": dict(labels), "resourceVersion": version}
        with _request(f'set labels of the node "{self._name}"'):
            self._client.patch(
                core_v1.Node,
                self._name,
                {"metadata": metadata},
                patch_type=PatchType.MERGE,
            )

    def pods(self, apps: Sequence[str]) -> list[str]:
        """Return the pods of *apps* on the node that have not ended; raise ApiServerError."""
        with _request(f'list the pods of the namespace "{self._namespace}"'):
            pods = self._client.list(
                core_v1.Pod,
                namespace=self._namespace,
                labels={"app": list(apps)},
                fields={"spec.nodeName": self._name},
            )
            return sorted(
                (pod.metadata or ObjectMeta()).name or ""
                for pod in pods
                if pod.status is None or pod.status.phase not in _ENDED
            )

    def delete_pod(self, name: str) -> None:
        """Delete the pod *name*; raise ApiServerError."""
        with _request(f'delete the pod "{name}"'):
            self._client.delete(core_v1.Pod, name, namespace=self._namespace)

    def report(self, reason: str, message: str, uid: str, *, is_warning: bool = False) -> None:
        """Create an event of the node; raise ApiServerError."""
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        event = core_v1.Event(
            metadata=ObjectMeta(
                name=f"{self._name}.{time.time_ns():x}", namespace=_EVENTS_NAMESPACE
            ),
            involvedObject=ObjectReference(
                apiVersion="v1", kind="Node", name=self._name, uid=uid or None
            ),
            reason=reason,
            message=message[:_MAX_MESSAGE],
            type="Warning" if is_warning else "Normal",
            source=EventSource(component=api.FIELD_MANAGER, host=self._name),
            firstTimestamp=now,
            lastTimestamp=now,
            count=1,
        )
        with _request("create an event"):
            self._client.create(event)


def _request(action: str) -> AbstractContextManager[None]:
    return api.request(action, _RIGHTS)
