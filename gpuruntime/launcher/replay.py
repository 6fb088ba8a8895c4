# SPDX-License-Identifier: Apache-2.0
"""Record the result of a create, so that the launcher can repeat it without Python.

On the start path, where it is loaded only when the launcher asks for it. There is a file for each
result: the bytes of the config.json, the state of the host that the result depends on, and the
bytes of the result. The contents of some strings, on which nothing depends, are holes in both. The
launcher compares and copies bytes. gpuruntime/launcher/README.md has the format.
"""

from __future__ import annotations

import os
import posixpath

from cdi import strictjson
from cdi.complete import in_user_namespace
from gpuruntime import __version__, probes
from gpuruntime import config as settings
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.launcher import companion, replay_template
from gpuruntime.oci import bundle, lowlevel
from gpuruntime.plan import hook_programs, injection, node_numbers
from gpuruntime.record import Record
from gpuruntime.request import parse
from gpuruntime.snapshots import storage
from gpuruntime.snapshots.grants import key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from cdi.registry import Registry
    from cdi.wire import OciConfig
    from gpuruntime.config import Config
    from gpuruntime.grant import Grant
    from gpuruntime.plan.injection import Injection
    from gpuruntime.probes import Plan, State
    from gpuruntime.request.parse import Request
    from gpuruntime.snapshots.grants import SavedGrants

# A file is NAME, a hyphen and the number of its config.json.
NAME = "replay"
HEAD = "gpuruntime-replay 4"
# LARGEST_REPLAY of launcher/replay.h, where a NUL is behind it, and MOST_HOLES.
MAX_BYTES = (1 << 18) - 1
MAX_HOLES = (1 << 11) - 1
MAX_FILES = 48
# The bytes of a config.json are in it, secrets among them.
_MODE = 0o600
# An entry that marks a container as prepared: adding the same again changes nothing.
_DONE = f"{parse.VISIBLE_DEVICES}=void"


class Caller(Record):
    """How the launcher was called: its argv[0], device and inode, and the variable PATH."""

    __slots__ = ("identity", "path", "program")

    def __init__(self, program: str, identity: str, path: str) -> None:
        self.program = program
        self.identity = identity
        self.path = path


class _NotKeptError(Exception):
    """No grant is saved for the request, or it is no longer valid."""


class _Kept:
    """A Host for `injection.decide` that has what is *saved*, and nothing else.

    *state* is what the last grant goes with. *hooks* are the places of the hook program, the last
    of them being the one where it is.
    """

    def __init__(self, config: Config, caller: Caller, saved: SavedGrants) -> None:
        self._config = config
        self._caller = caller
        self._saved = saved
        self._grants: dict[bytes, Grant] = {}
        self.state: State = {}
        self.hooks: list[str] = []

    def grant(self, request: Request) -> Grant:
        """Return the saved grant for *request*; raise _NotKeptError if there is none."""
        if request.is_automatic and self._config["health"] == "nvml":
            raise _NotKeptError
        name = key(request, hook_programs.hook_of(request, self.program))
        if name not in self._grants:
            grant, state = self._saved.find(name), self._saved.state(name)
            if grant is None or state is None:
                raise _NotKeptError
            self._grants[name] = grant
            self.state = state
        return self._grants[name]

    def program(self, name: str) -> str:
        """Return the path of the hook program *name*; raise ConfigError if there is none."""
        where = name, self._config, self._caller.program, self._caller.path
        path = hook_programs.find(*where)
        places = hook_programs.places(*where)
        self.hooks = places[: places.index(path) + 1]
        return path

    def make_nodes(self, _minors: object) -> bool:
        """Return that no nodes are made."""
        return False

    def read_registry(self) -> Registry:
        """Raise _NotKeptError: CDI specs are read only where no grant is saved."""
        raise _NotKeptError


def keep(
    data: bytes,
    config: Config,
    saved: SavedGrants,
    caller: Caller,
    directory: str = storage.RUN_DIRECTORY,
) -> None:
    """Record what is added to the config.json *data* under *config*, if *caller* can replay it.

    *saved* are the grants that are saved now.
    """
    head = _head(config, saved.stamp, caller)
    if head is None:
        return
    try:
        new = record(data, config, caller, _Kept(config, caller, saved))
    except (GpuRuntimeError, _NotKeptError):
        return
    if new is None:
        return
    content = head + new
    if len(content) > MAX_BYTES or b"\0" in content:
        return
    words = parse.triggers(config) or ()
    name = f"{NAME}-{replay_template.number_of(data, words)}"
    _make_room(directory, name)
    storage.replace(directory, name, content, _MODE)


def record(data: bytes, config: Config, caller: Caller, host: _Kept) -> bytes | None:
    """Return the record of what is added to the config.json *data*, None if none may be kept.

    Raises GpuRuntimeError if the request cannot be met, _NotKeptError if no grant is saved for it.
    """
    document, doubt = bundle.parse(data)
    if doubt is not None:
        return None
    decided = injection.decide(document, config, host)
    if not _is_repeatable(decided, document):
        return None
    # Decided again between two looks at what it depends on: what changes meanwhile does not go
    # with it.
    runtimes = _runtimes(config, caller) if bundle.has_read_only_root(document) else []
    plan = _plan(decided, document, host, runtimes)
    before = probes.read(plan)
    if runtimes and _is_work_ahead(decided, document, runtimes[-1]):
        return None
    change = _change(data, document, decided, config, host)
    if change is None or probes.changed(host.state) or probes.read(plan) != before:
        return None
    answers = flat_probes([*host.state.values(), *before.values()])
    if answers is None:
        return None
    called = os.fsencode(caller.program), os.fsencode(caller.path)
    return listed((*called, listed(change[0]), answers, listed(change[1])))


def _change(
    data: bytes, document: OciConfig, decided: Injection, config: Config, host: injection.Host
) -> tuple[list[bytes], list[bytes]] | None:
    """Return the parts of *data*, which is *document*, and those of the result; see Template.

    None if the result depends on a hole, or on what has changed since *decided*, or if the same
    would be added again. *document* becomes the result.
    """
    template = replay_template.make(data, document, parse.triggers(config) or ())
    if template is None or len(template.holes) > MAX_HOLES:
        return None
    marked = template.marked(document)
    injection.decide(marked, config, host).apply(marked)
    pieces = template.pieces(strictjson.dumps(marked, ascii_only=False).encode())
    decided.apply(document)
    result = strictjson.dumps(document, ascii_only=False).encode()
    process = document.get("process") or {}
    if pieces is None or template.filled(pieces) != result or _DONE not in process["env"]:
        return None
    return template.parts, pieces


def flat_probes(parts: Iterable[list[Any]]) -> bytes | None:
    """Return operation, argument and answer of all *parts* of a state; None if one has no form."""
    flat: dict[tuple[str, str], bytes] = {}
    for operation, answers in parts:
        for argument, answer in answers.items():
            if operation == probes.PROGRAM:
                if argument == probes.VERSION:
                    # It is in the head.
                    continue
                path = posixpath.join(posixpath.dirname(probes.__file__), argument)
                flat[probes.CONTENT, path] = _numbers(answer)
            else:
                flat[operation, argument] = _ANSWERS[operation](answer)
    if not all(path.startswith("/") for part, path in flat if part != probes.VARIABLE):
        return None
    return listed(
        field
        for (operation, argument), answer in flat.items()
        for field in (operation.encode(), os.fsencode(argument), answer)
    )


def listed(items: Iterable[bytes]) -> bytes:
    """Return *items* as fields, one behind the other."""
    return b"".join(b"%d:%s\n" % (len(item), item) for item in items)


def _head(config: Config, stamp: list[Any] | None, caller: Caller) -> bytes | None:
    """Return how each file begins, None if nothing is to be kept under *config*."""
    words, lines = parse.triggers(config), companion.config_lines(stamp)
    is_quiet = config.log_level != "debug" and config.debug in ("", "/dev/null")
    # What is beside another is beside none, once the engine is somewhere else.
    is_placed = caller.program.startswith("/") or "/" not in caller.program
    if words is None or lines is None or not is_quiet or not is_placed or not caller.identity:
        return None
    if os.getuid() != os.geteuid():
        return None
    lines = [
        *(f"{HEAD} {__version__}", *lines, f"launcher {caller.identity}"),
        f"user {os.geteuid()}",
    ]
    return os.fsencode("".join(f"{line}\n" for line in lines))


def _make_room(directory: str, name: str) -> None:
    """Remove the oldest files until there is room for *name* in *directory*."""
    try:
        others = [item for item in os.listdir(directory) if item.startswith(f"{NAME}-")]
        if name in others:
            return
        paths = [f"{directory}/{other}" for other in others]
        paths.sort(key=lambda path: os.stat(path).st_mtime_ns)
        for path in paths[: max(0, len(paths) + 1 - MAX_FILES)]:
            os.unlink(path)
    except OSError:
        # Another create removes the same ones.
        return


def _is_repeatable(decided: Injection, document: OciConfig) -> bool:
    """Return whether *decided* is nothing but edits: no warning, no hook added or removed."""
    request = decided.request
    return (
        decided.edits is not None
        and bool(request)
        and request.mode != settings.LEGACY
        and not (decided.warnings or request.ignored or decided.removed or decided.prestart)
        and not in_user_namespace(document)
    )


def _plan(decided: Injection, document: OciConfig, host: _Kept, runtimes: Sequence[str]) -> Plan:
    """Return what else of the host *decided* depends on, besides what its grant goes with.

    It is also which one of *runtimes* there is.
    """
    edits: Any = decided.edits
    nodes = list(edits.get("deviceNodes") or ())
    numbers = [
        f"char/{node['major']}:{node.get('minor', 0)}" for node in nodes if node["type"] == "c"
    ]
    return {
        "nodes": [probes.NODES, [node.get("hostPath") or node["path"] for node in nodes]],
        "majors": [probes.CONTENT, [node_numbers.DEVICES]],
        "user namespace": [probes.CONTENT, ["/proc/self/uid_map"]],
        "hook": [probes.IDENTITY, host.hooks],
        "low-level runtime": [probes.IDENTITY, runtimes],
        "links": [
            probes.EXISTS,
            [f"{top}/{name}" for name in numbers for top in ("/dev", "/sys/dev")]
            if injection.has_systemd_cgroup(document)
            else [],
        ],
    }


def _runtimes(config: Config, caller: Caller) -> list[str]:
    """Return the places of the low-level runtime, the last of them being the one where it is.

    Raises RuntimeExecError if it is nowhere.
    """
    path = lowlevel.find(config.runtimes, caller.path, caller.identity, lambda _: None)
    places = lowlevel.places(config.runtimes, caller.path)
    return places[: places.index(path) + 1]


def _is_work_ahead(decided: Injection, document: OciConfig, runtime: str) -> bool:
    """Return whether hooks must run before *runtime*, which the launcher would not do."""
    from gpuruntime.plan import early_commands  # noqa: PLC0415 (few roots are read-only)

    return bool(early_commands.commands(decided.edits, document, runtime))


def _numbers(answer: list[int] | None) -> bytes:
    return b"-" if answer is None else " ".join(map(str, answer)).encode()


def _text(answer: str | None) -> bytes:
    return b"-" if answer is None else b"=" + os.fsencode(answer)


def _truth(answer: bool) -> bytes:  # noqa: FBT001 (it is the answer)
    return b"1" if answer else b"0"


def _entries(answer: list[str] | dict[str, list[int]] | None) -> bytes:
    """Return the number of names, and each between slashes, with its numbers if it has any."""
    if answer is None:
        return b"-"
    entries = [
        " ".join((name, *map(str, answer[name] if isinstance(answer, dict) else ())))
        for name in answer
    ]
    return os.fsencode(f"{len(entries)}/" + "".join(f"/{entry}/" for entry in entries))


_ANSWERS: dict[str, Any] = {
    probes.PLACE: _numbers,
    probes.IDENTITY: _numbers,
    probes.CONTENT: _numbers,
    probes.EXISTS: _truth,
    probes.LINK: _text,
    probes.VARIABLE: _text,
    probes.NAMES: _entries,
    probes.NODES: _entries,
}
