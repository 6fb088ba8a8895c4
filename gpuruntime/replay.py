# SPDX-License-Identifier: Apache-2.0
"""What a create was given, written down so that the launcher can give it again by itself.

On the start path, where it is loaded only when the launcher asks for it. What the request meant is
decided once more, from what is kept of the machine; written is what of the config.json and of the
host that came from, and what it added. The launcher compares bytes and understands nothing of it.
gpuruntime/launcher/README.md has the format.
"""

from __future__ import annotations

import os
import posixpath

from cdi import strictjson
from cdi.complete import in_user_namespace
from gpuruntime import __version__, host_state, injection, nodes, programs, ready, request
from gpuruntime import config as settings
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.oci import bundle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from cdi.wire import OciConfig
    from gpuruntime.config import Config
    from gpuruntime.grant import Grant
    from gpuruntime.host_state import State
    from gpuruntime.injection import Injection
    from gpuruntime.ready import Ready
    from gpuruntime.request import Request

NAME = "replay"
HEAD = "gpuruntime-replay 1"
# LARGEST_REPLAY of launcher/replay.h, which has room for a byte less.
MAX_BYTES = (256 << 10) - 1
MAX_RECORDS = 32
# DEEPEST_MOUNT there.
MAX_DEPTH = 63
_UID_MAP = "/proc/self/uid_map"
# Whoever is given it has been given all: to do it twice adds nothing.
_DONE = f"{request.VISIBLE_DEVICES}=void"


class _NotKeptError(Exception):
    """Nothing is kept of the machine that could be given."""


class _Kept:
    """A Host for `injection.decide` that has what is *ready*, and nothing else.

    *state* is what the last grant went with. *hooks* are the places of the hook program, the last
    of them being the one where it is.
    """

    def __init__(self, config: Config, launcher: str, path: str, ready: Ready) -> None:
        self._config = config
        self._launcher = launcher
        self._path = path
        self._ready = ready
        self.state: State = {}
        self.hooks: list[str] = []

    def grant(self, asked: Request) -> Grant:
        """Return what is kept for *asked*."""
        if asked.is_automatic and self._config["health"] == "nvml":
            raise _NotKeptError
        name = ready.key(asked, programs.hook_of(asked, self.program))
        found, state = self._ready.find(name), self._ready.state(name)
        if found is None or state is None:
            raise _NotKeptError
        self.state = state
        return found

    def program(self, name: str) -> str:
        """Return the path of the hook *name*; raise ConfigError if it is nowhere."""
        found = programs.find(name, self._config, self._launcher, self._path)
        places = programs.places(name, self._config, self._launcher, self._path)
        self.hooks = places[: places.index(found) + 1]
        return found

    def make_nodes(self, minors: object) -> bool:
        """Tell that no nodes are made."""
        del minors
        return False


def keep(  # noqa: PLR0913 (all that an answer comes from)
    data: bytes,
    config: Config,
    ready: Ready,
    *,
    launcher: str,
    identity: str,
    path: str,
    directory: str = settings.RUN_DIRECTORY,
) -> None:
    """Keep what the config.json *data* is given under *config*, if the launcher can give it.

    *ready* is what is kept of the machine now. *launcher* is argv[0] of the launcher, *identity*
    its device and inode, *path* the variable PATH. Without it, Python gives it again.
    """
    words = request.triggers(config)
    if words is None or not _is_plain(config, launcher):
        return
    host = _Kept(config, launcher, path, ready)
    try:
        found = record(data, config, host, words, launcher=launcher, path=path)
    except (GpuRuntimeError, _NotKeptError):
        return
    head = _head(ready.stamp, identity)
    if found is None or head is None:
        return
    names = sorted(bundle.known_names())
    start = head + _list(words) + _list(name.encode() for name in names)
    kept = _records(settings.read_trusted(directory, NAME, MAX_BYTES), start)
    kept = [item for item in kept if _conditions(item) != _conditions(found)]
    kept.append(found)
    while len(kept) > MAX_RECORDS or sum(map(len, kept)) > MAX_BYTES - len(start) - len(kept) * 9:
        kept.pop(0)
    if kept:
        settings.replace(directory, NAME, start + _list(kept))


def record(  # noqa: PLR0913 (all that an answer comes from)
    data: bytes,
    config: Config,
    host: _Kept,
    words: tuple[bytes, ...],
    *,
    launcher: str,
    path: str,
) -> bytes | None:
    """Return what the config.json *data* is given, None if it is not to be given again.

    Raises GpuRuntimeError if it is not to be had, _NotKeptError if nothing is kept of it.
    """
    document, doubt = bundle.parse(data)
    if doubt is not None:
        return None
    given = conditions(document, words, launcher=launcher, path=path)
    # Once for what it depends on, and once more between two looks at that: what changes meanwhile
    # does not go with it.
    decided = injection.decide(document, config, host)
    if given is None or not _is_repeatable(decided, document):
        return None
    plan = _plan(decided, document, host)
    before = host_state.read(plan)
    decided = injection.decide(document, config, host)
    added = _added(decided, document)
    if added is None or host_state.changed(host.state) or host_state.read(plan) != before:
        return None
    probes = _probes({**host.state, **{f"replay {part}": probe for part, probe in before.items()}})
    return None if probes is None else _field(given) + _field(probes) + _field(added)


def conditions(
    document: OciConfig, words: tuple[bytes, ...], *, launcher: str, path: str
) -> bytes | None:
    """Return all of *document* that its answer depends on; None if the launcher cannot tell.

    A value that is not there is empty, which no value is.
    """
    process, linux = document.get("process"), document.get("linux")
    if not isinstance(process, dict) or not isinstance(linux, dict):
        return None
    resources, env, mounts = linux.get("resources"), process.get("env"), document.get("mounts")
    if not isinstance(resources, dict) or env is None or mounts is None:
        return None
    annotations = document.get("annotations") or {}
    pairs = [_json(name) + b":" + _json(value) for name, value in annotations.items()]
    systemd = str(linux.get("cgroupsPath")).count(":") == _SYSTEMD_COLONS
    return b"".join(
        (
            _field(os.fsencode(launcher)),
            _field(os.fsencode(path)),
            _field(b"1" if systemd else b"0"),
            *(_field(_value(process, name)) for name in ("capabilities", "user")),
            _field(_value(linux, "devices")),
            _field(_value(resources, "devices")),
            _asking(map(_json, env), words),
            _asking(map(_json, mounts), words),
            _asking(pairs, words),
        )
    )


_SYSTEMD_COLONS = 2
