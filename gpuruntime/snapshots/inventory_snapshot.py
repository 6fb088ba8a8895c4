# SPDX-License-Identifier: Apache-2.0
"""The inventory of the machine: read from a snapshot that is still valid, else discovered, once.

On the start path. The snapshot holds the host state that it was made from, and is valid while that
is unchanged (gpuruntime/probes.py). A process that finds it invalid holds the lock while the
driver is queried. The others wait for the result and share a failure, but they do not wait long:
engines run a create under the limits of its container, and one that gets no processor time must
not delay all others. What such limits did is kept for nobody else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from cdi import strictjson
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
# So long a failure is remembered: a storm of creates is not to ask a dead driver one by one.
FAILURE_S = 5
_MAX_BYTES = 16 << 20
# So long a create waits for another that asks the driver, before it asks itself. Most drivers
# have answered by then.
PATIENCE_S = 3.0
_STEP_S = 0.01


class Found(Record):
    """An *inventory*, whether the driver was asked for it just now, and the host's *state*.

    The state is None where nothing can be kept.
    """

    __slots__ = ("inventory", "is_fresh", "state")

    def __init__(self, inventory: Inventory, *, is_fresh: bool, state: State | None) -> None:
        self.inventory = inventory
        self.is_fresh = is_fresh
        self.state = state


def of_machine(config: Config, cli_python: str, *, fresh: bool) -> Found:
    """Return the inventory of this machine as *config* has it; see `InventorySnapshot.get`.

    Discovery is a child with the interpreter *cli_python*.
    """
    deadline_s = config["discovery-timeout"]
    root = config.driver_root or "/"
    question = {"driver root": root, "deadline_s": deadline_s}
    cache = InventorySnapshot(
        root, lambda: slowpath.ask(cli_python, "discover", question, deadline_s)
    )
    return cache.get(fresh=fresh or config["health"] == "nvml")


class InventorySnapshot:
    """The snapshot of the inventory below *driver_root*, in *directory*.

    *discover* is called when none fits: it returns an answer of gpuruntime.slowpath_server, or
    raises GpuRuntimeError if there is none. *patience_s* is how long to wait for another.
    """

    def __init__(
        self,
        driver_root: str,
        discover: Callable[[], Any],
        patience_s: float = PATIENCE_S,
        directory: str = storage.RUN_DIRECTORY,
    ) -> None:
        self._driver_root = driver_root
        self._discover = discover
        self._patience_s = patience_s
        self._directory = directory

    def read(self) -> Found | None:
        """Return the inventory of the snapshot, None if there is none that fits the host."""
        found = self._load(SNAPSHOT)
        return None if found is None else self._fitting(found)

    def get(self, *, fresh: bool = False) -> Found:
        """Return the inventory; with *fresh* the driver is asked for it after this call began.

        Raises the error of the discovery.
        """
        began = _now()
        before = self._load(SNAPSHOT)
        if before is not None and not fresh:
            found = self._fitting(before)
            if found is not None:
                return found
        self._raise_failure()
        lock = self._open_lock()
        if lock is None:
            # Nowhere to keep anything: an engine without root.
            return Found(inventory_of(self._discover()), is_fresh=True, state=None)
        try:
            self._wait(lock)
            after = self._load(SNAPSHOT)
            if after is not None and after != before:
                found = self._fitting(after, began)
                if found is not None and (found.is_fresh or not fresh):
                    return found
            self._raise_failure()
            return self._discovered()
        finally:
            # Its end is the end of the lock.
            os.close(lock)

    def _fitting(self, snapshot: dict[str, Any], began: float | None = None) -> Found | None:
        """Return what *snapshot* has if it fits the host; it is fresh if made since *began*."""
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
        """Return what the driver answers now; it is kept if others would have the same answer.

        Raises the error of the discovery. One that is not the driver's answer (the child was
        killed, could not be started or got no time) is this process's own, and not kept.
        """
        asked = _now()
        answer = self._discover()
        if not answer["shared"]:
            return Found(inventory_of(answer), is_fresh=True, state=None)
        if "error" in answer:
            failure = {"error": answer["error"], "state": answer["state"]}
            self._store(FAILURE, {**failure, "at": _now()})
            raise _error(answer["error"])
        # Each discovery makes another file of it, also of the same facts.
        made = os.urandom(8).hex()
        kept = {"inventory": answer["inventory"], "state": answer["state"]}
        self._store(SNAPSHOT, {**kept, "asked": asked, "made": made})
        return Found(inventory_of(answer), is_fresh=True, state=answer["state"])

    def _raise_failure(self) -> None:
        """Raise the error of a discovery that failed a moment ago, on a host as it is now."""
        failure = self._load(FAILURE)
        if failure is None:
            return
        try:
            age = _now() - failure["at"]
            state = failure["state"]
            when = f" ({age:.1f} s ago; tried again after {FAILURE_S} s)"
            error = _error(failure["error"], when)
        except (KeyError, TypeError, AttributeError):
            # Not what we write there.
            return
        if 0 <= age < FAILURE_S and (state is None or not probes.changed(state)):
            raise error

    def _wait(self, lock: int) -> None:
        """Wait for *lock* for a while.

        Whoever does not get it asks the driver all the same: files are replaced as a whole, and
        the lock only saves the driver questions.
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
        """Return the content of the file *name*, if it is ours, of this version and this root."""
        found = storage.read_object(self._directory, name, _MAX_BYTES)
        if found is None or found.get("format") != FORMAT:
            return None
        return found if found.get("driver root") == self._driver_root else None

    def _store(self, name: str, content: dict[str, Any]) -> None:
        """Put *content* into the file *name*; without it, the next create asks again."""
        document = {"format": FORMAT, "driver root": self._driver_root, **content}
        storage.replace(self._directory, name, strictjson.dumps(document).encode())


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def inventory_of(answer: dict[str, Any]) -> Inventory:
    """Return the inventory in an *answer* of slowpath_server; raise the error if it is one."""
    if "error" in answer:
        raise _error(answer["error"])
    return inventory_json.decode(answer["inventory"])


def _error(failure: dict[str, Any], when: str = "") -> GpuRuntimeError:
    """Return the error that *failure* describes."""
    kind = getattr(errors, failure["class"])
    found: GpuRuntimeError = kind(failure["message"] + when, failure["hint"])
    return found
