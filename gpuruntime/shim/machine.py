# SPDX-License-Identifier: Apache-2.0
"""The machine as the shim sees it: the driver's inventory, CDI specs, device nodes to create.

Loaded only if no saved grant fits the request. Expensive work is done by children of this process.
"""

from __future__ import annotations

from cdi import registry
from cdi.complete import in_user_namespace
from cdi.errors import CdiError
from gpuruntime import slowpath
from gpuruntime.plan import sources
from gpuruntime.snapshots import inventory_snapshot
from gpuruntime.trusted_files import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cdi.registry import Registry
    from gpuruntime.config import Config
    from gpuruntime.grant import Grant
    from gpuruntime.log import Log
    from gpuruntime.probes import State
    from gpuruntime.request.parse import Request
    from gpuruntime.snapshots.inventory_snapshot import Found


class Machine:
    """The machine under *config*; children run the interpreter *cli_python*."""

    def __init__(self, config: Config, cli_python: str, log: Log) -> None:
        self._config = config
        self._cli_python = cli_python
        self._log = log

    def work_out(self, asked: Request, hook: str) -> tuple[Grant, State | None]:
        """Return what there is for *asked*, and the state of the host that it goes with.

        *hook* is the path of the hook program. The state is None if the grant cannot be kept.
        Raises DriverError, DiscoveryError, RequestError, SpecError and UnresolvedDeviceError.
        """
        if asked.is_automatic:
            return sources.of_machine(asked, hook, self._config, self.inventory)
        return sources.of_specs(asked, self._config, self.registry)

    def inventory(self, *, fresh: bool) -> Found:
        """Return the inventory of the snapshot, or a new one; see InventorySnapshot.get."""
        return inventory_snapshot.of_machine(self._config, self._cli_python, fresh=fresh)

    def registry(self) -> Registry:
        """Return the CDI specs of the configured directories."""
        return registry.load(
            self._config.spec_dirs, may_trust=may_trust, decode_yaml=self._decode_yaml
        )

    def make_nodes(self, minors: Sequence[int]) -> bool:
        """Run the driver's nvidia-modprobe; return whether it was.

        Not in a user namespace, where it cannot make nodes.
        """
        if in_user_namespace({}):
            return False
        self._log.record("info", "a device node is missing: running nvidia-modprobe")
        root = self._config.driver_root or "/"
        question = {"driver root": root, "minors": list(minors)}
        return bool(slowpath.ask(self._cli_python, "make-nodes", question))

    def _decode_yaml(self, texts: dict[str, str]) -> dict[str, Any]:
        """Return path → document, or why there is none, of specs that are no strict JSON."""
        answer = slowpath.ask(self._cli_python, "yaml", texts)
        return {
            path: found["document"]
            if "document" in found
            else CdiError(found["category"], found["error"])
            for path, found in answer.items()
        }
