# SPDX-License-Identifier: Apache-2.0
"""Parse a hook's command line: name → values; pure. Values are data, whatever they begin with."""

from __future__ import annotations

from gpuruntime.errors import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    # Option → its values, in order.
    OptionValues = Mapping[str, Sequence[str]]

# What each hook takes, ours and the incumbent's.
CONTAINER_SPEC, DEADLINE = "container-spec", "deadline"
# The last is the incumbent's, for commands that are no hooks.
VALUES = frozenset((CONTAINER_SPEC, DEADLINE, "config"))
DEBUG, QUIET = ("debug", "d"), ("quiet", "q")
SWITCHES = frozenset((*DEBUG, *QUIET))
_TRUE, _FALSE = ("1", "t", "true"), ("0", "f", "false")
MAX_SHOWN_CHARS = 200


class UsageError(RequestError):
    """The arguments of a hook are wrong."""

    exit_code = 2


def split_global(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options in front of the hook's name, and the rest from the name on."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        name, equals, _ = _parts(arguments[at])
        at += 1 if equals or name not in VALUES else 2
    return list(arguments[:at]), list(arguments[at:])


def parse(
    hook: str,
    arguments: Sequence[str],
    values: Collection[str],
    switches: Collection[str] = (),
) -> OptionValues:
    """Return the values of each option in *arguments*, in order; raise RequestError.

    A switch that is on has one value, "". Options are `-name`, `--name`, with `=value` or a value
    as the next argument.
    """
    option_values: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = _parts(word)
        if name in SWITCHES or name in switches:
            if equals and value.lower() not in _TRUE + _FALSE:
                raise refused(hook, word, "is neither true nor false")
            if not equals or value.lower() in _TRUE:
                option_values[name] = [""]
        elif name in VALUES or name in values:
            if not equals:
                value = next(words, "")
            option_values.setdefault(name, []).append(value)
        else:
            raise refused(hook, word, "is an unknown option")
    return option_values


def last(option_values: OptionValues, name: str, default: str = "") -> str:
    """Return the value of *name* that counts where it is given several times."""
    return option_values.get(name, (default,))[-1]


def parse_mode(text: str) -> int | None:
    """Return the permissions that *text* is in octal, None if it is none."""
    if not text or len(text) > len("7777") or set(text) - set("01234567"):
        return None
    return int(text, 8)


def refused(hook: str, value: str, why: str) -> UsageError:
    """Return the error that says why *value* is refused."""
    if len(value) > MAX_SHOWN_CHARS:
        value = f"{value[:MAX_SHOWN_CHARS]}..."
    return UsageError(
        f'{hook}: "{value}" {why}', 'write the CDI spec again with "gpuruntime cdi generate"'
    )


def _parts(word: str) -> tuple[str, str, str]:
    """Return an option's name, `=` if it is there, and the value after it; no name for others."""
    dashes = len(word) - len(word.lstrip("-"))
    name, equals, value = word.partition("=")
    return (name[dashes:] if dashes in (1, 2) else ""), equals, value
