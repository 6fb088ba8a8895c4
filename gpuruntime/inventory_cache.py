# SPDX-License-Identifier: Apache-2.0
"""The inventory of the machine: read from a snapshot that still fits, else discovered, once.

On the start path. The snapshot holds the state of the host that it was made from, and counts while
that is the same (gpuruntime/host_state.py). Whoever finds it unfit holds the lock while the driver
is asked; the others wait for the answer, no longer than the driver has, and a failure is theirs
as well.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time

from gpuruntime import config as settings
from gpuruntime import errors, host_state, model_json, slowpath
from gpuruntime.errors import DriverError, GpuRuntimeError
from gpuruntime.trust import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuruntime.config import Config
    from gpuruntime.model import Inventory

SNAPSHOT = "inventory.json"
FAILURE = "inventory.failure"
LOCK = "inventory.lock"
FORMAT = 1
# So long a failure is remembered: a storm of creates is not to ask a dead driver one by one.
FAILURE_S = 5
_MAX_BYTES = 16 << 20
_STEP_S = 0.01


def of_machine(config: Config, cli_python: str, *, fresh: bool) -> tuple[Inventory, bool]:
    """Return the inventory of this machine as *config* has it; see `InventoryCache.get`.

    Discovery is a child with the interpreter *cli_python*.
    """
    deadline_s = config["discovery-timeout"]
    root = config.driver_root or "/"
    question = {"driver root": root, "deadline_s": deadline_s}
    cache = InventoryCache(
        root, lambda: slowpath.ask(cli_python, "discover", question, deadline_s), deadline_s
    )
    return cache.get(fresh=fresh or config["health"] == "nvml")


class InventoryCache:
    """The snapshot of the inventory below *driver_root*, in *directory*.

    *discover* is called when there is none that fits: it returns what gpuruntime.slow answers, or
    raises GpuRuntimeError. *deadline_s* is how long that may take, and how long others wait.
    """

    def __init__(
        self,
        driver_root: str,
        discover: Callable[[], Any],
        deadline_s: float,
        directory: str = settings.RUN_DIRECTORY,
    ) -> None:
        self._driver_root = driver_root
        self._discover = discover
        self._deadline_s = deadline_s
        self._directory = directory

    def read(self) -> Inventory | None:
        """Return the inventory of the snapshot, None if there is none that fits the host."""
        found = self._load(SNAPSHOT)
        return None if found is None else self._fitting(found)

    def get(self, *, fresh: bool = False) -> tuple[Inventory, bool]:
        """Return the inventory, and whether the driver was asked for it after this call began.

        With *fresh* it is so. Raises the error of the discovery.
        """
        began = _now()
        before = self._load(SNAPSHOT)
        if before is not None and not fresh:
            inventory = self._fitting(before)
            if inventory is not None:
                return inventory, False
        self._raise_failure()
        lock = self._open_lock()
        if lock is None:
            # Nowhere to keep anything: an engine without root.
            return inventory_of(self._discover()), True
        try:
            self._wait(lock)
            after = self._load(SNAPSHOT)
            if after is not None and after != before:
                inventory = self._fitting(after)
                is_later = inventory is not None and after["asked"] >= began
                if inventory is not None and (is_later or not fresh):
                    return inventory, is_later
            self._raise_failure()
            return self._discovered(), True
        finally:
            # Its end is the end of the lock.
            os.close(lock)

    def _fitting(self, snapshot: dict[str, Any]) -> Inventory | None:
        try:
            if host_state.changed(snapshot["state"]):
                return None
            return model_json.decode(snapshot["inventory"])
        except (KeyError, ValueError, TypeError):
            return None

    def _discovered(self) -> Inventory:
        asked = _now()
        try:
            answer = self._discover()
        except GpuRuntimeError as error:
            failure = {
                "class": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
            }
            answer = {"error": failure, "state": None}
        if "error" in answer:
            self._store(FAILURE, {**answer, "at": _now()})
            raise _error(answer["error"])
        # Each discovery makes another file of it, also of the same facts.
        self._store(SNAPSHOT, {**answer, "asked": asked, "made": os.urandom(8).hex()})
        return model_json.decode(answer["inventory"])

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
        if 0 <= age < FAILURE_S and (state is None or not host_state.changed(state)):
            raise error

    def _wait(self, lock: int) -> None:
        """Wait for *lock* as long as the driver may take; raise DriverError."""
        end = time.monotonic() + self._deadline_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    raise
            else:
                return
            if time.monotonic() >= end:
                raise DriverError(
                    f"the driver did not answer in {self._deadline_s:g} s "
                    "to another container that is being created",
                    'look for NVRM and Xid lines in "dmesg"',
                )
            time.sleep(_STEP_S)

    def _open_lock(self) -> int | None:
        try:
            settings.make_directory(self._directory)
            if not may_trust(os.stat(self._directory)):
                return None
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(f"{self._directory}/{LOCK}", flags, 0o600)
        except OSError:
            return None

    def _load(self, name: str) -> dict[str, Any] | None:
        """Return the content of the file *name*, if it is ours, of this version and this root."""
        found = settings.read_trusted(self._directory, name, _MAX_BYTES)
        if found is None or found.get("format") != FORMAT:
            return None
        return found if found.get("driver root") == self._driver_root else None

    def _store(self, name: str, content: dict[str, Any]) -> None:
        """Put *content* into the file *name*; without it, the next create asks again."""
        document = {"format": FORMAT, "driver root": self._driver_root, **content}
        temporary = f"{self._directory}/.{name}.{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o644)
        except OSError:
            return
        try:
            try:
                view = memoryview(json.dumps(document).encode())
                while view:
                    view = view[os.write(fd, view) :]
                os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)
            finally:
                os.close(fd)
            os.rename(temporary, f"{self._directory}/{name}")
        except OSError:
            os.unlink(temporary)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def inventory_of(answer: dict[str, Any]) -> Inventory:
    """Return the inventory of the *answer* of gpuruntime.slow; raise the error that it is."""
    if "error" in answer:
        raise _error(answer["error"])
    return model_json.decode(answer["inventory"])


def _error(failure: dict[str, Any], when: str = "") -> GpuRuntimeError:
    """Return the error that *failure* describes."""
    kind = getattr(errors, failure["class"])
    found: GpuRuntimeError = kind(failure["message"] + when, failure["hint"])
    return found
