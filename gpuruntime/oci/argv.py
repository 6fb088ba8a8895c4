# SPDX-License-Identifier: Apache-2.0
"""The command line of the OCI runtime, as the engines write it for runc and crun; pure.

The launcher reads the same global options in C: one table of cases runs through both.

runc reads options with Go's flag package: `-name` is `--name`, `--name=value` is `--name value`, a
value may start with a dash, and options of a subcommand may follow its arguments. crun reads them
with argp. Where only one of the two accepts a word, its reading is ours; where both do and differ
(`-bundle X` is `-b undle` to crun), runc's is.
"""

from __future__ import annotations

from gpuruntime.errors import RequestError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    _Options = Sequence[tuple[str, str | None]]

FLAG = "flag"  # alone, or with =value
VALUE = "value"  # takes =value or the next argument
QUERY = "query"  # help and version: nothing is created

# OPTIONS of launcher.c is the same table. runc lost --criu in 1.2; --log-level is newer crun's.
GLOBAL_OPTIONS = {
    "?": QUERY,
    "V": QUERY,
    "cgroup-manager": VALUE,
    "criu": VALUE,
    "debug": FLAG,
    "h": QUERY,
    "help": QUERY,
    "log": VALUE,
    "log-format": VALUE,
    "log-level": VALUE,
    "root": VALUE,
    "rootless": VALUE,
    "systemd-cgroup": FLAG,
    "usage": QUERY,
    "v": QUERY,
    "version": QUERY,
}
VERSION_NAMES = ("V", "v", "version")

BUNDLE_NAMES = ("b", "bundle")
CONFIG_NAMES = ("config", "f")  # crun only: another file in place of config.json

CREATE_OPTIONS = {
    "?": QUERY,
    "b": VALUE,
    "bundle": VALUE,
    "config": VALUE,
    "console-socket": VALUE,
    "f": VALUE,
    "h": QUERY,
    "help": QUERY,
    "no-new-keyring": FLAG,
    "no-pivot": FLAG,
    "no-subreaper": FLAG,
    "pid-file": VALUE,
    "pidfd-socket": VALUE,
    "preserve-fds": VALUE,
    "usage": QUERY,
}

# What `run` has besides: it creates and starts in one call, for builds and by hand.
RUN_OPTIONS = {**CREATE_OPTIONS, "d": FLAG, "detach": FLAG, "keep": FLAG}
# The subcommands that create a container, and their options.
CREATING = {"create": CREATE_OPTIONS, "run": RUN_OPTIONS}

# What Go's strconv.ParseBool takes for false; all else is true, or an error of the runtime's own.
_FALSE = ("0", "f", "F", "false", "FALSE", "False")


class Command(Record):
    """What a runtime command line asks for.

    *creates* is the decision: this call creates a container, by `create` or by `run`.
    *understood* is False when the words do not follow our tables; *creates* then errs towards
    True. The bundle and *config* (crun's other file in place of the bundle's config.json, relative
    to the working directory) are read for creates only. All are the last value given, None when
    absent.
    """

    __slots__ = (
        "_bundle",
        "_without_value",
        "config",
        "creates",
        "debug",
        "log",
        "log_format",
        "subcommand",
        "understood",
        "version",
    )

    def __init__(  # noqa: PLR0913 - one for each field
        self,
        *,
        subcommand: str | None = None,
        creates: bool = False,
        understood: bool = True,
        version: bool = False,
        bundle: str | None = None,
        without_value: str | None = None,
        config: str | None = None,
        log: str | None = None,
        log_format: str | None = None,
        debug: bool = False,
    ) -> None:
        self.subcommand = subcommand
        self.creates = creates
        self.understood = understood
        self.version = version
        self._bundle = bundle
        self._without_value = without_value
        self.config = config
        self.log = log
        self.log_format = log_format
        self.debug = debug

    @property
    def bundle(self) -> str | None:
        """The bundle directory, None for the working directory.

        Raises RequestError if a bundle option has no value. Only here and not in parse, so that
        the message can go to the log file that the same command line names.
        """
        if self._without_value is not None:
            raise RequestError(
                f'cannot find the bundle: the option "{self._without_value}" has no value',
                'put the bundle directory after "--bundle"',
            )
        return self._bundle


class _UnknownError(Exception):
    """The words do not follow the table of options."""


def parse(arguments: Sequence[str]) -> Command:
    """Read *arguments*, which do not include argv[0]; never raises."""
    try:
        options, rest = _read(arguments, GLOBAL_OPTIONS)
    except _UnknownError:
        return _guess(arguments)
    asked = [name for name, _ in options if GLOBAL_OPTIONS[name] == QUERY]
    subcommand = rest[0] if rest else None
    command: dict[str, Any] = {
        "subcommand": subcommand,
        "version": any(name in VERSION_NAMES for name in asked),
        **_talk(options),
    }
    table = CREATING.get(subcommand or "")
    if table is None or asked:
        return Command(**command)
    try:
        options, _ = _read(rest[1:], table, interspersed=True)
    except _UnknownError:
        return Command(creates=True, understood=False, **command, **_sought(rest[1:]))
    if any(table[name] == QUERY for name, _ in options):
        return Command(**command)
    return Command(creates=True, **command, **_files(options))


def _guess(arguments: Sequence[str]) -> Command:
    """Read a command line whose global options do not follow our table.

    A superset of what creates: any word that can be the subcommand, whichever options take a
    value. The value of a bundle option cannot.
    """
    words = iter(arguments)
    subcommand = None
    may_be_value = False
    for word in words:
        if word in CREATING:
            subcommand = word
            break
        if word == "--":
            may_be_value = False
        elif _is_option(word):
            may_be_value = "=" not in word
            if word.lstrip("-") in BUNDLE_NAMES:
                next(words, None)
        elif may_be_value:
            may_be_value = False
        else:
            # Another subcommand, if no word before was one.
            break
    talk = _talk(list(_search(arguments, ("log", "log-format", "debug"))))
    if subcommand is None:
        return Command(understood=False, **talk)
    return Command(
        subcommand=subcommand, creates=True, understood=False, **talk, **_sought(arguments)
    )


def _read(
    arguments: Sequence[str], table: Mapping[str, str], *, interspersed: bool = False
) -> tuple[list[tuple[str, str]], Sequence[str]]:
    """Return the options as (name, value), and the words from the first that is none.

    With *interspersed*, options are also looked for after such words, up to `--`.
    """
    found = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if _is_option(word):
            name, value = _split(word, table)
            if value is None and table[name] == VALUE:
                index += 1
                if index == len(arguments):
                    raise _UnknownError
                value = arguments[index]
            found.append((name, "true" if value is None else value))
        elif word == "--":
            index += 1
            break
        elif not interspersed:
            break
        index += 1
    return found, arguments[index:]


def _split(word: str, table: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the name in *table* of the option *word*, and the value that it carries."""
    name, equals, value = word[2 if word.startswith("--") else 1 :].partition("=")
    kind = table.get(name)
    if kind is None and not word.startswith("--") and table.get(word[1]) == VALUE:
        return word[1], word[2:]  # crun's -bDIR; no option to runc
    # Go reads --version=false as "not asked": too clever for us, and for the launcher.
    if kind is None or (kind == QUERY and equals):
        raise _UnknownError
    return name, value if equals else None


def _search(arguments: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the options *names* among words that follow no table; None if the value is missing."""
    words = iter(arguments)
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if not _is_option(word) or name not in names:
            continue
        if equals:
            yield name, value
        elif name == "debug":
            yield name, "true"
        else:
            yield name, next(words, None)


def _files(options: _Options) -> dict[str, Any]:
    """Return bundle and config of Command."""
    return {"bundle": _last(options, *BUNDLE_NAMES), "config": _last(options, *CONFIG_NAMES)}


def _sought(arguments: Sequence[str]) -> dict[str, Any]:
    """Return bundle and config of Command from words that follow no table."""
    options = list(_search(arguments, BUNDLE_NAMES + CONFIG_NAMES))
    lost = bool(options) and options[-1][0] in BUNDLE_NAMES and options[-1][1] is None
    return {**_files(options), "without_value": arguments[-1] if lost else None}


def _talk(options: _Options) -> dict[str, Any]:
    """Return what Command says about logging."""
    return {
        "log": _last(options, "log"),
        "log_format": _last(options, "log-format"),
        "debug": (_last(options, "debug") or "false") not in _FALSE,
    }


def _last(options: _Options, *names: str) -> str | None:
    """Return the value of the last of *options* that is called one of *names*."""
    for name, value in reversed(options):
        if name in names:
            return value
    return None


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--")
