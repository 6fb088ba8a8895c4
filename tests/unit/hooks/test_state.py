# SPDX-License-Identifier: Apache-2.0
"""TIME-01: the state on standard input has an end, in bytes and in time."""

from __future__ import annotations

import os
import posix
import subprocess
import time
from pathlib import Path

import pytest

from gpuruntime.errors import BundleError
from hooks import state

TREE = Path(__file__).parents[3]
BIN = TREE / ".venv" / "bin"
START_PYTHON = "/usr/bin/python3"
COMMANDS = pytest.mark.parametrize(
    "command",
    [
        ("gpu-cdi-hook", "update-container", "--mask-params"),
        ("gpu-container-runtime-hook", "prestart"),
    ],
    ids=["cdi", "prestart"],
)
# As the launcher starts them, with less time.
IN_A_SECOND = f"""
import sys
sys.path.append({str(TREE)!r})
from hooks import entry
entry.DEADLINE_S = 1
entry.main()
"""


def call(*command: str, stdin: int) -> subprocess.CompletedProcess[str]:
    """Start a hook that reads its state from *stdin*."""
    return subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, check=False, timeout=20
    )


def assert_refused(done: subprocess.CompletedProcess[str], why: str) -> None:
    """Assert that it failed by *why*, in one line with a hint."""
    assert done.returncode == 1
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 2)
    assert why in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("size", [1, 1000, 1 << 30])
def test_no_more_is_read_than_a_state_may_have(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much comes at once, from a writer who goes on for ever."""
    given = 0

    def read(fd: int, count: int) -> bytes:
        nonlocal given
        assert fd == 7
        data = b" " * min(count, size)
        given += len(data)
        assert given <= 2 * state.MAX_STATE_BYTES
        return data

    monkeypatch.setattr(state, "MAX_STATE_BYTES", 5000)
    monkeypatch.setattr(posix, "read", read)
    with pytest.raises(BundleError, match="has over 5000 bytes"):
        state.read_document(7)


def test_a_state_of_the_largest_size_is_read() -> None:
    """A byte more is too much."""
    text = b'{"bundle": "/b"}'
    for more, is_read in ((0, True), (1, False)):
        fd = os.memfd_create("state")
        os.write(fd, text.ljust(state.MAX_STATE_BYTES + more))
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            if is_read:
                assert state.read_document(fd) == {"bundle": "/b"}
            else:
                with pytest.raises(BundleError, match="has over 1048576 bytes"):
                    state.read_document(fd)
        finally:
            os.close(fd)


@COMMANDS
def test_a_writer_without_an_end_is_refused_at_once(command: tuple[str, ...]) -> None:
    """Not when memory or the time is at its end."""
    zero = os.open("/dev/zero", os.O_RDONLY)
    start = time.monotonic()
    try:
        done = call(str(BIN / command[0]), *command[1:], stdin=zero)
    finally:
        os.close(zero)
    assert_refused(done, "the state on standard input has over 1048576 bytes")
    assert time.monotonic() - start < 9


@pytest.mark.slow
@COMMANDS
@pytest.mark.parametrize("data", [b"", b'{"bundle": "/b", "pid": 1}'])
def test_a_writer_who_does_not_close_is_refused_in_time(
    command: tuple[str, ...], data: bytes
) -> None:
    """With nothing written, or all of it: only the end of the file ends the state."""
    reading, writing = os.pipe()
    start = time.monotonic()
    try:
        os.write(writing, data)
        python = (START_PYTHON, "-I", "-S", "-B", "-c", IN_A_SECOND)
        done = call(*python, *command, stdin=reading)
        assert 0.9 < time.monotonic() - start < 9
    finally:
        os.close(reading)
        os.close(writing)
    assert_refused(done, "reading the state and opening the container's root was not done in 1 s")


@pytest.mark.parametrize("text", ['{"bundle": "/a", "bundle": "/b"}', '{"x": {"y": 1, "y": 1}}'])
def test_json_07_a_state_that_says_something_twice_is_refused(text: str) -> None:
    """Readers differ in which of them counts."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    try:
        with pytest.raises(BundleError, match="twice"):
            state.read_document(read)
    finally:
        os.close(read)
