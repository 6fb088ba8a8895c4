# SPDX-License-Identifier: Apache-2.0
"""What the agent has for its services."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunode.plugin_spec import Roots
from gpunode.services.observation import Holdable, Measuring

if TYPE_CHECKING:
    from lightkube import Client

    from gpunode.services.node_relay import RemoteNode

# The connections of the child without rights on which the agent does something as root.
PODS, LABELS = "pods", "labels"
# The connection on which the child asks the API server for the manager of MIG.
MIG_NODE = "mig-node"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a service of the agent uses instead of its own.

    *watch* returns the agent's watcher of the driver below *driver_root*, as a context.
    *config_path* returns the path of the config file in force, "" for none, or raises ConfigError.
    A service without rights has *connections* to the agent, and *client*, which returns a client
    of the API server or raises ApiServerError.
    A service that is root has *holdable*, the agent's watcher too, and *mig_node*, the node that
    the child asks the API server for.
    """

    watch: Callable[[Roots], AbstractAsyncContextManager[Measuring]]
    config_path: Callable[[], str]
    connections: Mapping[str, socket.socket] = field(default_factory=dict)
    client: Callable[[], Client] | None = None
    driver_root: str = "/"
    holdable: Holdable | None = None
    mig_node: RemoteNode | None = None
