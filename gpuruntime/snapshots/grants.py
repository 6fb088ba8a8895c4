# SPDX-License-Identifier: Apache-2.0
"""Saved grants: the results of recent requests, reused while their inputs are unchanged.

On the start path: one file, read once a create. It has lines of ASCII: a head, which is the config
in force and the host state that inventories go with (gpuruntime/probes.py); then one line for each
entry: its key, a tab and the grant. An entry from CDI specs has a state of its own. Only the
requested entry is decoded, and an entry whose state has changed is not used.

Writers take no lock: the last one wins, and what is lost is computed again.
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
# 2: the stamp of the config file has ctime.
FORMAT = 2
MAX_BYTES = 2 << 20
# Images that ask for much cannot fill it with what they ask for.
MAX_KEY_BYTES = 2048
MAX_ENTRIES = 64


class SavedGrants:
    """The file in *directory* as it is now."""

    def __init__(self, directory: str = storage.RUN_DIRECTORY) -> None:
        self._directory = directory
        self._stamp: list[object] | None = None
        self._values: Mapping[str, Any] = {}
        head, _, self._entries = storage.read_trusted(directory, NAME, MAX_BYTES).partition(b"\n")
        self._head: dict[str, Any] = _decoded(head) or {}
        if self._head.get("format") != FORMAT or self._head.get("version") != __version__:
            self._head, self._entries = {}, b""

    def values(self, stamp: list[object]) -> dict[str, Any] | None:
        """Return the values of the config file with *stamp*, None if there is another."""
        values = self._head.get("values")
        return values if self._head.get("config") == stamp and isinstance(values, dict) else None

    def use(self, stamp: list[object] | None, values: Mapping[str, Any]) -> None:
        """Take the *values* of the config file with *stamp* for those in force."""
        self._stamp, self._values = stamp, values

    @property
    def stamp(self) -> list[object] | None:
        """The stamp of the config file in force, None without one."""
        return self._stamp

    def again(self) -> SavedGrants:
        """Return the file as it is by now, for the same config."""
        found = SavedGrants(self._directory)
        found.use(self._stamp, self._values)
        return found

    def state(self, key: bytes) -> State | None:
        """Return the state that goes with what is kept under *key*, None if that is nothing."""
        if self._head.get("config") != self._stamp:
            return None
        entry = _decoded(self._line(key)) or {}
        found: State | None = entry.get("state") or self._head.get("state")
        return found if entry else None

    def find(self, key: bytes) -> Grant | None:
        """Return the grant that is kept under *key*, if it still holds."""
        if self._head.get("config") != self._stamp:
            return None
        entry = _decoded(self._line(key))
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
        """Keep *grant* under *key* for as long as the host's *state* is that."""
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
        # What goes with another config, or another state of the host, is of no use.
        lines = self._entries.splitlines() if head == self._head else []
        lines = [line for line in lines if not line.startswith(key + b"\t")]
        lines.append(key + b"\t" + strictjson.dumps(entry).encode())
        while len(lines) > MAX_ENTRIES or sum(map(len, lines)) > MAX_BYTES // 2:
            lines.pop(0)
        data = b"\n".join([strictjson.dumps(head).encode(), *lines, b""])
        if len(data) <= MAX_BYTES:
            storage.replace(self._directory, NAME, data)

    def _line(self, key: bytes) -> bytes:
        """Return the entry of *key*, b"" if there is none."""
        start = key + b"\t"
        at = 0 if self._entries.startswith(start) else self._entries.find(b"\n" + start) + 1
        if not at and not self._entries.startswith(start):
            return b""
        end = self._entries.find(b"\n", at)
        # Without its end it may be half of one.
        return self._entries[at + len(start) : end] if end >= 0 else b""


def key(asked: Request, hook: str) -> bytes:
    """Return what tells the grant of *asked* with the hook program *hook* from all others."""
    extras = asked.extras
    members = [
        *(asked.mode, asked.driver_only, asked.devices, hook),
        *(extras.capabilities, extras.requirements, extras.imex, extras.features, extras.mig),
    ]
    return strictjson.dumps(members).encode()


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        found = strictjson.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
