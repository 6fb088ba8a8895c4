# SPDX-License-Identifier: Apache-2.0
"""The launcher's companion: what it may do by itself under the config that is in force.

On the start path, where it is loaded only when the launcher has given a create to Python in vain.
This is the only place where a companion is made; gpuruntime/launcher/README.md has the format.
"""

from __future__ import annotations

import os

from gpuruntime import config as settings
from gpuruntime import request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuruntime.config import Config

NAME = "launcher"
HEAD = "gpuruntime-launcher 2"
MAX_BYTES = 64 << 10
# MOST_WORDS and LONGEST_WORD of launcher/triggers.h, which looks for pairs of bytes first.
MAX_WORDS = 128
MAX_WORD_BYTES = 256
MIN_WORD_BYTES = 2
# It has files that go into every container.
_ALWAYS_ON_MODE = "csv"


def content(config: Config, stamp: Sequence[object] | None) -> bytes | None:
    """Return the companion for *config*, whose file has *stamp*, None for no file at all.

    None if the launcher cannot be told, or not in so many bytes.
    """
    names = [*config.runtimes, config.path or "-"]
    if not all(name and not {"\n", "\0"} & set(name) for name in names):
        return None
    lines = [HEAD]
    if stamp is None:
        lines.append("missing")
    else:
        lines += [f"config {config.path}", " ".join(("stat", *map(str, stamp[1:])))]
    lines += [f"runtime {item}" for item in config.runtimes]
    words = passing(config)
    lines.append("creates python" if words is None else "creates pass")
    lines += [f"word {word.decode()}" for word in words or ()]
    data = os.fsencode("\n".join((*lines, "end", "")))
    return data if len(data) <= MAX_BYTES else None


def passing(config: Config) -> tuple[bytes, ...] | None:
    """Return the words without which the launcher may pass a create; None if it may pass none."""
    words = request.triggers(config)
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
    settings.make_directory(settings.RUN_DIRECTORY)
    if settings.read_trusted(settings.RUN_DIRECTORY, NAME, MAX_BYTES) != wanted:
        settings.replace(settings.RUN_DIRECTORY, NAME, wanted)


def keep(environment: Mapping[str, str]) -> None:
    """Have a companion for the config that *environment* selects, where that can be.

    Without one each create is Python's affair: slower, not wrong.
    """
    found = settings.find(environment)
    stamp = None if found is None else settings.stamp(*found)
    config = settings.compiled(stamp)
    if config is None:
        # Changed a moment ago: whoever reads it next compiles it.
        return
    try:
        store(config, stamp)
    except OSError:
        # There is no directory for it.
        return
