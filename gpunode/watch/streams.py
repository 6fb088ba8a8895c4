# SPDX-License-Identifier: Apache-2.0
"""The updates of a watcher for each of its consumers, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from gpunode.model import Event, Update


class Streams:
    """The consumers of a watcher; *current* returns its last update, without events."""

    def __init__(self, current: Callable[[], Update]) -> None:
        self._current = current
        self._streams: list[_Stream] = []

    def publish(self, events: tuple[Event, ...]) -> None:
        """Note a change of the state, with *events*, for each consumer."""
        for stream in self._streams:
            stream.add(events)

    def end(self) -> None:
        """End the updates of all consumers."""
        for stream in self._streams:
            stream.end()

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the current state, then an update after each change, until `end`.

        A consumer that is slow gets the newest state, with all events since its last update.
        """
        stream = _Stream()
        self._streams.append(stream)
        try:
            yield self._current()
            while await stream.has_more():
                yield replace(self._current(), events=stream.take())
        finally:
            self._streams.remove(stream)


class _Stream:
    """What one consumer has not seen yet."""

    def __init__(self) -> None:
        self._events: tuple[Event, ...] = ()
        self._signal = asyncio.Event()
        self._has_ended = False

    def add(self, events: tuple[Event, ...]) -> None:
        """Note a change of the state, with *events*."""
        self._events += events
        self._signal.set()

    def end(self) -> None:
        """Note that there is nothing more."""
        self._has_ended = True
        self._signal.set()

    async def has_more(self) -> bool:
        """Wait for a change; return False at the end."""
        await self._signal.wait()
        self._signal.clear()
        return not self._has_ended

    def take(self) -> tuple[Event, ...]:
        """Return the events that were not taken yet."""
        events, self._events = self._events, ()
        return events
