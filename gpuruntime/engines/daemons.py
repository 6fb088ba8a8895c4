# SPDX-License-Identifier: Apache-2.0
"""Find the engines that run here: their programs, and the config files that they were given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ENGINES = {"dockerd": "docker", "containerd": "containerd", "crio": "crio"}
_CONFIG_OPTIONS = {
    "docker": ("--config-file",),
    "containerd": ("--config", "-c"),
    "crio": ("--config", "-c"),
}
MAX_CMDLINE_BYTES = 1 << 16
# A containerd that another engine has started on a config of its own.
_SERVANTS = ("/var/lib/rancher/", "/run/docker/", "/var/run/docker/", "/run/k3s/", "/etc/k0s/")


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process: the *name* of its engine, its *program*, and the *config* file that it reads."""

    name: str
    program: str
    config: str | None


def running(proc: str = "/proc") -> Iterator[Daemon]:
    """Give the daemons of engines that see the files that we see; not those in containers."""
    try:
        ours = os.readlink(f"{proc}/self/ns/mnt")
    except OSError:
        return
    for entry in sorted(os.listdir(proc)):
        if not entry.isdigit():
            continue
        try:
            with open(f"{proc}/{entry}/comm", encoding="utf-8", errors="replace") as stream:
                name = _ENGINES.get(stream.read().strip())
            if name is None or os.readlink(f"{proc}/{entry}/ns/mnt") != ours:
                continue
            program = os.readlink(f"{proc}/{entry}/exe")
            with open(f"{proc}/{entry}/cmdline", "rb") as stream_:
                words = os.fsdecode(stream_.read(MAX_CMDLINE_BYTES)).split("\0")
        except OSError:
            # It has ended meanwhile, or is another user's.
            continue
        config = _option(words, _CONFIG_OPTIONS[name])
        if config is None or not config.startswith(_SERVANTS):
            yield Daemon(name, program, config)


def _option(words: Sequence[str], options: Sequence[str]) -> str | None:
    """Return the absolute path that one of *options* has among *words*, None if none has."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in options:
            continue
        if not equals:
            value = words[index + 1] if index + 1 < len(words) else ""
        if value.startswith("/"):
            return value
    return None
