# SPDX-License-Identifier: Apache-2.0
"""Saved grants: the results of recent requests, reused while their inputs are unchanged.

On the start path: one file, read once for each create. It has lines of ASCII. The first line has
the config in force and the host state (gpuruntime/probes.py) of grants from the inventory. Each
further line is an entry: its key, a tab and the grant. An entry from CDI specs has its own state.
Only the requested entry is decoded. An entry whose state has changed is not used.

Writers take no lock: the last one wins, and lost entries are computed again.
"""

from __future__ import annotations

from cdi import strictjson
from gpuruntime import __version__, probes
from gpuruntime.grant import Grant
from gpuruntime.snapshots import storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gpuruntime.probes import State
    from gpuruntime.request.parse import Request

NAME = "ready.json"
# 2: the stamp of the config file includes ctime.
FORMAT = 2
MAX_BYTES = 2 << 20
# Limits, so that requests of images cannot fill the file.
MAX_KEY_BYTES = 2048
MAX_ENTRIES = 64


class SavedGrants:
    """The saved grants in *directory*, read when the object is made."""

    def __init__(self, directory: str = storage.RUN_DIRECTORY) -> None:
        self._directory = directory
        self._stamp: list[object] | None = None
        self._values: Mapping[str, Any] = {}
        head, _, self._entries = storage.read_trusted(directory, NAME, MAX_BYTES).partition(b"\n")
        self._head: dict[str, Any] = storage.object_of(head) or {}
        if self._head.get("format") != FORMAT or self._head.get("version") != __version__:
            self._head, self._entries = {}, b""

    def values(self, stamp: list[object]) -> dict[str, Any] | None:
        """Return the values of the config file with *stamp*, None if the file has other values."""
        values = self._head.get("values")
        return values if self._head.get("config") == stamp and isinstance(values, dict) else None

    def use(self, stamp: list[object] | None, values: Mapping[str, Any]) -> None:
        """Set the config in force: the *values* of the config file with *stamp*."""
        self._stamp, self._values = stamp, values

    @property
    def stamp(self) -> list[object] | None:
        """The stamp of the config file in force, None without a config file."""
        return self._stamp

    def again(self) -> SavedGrants:
        """Return the saved grants read again, with the same config in force."""
        saved = SavedGrants(self._directory)
        saved.use(self._stamp, self._values)
        return saved

    def state(self, key: bytes) -> State | None:
        """Return the state of the entry with *key*, None if the entry does not exist."""
        if self._head.get("config") != self._stamp:
            return None
        entry = storage.object_of(self._line(key)) or {}
        state: State | None = entry.get("state") or self._head.get("state")
        return state if entry else None

    def find(self, key: bytes) -> Grant | None:
        """Return the grant with *key* if its state is unchanged, else None."""
        if self._head.get("config") != self._stamp:
            return None
        entry = storage.object_of(self._line(key))
        if entry is None:
            return None
        try:
            state = entry["state"] or self._head["state"]
            if probes.changed(state):
                return None
            return Grant(entry["edits"], notes=entry["notes"], warnings=entry["warnings"])
        except (KeyError, TypeError):
            return None

    def keep(self, key: bytes, grant: Grant, state: State, *, of_inventory: bool) -> None:
        """Save *grant* under *key*; it is valid while the host has *state*."""
        if len(key) > MAX_KEY_BYTES:
            return
        head = {
            "format": FORMAT,
            "version": __version__,
            "config": self._stamp,
            "values": self._values,
            "state": state if of_inventory else self._head.get("state"),
        }
        entry = {
            "edits": grant.edits,
            "notes": grant.notes,
            "warnings": grant.warnings,
            "state": None if of_inventory else state,
        }
        # Entries of another config or another state of the host are not valid any more.
        lines = self._entries.splitlines() if head == self._head else []
        lines = [line for line in lines if not line.startswith(key + b"\t")]
        lines.append(key + b"\t" + strictjson.dumps(entry).encode())
        while len(lines) > MAX_ENTRIES or sum(map(len, lines)) > MAX_BYTES // 2:
            lines.pop(0)
        data = b"\n".join([strictjson.dumps(head).encode(), *lines, b""])
        if len(data) <= MAX_BYTES:
            storage.replace(self._directory, NAME, data)

    def _line(self, key: bytes) -> bytes:
        """Return the entry with *key*, b"" if it does not exist."""
        start = key + b"\t"
        offset = 0 if self._entries.startswith(start) else self._entries.find(b"\n" + start) + 1
        if not offset and not self._entries.startswith(start):
            return b""
        end = self._entries.find(b"\n", offset)
        # A line without a newline may be incomplete.
        return self._entries[offset + len(start) : end] if end >= 0 else b""


def key(request: Request, hook: str) -> bytes:
    """Return the key that identifies the grant for *request* with the hook program *hook*."""
    extras = request.extras
    members = [
        *(request.mode, request.driver_only, request.devices, hook),
        *(extras.capabilities, extras.requirements, extras.imex, extras.features, extras.mig),
        extras.all_csv,
    ]
    return strictjson.dumps(members).encode()
