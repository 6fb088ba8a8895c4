# SPDX-License-Identifier: Apache-2.0
"""The entry of a runtime in an engine's config: its name, its program, its options."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuruntime.errors import ArgumentError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
# Runtimes that engines provide themselves.
_RESERVED = frozenset(("runc", "crun", "io.containerd.runc.v2"))
# Runtimes with these prefixes run in front of another runtime: their options are not copied.
FRONTS = ("nvidia", "gpuruntime")
LOW_LEVEL = ("runc", "crun")


@dataclass(frozen=True, slots=True)
class RuntimeEntry:
    """A runtime: its *name* in the engine, the *path* of its program, and its options."""

    name: str
    path: str
    is_default: bool = False
    has_cdi: bool = False
    annotations: tuple[str, ...] = ()
    has_systemd_cgroup: bool = False

    def check(self, *, is_absolute: bool) -> None:
        """Raise ArgumentError if the name or the path is not valid."""
        if not _NAME.fullmatch(self.name):
            raise ArgumentError(
                f'invalid runtime name "{self.name}"',
                "use letters, digits, and _ . - inside",
            )
        if self.name in _RESERVED:
            raise ArgumentError(
                f'"{self.name}" is the engine\'s own runtime', "choose another --runtime-name"
            )
        if is_absolute and not self.path.startswith("/"):
            raise ArgumentError(
                f'the runtime\'s path "{self.path}" is not absolute',
                "begin --runtime-path with /",
            )
        if not self.path or not self.path.isprintable() or "{{" in self.path:
            raise ArgumentError(
                f'the runtime\'s path "{self.path}" is not valid', "name a program"
            )

    def annotation_patterns(self) -> list[str]:
        """Return the patterns of the annotations that containerd passes to the runtime."""
        return [prefix if prefix.endswith("*") else f"{prefix}*" for prefix in self.annotations]


@dataclass(frozen=True, slots=True)
class Registration:
    """The registration of a runtime with an engine.

    *config* is the engine's config file, *drop_in* the drop-in that has the runtime ("": the
    config file has it). *source* is the config that the engine printed, if options were copied
    from it.
    """

    entry: RuntimeEntry
    engine: str
    config: str
    drop_in: str
    source: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The key of the registration; a later one with the same key replaces it."""
        return (self.entry.name, self.drop_in)


def candidates(default: object, name: str) -> list[str]:
    """Return the names of the runtimes whose options may be copied to *name*, the best first."""
    first = [default] if isinstance(default, str) and default and default != name else []
    return [other for other in first if not other.startswith(FRONTS)] + list(LOW_LEVEL)
