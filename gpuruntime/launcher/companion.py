# SPDX-License-Identifier: Apache-2.0
"""The launcher's companion file: what the launcher may decide alone under the config in force.

On the start path, where it is loaded only when the launcher handed over a create that it could
have decided alone. No other module makes a companion; gpuruntime/launcher/README.md has the
format.
"""

from __future__ import annotations

import os

from gpuruntime import __version__
from gpuruntime import config as settings
from gpuruntime.request import parse
from gpuruntime.snapshots import config_snapshot, storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuruntime.config import Config

NAME = "launcher"
# Another program may know of more words.
HEAD = f"gpuruntime-launcher 3 {__version__}"
MAX_BYTES = 64 << 10
# MOST_WORDS and LONGEST_WORD of launcher/triggers.h, which looks for pairs of bytes first.
MAX_WORDS = 128
MAX_WORD_BYTES = 256
MIN_WORD_BYTES = 2
# It has files that go into every container.
_ALWAYS_ON_MODE = "csv"


def content(config: Config, stamp: Sequence[object] | None) -> bytes | None:
    """Return the companion for *config*, whose file has *stamp*, None for no file at all.

    None if the launcher cannot use one, or it would be too large.
    """
    start = config_lines(stamp)
    if start is None or not all(map(_is_line, config.runtimes)):
        return None
    lines = [HEAD, *start, *(f"runtime {item}" for item in config.runtimes)]
    words = passing(config)
    lines.append("creates python" if words is None else "creates pass")
    lines += [f"word {word.decode()}" for word in words or ()]
    data = os.fsencode("\n".join((*lines, "end", "")))
    return data if len(data) <= MAX_BYTES else None


def config_lines(stamp: Sequence[object] | None) -> list[str] | None:
    """Return what tells the config file with *stamp*, None for none, from others; None if nothing.

    The launcher writes the same lines of the one that it finds.
    """
    if stamp is None:
        return ["missing"]
    path, *numbers = map(str, stamp)
    return [f"config {path}", " ".join(("stat", *numbers))] if _is_line(path) else None


def _is_line(text: str) -> bool:
    return bool(text) and "\n" not in text and "\0" not in text


def passing(config: Config) -> tuple[bytes, ...] | None:
    """Return the words without which the launcher may pass a create; None if it may pass none."""
    words = parse.triggers(config)
    if words is None or config.mode == _ALWAYS_ON_MODE or len(words) > MAX_WORDS:
        return None
    if not all(MIN_WORD_BYTES <= len(word) <= MAX_WORD_BYTES for word in words):
        return None
    return words


def store(config: Config, stamp: Sequence[object] | None) -> None:
    """Have the companion for *config* where the launcher looks, if it can be written there."""
    wanted = content(config, stamp)
    if wanted is None:
        return
    if storage.read_trusted(storage.RUN_DIRECTORY, NAME, MAX_BYTES) != wanted:
        storage.replace(storage.RUN_DIRECTORY, NAME, wanted)


def keep(environment: Mapping[str, str]) -> None:
    """Have a companion for the config that *environment* selects, where that can be.

    Without one each create is Python's affair: slower, not wrong.
    """
    file = settings.find(environment)
    stamp = None if file is None else settings.stamp(*file)
    config = config_snapshot.compiled(stamp)
    # None if it was changed a moment ago: whoever reads it next compiles it.
    if config is not None:
        store(config, stamp)
