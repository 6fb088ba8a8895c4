# SPDX-License-Identifier: Apache-2.0
"""The host as the shim sees it: grants, the driver's inventory, CDI specs, programs, device nodes.

On the start path. Most creates have a saved grant and need nothing else, so the modules that
compute one are imported only where they are used. Expensive work is done by children of this
process.
"""

from __future__ import annotations

import posix as os

from cdi.complete import in_user_namespace
from cdi.errors import CdiError
from gpuruntime.plan import hook_programs
from gpuruntime.snapshots.grants import key
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
    from gpuruntime.snapshots.grants import SavedGrants
    from gpuruntime.snapshots.inventory_snapshot import Found


class ShimHost:
    """A Host for `injection.decide`: grants are read from *saved*, else computed and saved there.

    With None for *saved*, each grant is computed and none is saved.
    """

    def __init__(
        self, config: Config, cli_python: str, launcher: str, log: Log, saved: SavedGrants | None
    ) -> None:
        """Children run the interpreter *cli_python*; *launcher* is the launcher's argv[0]."""
        self._config = config
        self._cli_python = cli_python
        self._launcher = launcher
        self._log = log
        self._saved = saved

    def grant(self, request: Request) -> Grant:
        """Return the grant for *request*: the saved one if it is still valid, else a new one.

        Raises ConfigError, DriverError, DiscoveryError, RequestError, SpecError and
        UnresolvedDeviceError.
        """
        hook = hook_programs.hook_of(request, self.program)
        must_ask_driver = request.is_automatic and self._config["health"] == "nvml"
        if self._saved is None or must_ask_driver:
            return self._compute(request, hook)[0]
        name = key(request, hook)
        grant = self._saved.find(name)
        if grant is None:
            grant, state = self._compute(request, hook)
            if state is not None:
                self._saved.keep(name, grant, state, of_inventory=request.is_automatic)
        return grant

    def program(self, name: str) -> str:
        """Return the path of the hook program *name*; raise ConfigError if there is none."""
        path = os.environ.get(b"PATH", b"").decode("utf-8", "surrogateescape")
        return hook_programs.find(name, self._config, self._launcher, path)

    def make_nodes(self, minors: Sequence[int]) -> bool:
        """Run the driver's nvidia-modprobe; return whether it was run.

        In a user namespace it is not run: it cannot make nodes there.
        """
        from gpuruntime import slowpath  # noqa: PLC0415 (most creates have their nodes)

        if in_user_namespace({}):
            return False
        self._log.record("info", "a device node is missing: running nvidia-modprobe")
        root = self._config.driver_root or "/"
        question = {"driver root": root, "minors": list(minors)}
        return bool(slowpath.ask(self._cli_python, "make-nodes", question))

    def read_inventory(self, *, fresh: bool) -> Found:
        """Return the inventory of the snapshot, or a new one; see InventorySnapshot.get."""
        from gpuruntime.snapshots import inventory_snapshot  # noqa: PLC0415 (no saved grant)

        return inventory_snapshot.of_machine(self._config, self._cli_python, fresh=fresh)

    def read_registry(self) -> Registry:
        """Return the CDI specs of the configured directories."""
        from cdi import registry  # noqa: PLC0415 (no saved grant)

        return registry.load(
            self._config.spec_dirs, may_trust=may_trust, decode_yaml=self._decode_yaml
        )

    def _compute(self, request: Request, hook: str) -> tuple[Grant, State | None]:
        """Return a new grant for *request*, and the state of the host that it was computed from.

        *hook* is the path of the hook program. The state is None if the grant must not be saved.
        """
        from gpuruntime.plan import sources  # noqa: PLC0415 (no saved grant)

        if request.is_automatic:
            return sources.of_machine(request, hook, self._config, self.read_inventory)
        return sources.of_specs(request, self._config, self.read_registry)

    def _decode_yaml(self, texts: dict[str, str]) -> dict[str, Any]:
        """Return path → document, or the CdiError, of specs that are not strict JSON."""
        from gpuruntime import slowpath  # noqa: PLC0415 (few specs are not strict JSON)

        answers = slowpath.ask(self._cli_python, "yaml", texts)
        return {
            path: answer["document"]
            if "document" in answer
            else CdiError(answer["category"], answer["error"])
            for path, answer in answers.items()
        }
