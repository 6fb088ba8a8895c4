# SPDX-License-Identifier: Apache-2.0
"""The base of small value classes: equality and repr over __slots__.

On the start path, where a dataclass would cost more instructions than the interpreter's own start.
"""

from __future__ import annotations


class Record:
    """A value whose fields are the __slots__ of its classes, set once by __init__."""

    __slots__: tuple[str, ...] = ()

    def _names(self) -> list[str]:
        kinds = type(self).__mro__
        return [name for kind in kinds for name in kind.__dict__.get("__slots__", ())]

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self._names())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{n}={v!r}" for n, v in zip(self._names(), self._values()))
        return f"{type(self).__name__}({fields})"
