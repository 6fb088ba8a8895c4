# SPDX-License-Identifier: Apache-2.0
"""Record the result of a create, so that the launcher can repeat it without Python.

On the start path, where it is loaded only when the launcher asks for it. The request is decided
once more from the saved inventory. The record contains what in config.json and on the host decided
it, and what was added; the launcher compares bytes and interprets nothing.
gpuruntime/launcher/README.md has the format.
"""

from __future__ import annotations

import os
import posixpath

from cdi import strictjson
from cdi.complete import in_user_namespace
from gpuruntime import __version__, probes
from gpuruntime import config as settings
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.launcher import companion
from gpuruntime.oci import bundle, lowlevel
from gpuruntime.plan import hook_programs, injection, node_numbers
from gpuruntime.record import Record
from gpuruntime.request import parse
from gpuruntime.snapshots import storage
from gpuruntime.snapshots.grants import key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from cdi.registry import Registry
    from cdi.wire import OciConfig
    from gpuruntime.config import Config
    from gpuruntime.grant import Grant
    from gpuruntime.plan.injection import Injection
    from gpuruntime.probes import Plan, State
    from gpuruntime.request.parse import Request
    from gpuruntime.snapshots.grants import SavedGrants

NAME = "replay"
HEAD = "gpuruntime-replay 3"
# LARGEST_REPLAY of launcher/replay.h, where a NUL is behind it, and DEEPEST_MOUNT.
MAX_BYTES = (1 << 20) - 1
MAX_MOUNT_DEPTH = 63
MAX_RECORDS = 48
# So that one container cannot drive out the answers of all others.
MAX_CONDITION_BYTES = MAX_BYTES // 16
# Variables, mounts and annotations that have a word are in it as they are, secrets among them.
_MODE = 0o600
# An entry that marks a container as prepared: adding the same again changes nothing.
_DONE = f"{parse.VISIBLE_DEVICES}=void"
# Of a record: conditions, probes, what is added.
_PARTS = 3


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
        self.state: State = {}
        self.hooks: list[str] = []

    def grant(self, request: Request) -> Grant:
        """Return the saved grant for *request*; raise _NotKeptError if there is none."""
        if request.is_automatic and self._config["health"] == "nvml":
            raise _NotKeptError
        name = key(request, hook_programs.hook_of(request, self.program))
        grant, state = self._saved.find(name), self._saved.state(name)
        if grant is None or state is None:
            raise _NotKeptError
        self.state = state
        return grant

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
    records = _records(storage.read_trusted(directory, NAME, MAX_BYTES), head)
    records = [old for old in records if fields(old)[0] != fields(new)[0]]
    records = [*records, new][-MAX_RECORDS:]
    content = head + listed((listed(records),))
    while len(content) > MAX_BYTES and records:
        records.pop(0)
        content = head + listed((listed(records),))
    if records and b"\0" not in content:
        storage.replace(directory, NAME, content, _MODE)


def record(data: bytes, config: Config, caller: Caller, host: _Kept) -> bytes | None:
    """Return the record of what is added to the config.json *data*, None if none may be kept.

    Raises GpuRuntimeError if the request cannot be met, _NotKeptError if no grant is saved for it.
    """
    document, doubt = bundle.parse(data)
    needed = conditions(document, config, caller) if doubt is None else None
    if needed is None or len(needed) > MAX_CONDITION_BYTES:
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
    added = _added(injection.decide(document, config, host), document)
    if probes.changed(host.state) or probes.read(plan) != before:
        return None
    answers = flat_probes([*host.state.values(), *before.values()])
    if added is None or answers is None:
        return None
    return listed((needed, answers, added))


def conditions(document: OciConfig, config: Config, caller: Caller) -> bytes | None:
    """Return what of *document* and *caller* the result depends on; None if that is not known.

    A value that is not there is empty, which no value is.
    """
    words = parse.triggers(config)
    process, linux = document.get("process"), document.get("linux")
    if words is None or not isinstance(process, dict) or not isinstance(linux, dict):
        return None
    resources, annotations = linux.get("resources"), document.get("annotations") or {}
    root = document.get("root") or {}
    if not isinstance(resources, dict) or not isinstance(annotations, dict):
        return None
    if not isinstance(root, dict):
        return None
    pairs = [_json(name) + b":" + _json(value) for name, value in annotations.items()]
    parts = [
        *(os.fsencode(caller.program), os.fsencode(caller.path)),
        b"1" if injection.has_systemd_cgroup(document) else b"0",
        # Behind it there may be work to do that the launcher does not know.
        _value(root, "readonly"),
        *(_value(process, "capabilities"), _value(process, "user")),
        *(_value(linux, "devices"), _value(resources, "devices")),
        *(_asking(map(_json, process.get("env") or ()), words),),
        *(_asking(map(_json, document.get("mounts") or ()), words), _asking(pairs, words)),
    ]
    return listed(parts)


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


def fields(data: bytes) -> list[bytes]:
    """Return the items of which *data* is the fields; raise ValueError if it is not."""
    items = []
    while data:
        number, _, rest = data.partition(b":")
        length = int(number)
        if rest[length : length + 1] != b"\n":
            raise ValueError("no field")
        items.append(rest[:length])
        data = rest[length + 1 :]
    return items


def _head(config: Config, stamp: list[Any] | None, caller: Caller) -> bytes | None:
    """Return how the file begins, None if nothing is to be kept under *config*."""
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
    names = [name.encode() for name in sorted(bundle.known_names())]
    start = os.fsencode("".join(f"{line}\n" for line in lines))
    return start + listed((listed(words), listed(names)))


def _records(data: bytes, head: bytes) -> list[bytes]:
    """Return the records of the file *data*, none if it begins otherwise than by *head*."""
    if not data.startswith(head):
        return []
    try:
        (records,) = fields(data[len(head) :])
        return [item for item in fields(records) if len(fields(item)) == _PARTS]
    except ValueError:
        return []


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


def _added(decided: Injection, document: OciConfig) -> bytes | None:
    """Return what *decided* adds to *document*; None if the launcher cannot add it.

    It is what it does to as much of it as it reads.
    """
    process, linux = document["process"], document["linux"]
    before: dict[str, Any] = {
        "process": {"env": [], **_members(process, "user")},
        "mounts": [],
        "linux": {
            **_members(linux, "devices"),
            "resources": _members(linux["resources"], "devices"),
        },
    }
    after = strictjson.loads(strictjson.dumps(before))
    decided.apply(after)
    env, mounts, hooks = after["process"]["env"], after["mounts"], after.get("hooks") or {}
    rebuilt = {
        "process": {"env": env, **_members(after["process"], "user")},
        "mounts": mounts,
        "linux": {
            **_members(after["linux"], "devices"),
            "resources": _members(after["linux"]["resources"], "devices"),
        },
        **_members(after, "hooks"),
    }
    if rebuilt != after or _DONE not in env or not all("=" in entry for entry in env):
        return None
    if not all(_has_one_spelling(mount["destination"]) for mount in mounts):
        return None
    changed = [
        _value(new, name) if _value(new, name) != _value(old, name) else b""
        for old, new, name in (
            (before["process"], after["process"], "user"),
            (before["linux"], after["linux"], "devices"),
            (before["linux"]["resources"], after["linux"]["resources"], "devices"),
        )
    ]
    return listed(
        (
            *changed,
            listed(map(_json, env)),
            listed(part for m in mounts for part in (_json(m["destination"]), _json(m))),
            listed(
                part
                for name, items in hooks.items()
                for part in (_json(name), b",".join(map(_json, items)))
            ),
        )
    )


def _has_one_spelling(path: str) -> bool:
    depth = path.count("/")
    normal = posixpath.normpath(path) == path and not path.startswith("//")
    return path.startswith("/") and normal and depth <= MAX_MOUNT_DEPTH


def _members(parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: parent[name]} if name in parent else {}


def _value(parent: Mapping[str, Any], name: str) -> bytes:
    return _json(parent[name]) if name in parent else b""


def _json(value: object) -> bytes:
    return strictjson.dumps(value, ascii_only=False).encode()


def _asking(parts: Iterable[bytes], words: tuple[bytes, ...]) -> bytes:
    """Return those of *parts* that have one of *words*."""
    return listed(part for part in parts if any(word in part for word in words))


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
