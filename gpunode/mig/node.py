# SPDX-License-Identifier: Apache-2.0
"""What the manager of MIG needs of the API server: its node, and the pods on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Its value is the name of the config that the GPUs are to have.
CONFIG_LABEL = "nvidia.com/mig.config"


@dataclass(frozen=True, slots=True)
class NodeView:
    """The labels of the node, with the version of the object that has them."""

    labels: Mapping[str, str]
    version: str
    uid: str = ""


class Node(Protocol):
    """The node; each call may block, and raises ApiServerError."""

    def read(self) -> NodeView:
        """Return the node's labels."""

    def set_labels(self, labels: Mapping[str, str], version: str) -> None:
        """Set labels of the version of the node that was read; the error may be CONFLICT."""

    def pods(self, apps: Sequence[str]) -> list[str]:
        """Return the pods of *apps* that have not ended."""

    def delete_pod(self, name: str) -> None:
        """Delete a pod."""

    def report(self, reason: str, message: str, uid: str, *, is_warning: bool = False) -> None:
        """Create an event."""
