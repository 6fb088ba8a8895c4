# SPDX-License-Identifier: Apache-2.0
"""LOG-01: whatever a container puts into a message is one line of printable ASCII."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuruntime import errors
from gpuruntime.errors import (
    MAX_MESSAGE_CHARS,
    GpuRuntimeError,
    RuntimeExecError,
    bug,
    escape,
)

HOSTILE = {
    "line\nlevel=error": r"line\x0alevel=error",
    "\x1b[2Jgone": r"\x1b[2Jgone",
    "%s %n {0} $HOME": "%s %n {0} $HOME",
    "bidi \u202e txt": r"bidi \xe2\x80\xae txt",
    "nul \0": r"nul \x00",
    "tab\tand\r": r"tab\x09and\x0d",
    "é": r"\xc3\xa9",
    "\x7f\x80": r"\x7f\xc2\x80",
    "byte \udcff": r"byte \xff",
    "": "",
}


@pytest.mark.parametrize(("text", "expected"), HOSTILE.items())
def test_hostile_text_is_spelled_out(text: str, expected: str) -> None:
    """The operator sees what was there, and no terminal obeys it."""
    assert escape(text) == expected


@pytest.mark.property
@given(st.text(st.characters()))
def test_any_text_is_one_line_of_printable_ascii(text: str) -> None:
    """Lone surrogates of every kind included: these come out of JSON."""
    line = escape(text)
    assert line.isascii()
    assert line == "" or line.isprintable()


def test_a_message_is_bounded() -> None:
    """A mebibyte in an environment variable must not fill the node's journal."""
    line = escape("x" * (1 << 20))
    assert line == "x" * MAX_MESSAGE_CHARS + "..."
    assert len(escape("\0" * (1 << 20))) <= 4 * MAX_MESSAGE_CHARS + 3


def test_message_and_hint_are_two_lines() -> None:
    """Whatever is in them: an engine's log parser and a person both count on it."""
    error = GpuRuntimeError('cannot read "a\nb"', "look\nthere")
    assert error.lines() == 'runtime: cannot read "a\\x0ab"\nhint: look\\x0athere'
    assert GpuRuntimeError("alone").lines() == "runtime: alone"


def test_every_class_has_a_phase_word_and_an_exit_code() -> None:
    """The word is what operators search for, the code what a shell would give."""
    classes = [
        c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, GpuRuntimeError)
    ]
    assert len(classes) == 13
    other_codes = {errors.ArgumentError: 2, RuntimeExecError: 127}
    for kind in classes:
        assert kind.phase.isalpha()
        assert kind.phase.islower()
        assert kind("x").exit_code == other_codes.get(kind, 1)
    assert RuntimeExecError("x", exit_code=126).exit_code == 126


def test_a_bug_names_the_place() -> None:
    """The line that an operator sends us must be enough to find it."""
    try:
        {}["missing"]
    except KeyError as error:
        text = bug(error).lines()
    assert "this is a bug: KeyError at " in text
    assert "test_errors.py:" in text
    assert "\nhint: report it" in text
