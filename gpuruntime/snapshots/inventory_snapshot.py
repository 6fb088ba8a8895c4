# SPDX-License-Identifier: Apache-2.0
"""The inventory of the machine: read from a valid snapshot, else discovered by one process.

On the start path. The snapshot holds the host state that it was made from, and is valid while that
state is unchanged (gpuruntime/probes.py). A process that finds the snapshot invalid holds the lock
while it queries the driver. Other processes wait for the result and share a failure, but they do
not wait long: engines run a create under the limits of its container, and a create without
processor time must not delay all others. A failure caused by such limits is not shared.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from cdi import strictjson
from gpuruntime import config as settings
from gpuruntime import errors, probes, slowpath
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.record import Record
from gpuruntime.snapshots import inventory_json, storage
from gpuruntime.trusted_files import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuruntime.config import Config
    from gpuruntime.model import Inventory
    from gpuruntime.probes import State

SNAPSHOT = "inventory.json"
FAILURE = "inventory.failure"
LOCK = "inventory.lock"
FORMAT = 1
_CSV_FILES = "nvidia-container-runtime.modes.csv.mount-spec-path"
# How long a failure is shared, so that a burst of creates does not query a dead driver repeatedly.
FAILURE_S = 5
_MAX_BYTES = 16 << 20
# How long a create waits for another that queries the driver, before it queries the driver itself.
# Most drivers respond within that time.
PATIENCE_S = 3.0
_STEP_S = 0.01


class Found(Record):
    """An *inventory*, the host *state*, and *is_fresh*: whether the driver was queried just now.

    The state is None if the inventory cannot be saved.
    """

    __slots__ = ("inventory", "is_fresh", "state")

    def __init__(self, inventory: Inventory, *, is_fresh: bool, state: State | None) -> None:
        self.inventory = inventory
        self.is_fresh = is_fresh
        self.state = state


def of_machine(config: Config, cli_python: str, *, fresh: bool) -> Found:
    """Return the inventory of this machine under *config*; see `InventorySnapshot.get`.

    Discovery runs in a child process with the interpreter *cli_python*.
    """
    cache = InventorySnapshot(
        config.driver_root or "/",
        lambda: discover_machine(config, cli_python),
        variant=variant(config),
    )
    return cache.get(fresh=fresh or config["health"] == "nvml")


def discover_machine(config: Config, cli_python: str) -> Any:  # noqa: ANN401 (JSON)
    """Return the response of slowpath_server to the question for this machine under *config*."""
    deadline_s = config["discovery-timeout"]
    question = {
        "driver root": config.driver_root or "/",
        "deadline_s": deadline_s,
        "mode": settings.CSV if config.mode == settings.CSV else settings.AUTO,
        "CSV files": config[_CSV_FILES],
    }
    return slowpath.ask(cli_python, "discover", question, deadline_s)


def variant(config: Config) -> str:
    """Return what of *config*, besides the driver root, an inventory depends on; "" by default."""
    changed = config.mode == settings.CSV or config[_CSV_FILES] != settings.DEFAULTS[_CSV_FILES]
    return f"{config.mode == settings.CSV} {config[_CSV_FILES]}" if changed else ""


class InventorySnapshot:
    """The snapshot of the inventory below *driver_root*, in *directory*.

    *discover* is called when the snapshot is not valid. It returns a response of
    gpuruntime.slowpath_server, or raises GpuRuntimeError. *patience_s* is how long to wait for the
    discovery of another process. *variant* is the result of the function `variant`.
    """

    def __init__(
        self,
        driver_root: str,
        discover: Callable[[], Any],
        patience_s: float = PATIENCE_S,
        directory: str = storage.RUN_DIRECTORY,
        variant: str = "",
    ) -> None:
        self._driver_root = driver_root
        self._discover = discover
        self._patience_s = patience_s
        self._directory = directory
        self._variant = variant

    def read(self) -> Found | None:
        """Return the inventory of the snapshot, None if it is not valid for the host."""
        snapshot = self._load(SNAPSHOT)
        return None if snapshot is None else self._fitting(snapshot)

    def get(self, *, fresh: bool = False) -> Found:
        """Return the inventory; with *fresh*, from a driver query that began after this call.

        Raises the error of the discovery.
        """
        began = _now()
        old_snapshot = self._load(SNAPSHOT)
        if old_snapshot is not None and not fresh:
            result = self._fitting(old_snapshot)
            if result is not None:
                return result
        self._raise_failure()
        lock = self._open_lock()
        if lock is None:
            # Nothing can be saved: the engine is rootless.
            return Found(inventory_of(self._discover()), is_fresh=True, state=None)
        try:
            self._wait(lock)
            new_snapshot = self._load(SNAPSHOT)
            if new_snapshot is not None and new_snapshot != old_snapshot:
                result = self._fitting(new_snapshot, began)
                if result is not None and (result.is_fresh or not fresh):
                    return result
            self._raise_failure()
            return self._discovered()
        finally:
            # This releases the lock.
            os.close(lock)

    def _fitting(self, snapshot: dict[str, Any], began: float | None = None) -> Found | None:
        """Return the content of *snapshot* if valid; it is fresh if queried after *began*."""
        try:
            state = snapshot["state"]
            if probes.changed(state):
                return None
            return Found(
                inventory_json.decode(snapshot["inventory"]),
                is_fresh=began is not None and snapshot["asked"] >= began,
                state=state,
            )
        except (KeyError, ValueError, TypeError):
            return None

    def _discovered(self) -> Found:
        """Query the driver, return the result, and save it if it is valid for other processes.

        Raises the error of the discovery. An error that does not come from the driver (the child
        was killed, could not be started or got no time) concerns this process only: not saved.
        """
        query_time = _now()
        response = self._discover()
        if not response["shared"]:
            return Found(inventory_of(response), is_fresh=True, state=None)
        if "error" in response:
            failure = {"error": response["error"], "state": response["state"]}
            self._store(FAILURE, {**failure, "at": _now()})
            raise _error(response["error"])
        # The id makes each snapshot different, even if the facts are the same.
        unique_id = os.urandom(8).hex()
        facts = {"inventory": response["inventory"], "state": response["state"]}
        self._store(SNAPSHOT, {**facts, "asked": query_time, "made": unique_id})
        return Found(inventory_of(response), is_fresh=True, state=response["state"])

    def _raise_failure(self) -> None:
        """Raise the error of a recent discovery if the host has not changed since."""
        failure = self._load(FAILURE)
        if failure is None:
            return
        try:
            age = _now() - failure["at"]
            state = failure["state"]
            when = f" ({age:.1f} s ago; tried again after {FAILURE_S} s)"
            error = _error(failure["error"], when)
        except (KeyError, TypeError, AttributeError):
            # The file was not written by this version.
            return
        if 0 <= age < FAILURE_S and (state is None or not probes.changed(state)):
            raise error

    def _wait(self, lock: int) -> None:
        """Wait for *lock*, at most for the patience of this object.

        A process that does not get the lock queries the driver anyway: files are replaced as a
        whole, and the lock only saves queries.
        """
        end = time.monotonic() + self._patience_s
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    return
            else:
                return
            time.sleep(_STEP_S)

    def _open_lock(self) -> int | None:
        try:
            storage.make_directory(self._directory)
            if not may_trust(os.stat(self._directory)):
                return None
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(f"{self._directory}/{LOCK}", flags, 0o600)
        except OSError:
            return None

    def _load(self, name: str) -> dict[str, Any] | None:
        """Return the content of the file *name* if it is trusted and of this format and root."""
        snapshot = storage.read_object(self._directory, name, _MAX_BYTES)
        if snapshot is None or snapshot.get("format") != FORMAT:
            return None
        identity = snapshot.get("driver root"), snapshot.get("variant")
        return snapshot if identity == (self._driver_root, self._variant) else None

    def _store(self, name: str, content: dict[str, Any]) -> None:
        """Write *content* to the file *name*; errors are ignored."""
        document = {
            "format": FORMAT,
            "driver root": self._driver_root,
            "variant": self._variant,
            **content,
        }
        storage.replace(self._directory, name, strictjson.dumps(document).encode())


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def inventory_of(response: dict[str, Any]) -> Inventory:
    """Return the inventory in the *response* of slowpath_server; raise the error in it."""
    if "error" in response:
        raise _error(response["error"])
    return inventory_json.decode(response["inventory"])


def _error(failure: dict[str, Any], when: str = "") -> GpuRuntimeError:
    """Return the error that *failure* describes."""
    kind = getattr(errors, failure["class"])
    error: GpuRuntimeError = kind(failure["message"] + when, failure["hint"])
    return error
