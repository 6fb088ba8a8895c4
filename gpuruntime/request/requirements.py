# SPDX-License-Identifier: Apache-2.0
"""Check what an image requires of the host: NVIDIA_REQUIRE_* and CUDA_VERSION; pure.

On the start path. Every text comes from an image: it is processed in linear time, and messages
about it have a bounded length. docs/reference/requirements.md describes the grammar.
"""

from __future__ import annotations

from gpuruntime.errors import RequestError, RequirementError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    # Property, operator, value to compare with, and the text of all three.
    Factor = tuple[str, str, Any, str]
    # Property → its values on this host, each with its text for messages; None is unknown.
    Host = dict[str, dict[Any, str]]

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": lambda actual, required: bool(actual != required),
    "<=": lambda actual, required: bool(actual <= required),
    ">=": lambda actual, required: bool(actual >= required),
    "=": lambda actual, required: bool(actual == required),
    "<": lambda actual, required: bool(actual < required),
    ">": lambda actual, required: bool(actual > required),
}
_TO_EQUALS = str.maketrans("<>!", "===")
_BRAND = "brand"
_VERSIONS = ("arch", "cuda", "driver")
# Driver versions have three parts, older ones four.
_MAX_PARTS = 4
_MAX_PART = (1 << 32) - 1
_MAX_DIGITS = 10
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
# Bounds of messages.
_MAX_CHARS = 96
_MAX_CONDITIONS = 3
_MAX_NAMES = 4
_MAX_SENTENCES = 16


class Facts(Record):
    """The properties of the host that requirements are compared with; unknown ones are empty.

    *cuda* is the newest CUDA version that the driver serves ("12.4"), *driver* its own version.
    *gpus* are index, compute capability ("8.0") and brand ("tesla") of the container's GPUs.
    """

    __slots__ = ("cuda", "driver", "gpus")

    def __init__(
        self,
        cuda: str = "",
        driver: str = "",
        gpus: tuple[tuple[int, str, str], ...] = (),
    ) -> None:
        self.cuda = cuda
        self.driver = driver
        self.gpus = gpus


def check(requirements: Iterable[str], facts: Facts) -> list[str]:
    """Return sentences about *requirements* that *facts* do not decide, or that are ignored.

    Raises RequestError for a malformed requirement, RequirementError for one that is not met.
    """
    # All are parsed before any is evaluated: a malformed one is an error on every host.
    parsed = [(text, *_parse(text)) for text in requirements]
    host = _host(facts)
    sentences: list[str] = []
    unmet: list[str] = []
    for text, terms, ignored in parsed:
        if ignored:
            names = _enumerate(ignored, _MAX_NAMES, ", ", "and")
            sentences.append(f"{_named(text)} has unknown properties, ignored: {names}")
        is_met, why = _any(terms, host)
        if is_met is None:
            names = ", ".join(why)
            sentences.append(f"{_named(text)} cannot be checked, unknown on this host: {names}")
        elif not is_met:
            conditions = _enumerate(why, _MAX_CONDITIONS, " or ", "or")
            unmet.append(f"unsatisfied condition: {conditions}, of {_named(text)}")
    if unmet:
        raise RequirementError(
            f"requirements not met: {_enumerate(unmet, _MAX_CONDITIONS, '; ', 'and')}",
            "run the container with NVIDIA_DISABLE_REQUIRE=1 (or update the driver)",
        )
    if len(sentences) > _MAX_SENTENCES:
        left_out = len(sentences) - _MAX_SENTENCES
        sentences[_MAX_SENTENCES:] = [
            f"{left_out} more requirements are not decided or are ignored"
        ]
    return sentences


def of_cuda_version(text: str) -> str:
    """Return the requirement of an image whose CUDA_VERSION is *text*: that version or newer.

    A version has one to three parts, the third of which may be x. Raises RequestError.
    """
    parts = text.removeprefix("v").split(".", 3)
    if len(parts) == 3 and parts[2] == "x":
        del parts[2]
    # No leading zeros: semver.org 2.0.0, item 2.
    if len(parts) > 3 or not all(_is_number(part) and str(int(part)) == part for part in parts):
        raise RequestError(
            f"CUDA_VERSION is {_quoted(text)}, which is not a version",
            "correct the image's CUDA_VERSION, or run the container with NVIDIA_DISABLE_REQUIRE=1",
        )
    major, minor = (*parts, "0")[:2]
    return f"cuda>={major}.{minor}"


def is_true(text: str) -> bool:
    """Return whether *text*, the value of NVIDIA_DISABLE_REQUIRE, means true."""
    return text in _TRUE


def _parse(text: str) -> tuple[list[list[Factor]], list[str]]:
    """Return the alternative terms, each a list of factors, and the unknown properties.

    A term without a factor is dropped: it would be met by every host.
    """
    terms = []
    ignored: dict[str, None] = {}
    for words in text.split():
        term = []
        for word in words.split(","):
            if word:
                factor = _factor(word, text)
                if factor[0] in _VERSIONS or factor[0] == _BRAND:
                    term.append(factor)
                else:
                    ignored[_shortened(factor[0])] = None
        if term:
            terms.append(term)
    return terms, list(ignored)


def _factor(word: str, text: str) -> Factor:
    at = word.translate(_TO_EQUALS).find("=")
    sign = word[at : at + 2]
    if sign not in _OPERATORS:
        sign = word[at : at + 1]
    if at < 0 or sign not in _OPERATORS:
        raise _invalid(word, "has no operator", text)
    name = word[:at].lower()
    if not name:
        raise _invalid(word, "has no property", text)
    value: Any = word[at + len(sign) :]
    if name == _BRAND:
        value = value.lower()
        if sign not in ("=", "!="):
            raise _invalid(word, "compares brands by order", text)
        if not value:
            raise _invalid(word, "has no value", text)
    elif name in _VERSIONS:
        value = _version(value)
        if value is None:
            raise _invalid(word, "has no version on its right", text)
    return name, sign, value, word


def _invalid(word: str, why: str, text: str) -> RequestError:
    return RequestError(
        f"invalid constraint: {_quoted(word)} {why}, in {_named(text)}",
        "correct the image's NVIDIA_REQUIRE_ variable, or run the container with "
        "NVIDIA_DISABLE_REQUIRE=1",
    )


def _version(text: str) -> tuple[int, ...] | None:
    """Return the parts of the version *text*, missing ones as 0; None if it is malformed."""
    parts = text.removeprefix("v").split(".", _MAX_PARTS)
    if len(parts) > _MAX_PARTS or not all(_is_number(part) for part in parts):
        return None
    return (*(int(part) for part in parts), 0, 0, 0)[:_MAX_PARTS]


def _is_number(part: str) -> bool:
    # int() also accepts digits of other scripts, and takes quadratic time.
    return (
        len(part) <= _MAX_DIGITS and part.isascii() and part.isdigit() and int(part) <= _MAX_PART
    )


def _host(facts: Facts) -> Host:
    """Return the values of each property on this host; the first of equal GPUs is named."""
    host: Host = {
        "cuda": {_version(facts.cuda): facts.cuda},
        "driver": {_version(facts.driver): facts.driver},
        "arch": {},
        _BRAND: {},
    }
    for index, arch, brand in facts.gpus:
        host["arch"].setdefault(_version(arch), f"{arch} of GPU {index}")
        host[_BRAND].setdefault(brand.lower() or None, f"{brand} of GPU {index}")
    return host


def _any(terms: list[list[Factor]], host: Host) -> tuple[bool | None, list[str]]:
    """Return whether one of *terms* holds, None if undecided, and why not: see _all."""
    failed: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for term in terms:
        holds, why = _all(term, host)
        if holds:
            return True, []
        (unknown if holds is None else failed).update(dict.fromkeys(why))
    if unknown:
        return None, list(unknown)
    return not terms, list(failed)


def _all(term: list[Factor], host: Host) -> tuple[bool | None, list[str]]:
    """Return whether all factors of *term* hold, None if undecided.

    The list has the first factor that fails, or the undecided properties.
    """
    unknown: list[str] = []
    for name, sign, value, word in term:
        values = host[name]
        for actual, shown in values.items():
            if actual is not None and not _OPERATORS[sign](actual, value):
                return False, [f"{_shortened(word)} ({name}={shown})"]
        if None in values or not values:
            unknown.append(name)
    return (None, unknown) if unknown else (True, [])


def _enumerate(items: list[str], most: int, separator: str, last: str) -> str:
    """Return the first *most* of *items* in one text, and the number of the others."""
    text = separator.join(items[:most])
    return f"{text} {last} {len(items) - most} more" if len(items) > most else text


def _named(text: str) -> str:
    return f"the requirement {_quoted(text)}"


def _quoted(text: str) -> str:
    return f'"{_shortened(text)}"'


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
