# SPDX-License-Identifier: Apache-2.0
"""Decode and encode JSON with the C parts of the standard `json` package, without its import.

On the start path: the import of `json` costs more instructions than the interpreter's own start,
because of modules that it hardly uses. Both functions behave like those of `json` with the same
options; a test compares them.
"""

from __future__ import annotations

from _json import encode_basestring, encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Constant = Callable[[str], Any]

_BLANKS = " \t\n\r"
_CONSTANTS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class _Reading:
    """The attributes of json.JSONDecoder that the scanner reads."""

    strict = True
    object_hook = None
    # Read by the scanner of Python 3.15.
    array_hook = None

    def __init__(
        self,
        pairs: Callable[[list[tuple[str, Any]]], Any] | None,
        parse_int: Callable[[str], Any],
        parse_float: Callable[[str], Any],
        parse_constant: Constant,
    ) -> None:
        self.object_pairs_hook = pairs
        self.parse_int = parse_int
        self.parse_float = parse_float
        self.parse_constant = parse_constant


def loads(
    text: str | bytes,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_int: Callable[[str], Any] = int,
    parse_float: Callable[[str], Any] = float,
    parse_constant: Constant = _CONSTANTS.__getitem__,
) -> Any:  # noqa: ANN401 (JSON)
    """Return the document *text*; bytes are UTF-8.

    *pairs* converts the members of an object, in order; *parse_int* and *parse_float* the text of
    a number; *parse_constant* one of "NaN", "Infinity" and "-Infinity". Raises ValueError, and
    RecursionError if the document is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode()
    scan = make_scanner(_Reading(pairs, parse_int, parse_float, parse_constant))  # type: ignore[arg-type]  # what it reads of its context
    start = len(text) - len(text.lstrip(_BLANKS))
    try:
        document, end = scan(text, start)
        if not text[end:].strip(_BLANKS):
            return document
    except (StopIteration, SystemError):
        # SystemError: before Python 3.12 the scanner cannot raise its error without `json`.
        pass
    import json  # noqa: PLC0415 (only for the error message)

    return json.loads(
        text,
        object_pairs_hook=pairs,
        parse_int=parse_int,
        parse_float=parse_float,
        parse_constant=parse_constant,
    )


def dumps(
    value: object,
    *,
    ascii_only: bool = True,
    allow_nan: bool = False,
    default: Callable[[Any], object] | None = None,
) -> str:
    """Return *value* as JSON without blanks; raise ValueError or TypeError if it is not JSON.

    With *ascii_only*, all characters outside ASCII are escaped; with *allow_nan*, the numbers that
    JSON does not have are constants. *default* converts a value that is not JSON.
    """
    encode = make_encoder(
        {},  # the containers of the current value, to detect cycles
        default or _refuse,
        encode_basestring_ascii if ascii_only else encode_basestring,
        None,  # not indented
        ":",
        ",",
        False,  # noqa: FBT003 (keys are not sorted)
        False,  # noqa: FBT003 (members with invalid keys are not skipped)
        allow_nan,
    )
    return "".join(encode(value, 0))


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not a JSON value")
