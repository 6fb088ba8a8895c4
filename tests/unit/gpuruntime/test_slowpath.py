# SPDX-License-Identifier: Apache-2.0
"""The child that answers what the start path cannot: what it gets, and every way it can fail."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import descriptors
import pytest

from gpuruntime import slowpath
from gpuruntime.errors import DriverError, GpuRuntimeError

SHORT_S = 0.2
# Ours is the child's own, and as much again as it may need to say so.
LATE_S = 2.0
# Number → which one, of this process.
PIPES = """{
    fd: os.readlink(f"/proc/self/fd/{fd}")
    for fd in sorted(os.listdir("/proc/self/fd"))
    if os.path.exists(f"/proc/self/fd/{fd}")
    and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
}"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Return where a test puts its own in place of an interpreter."""
    return tmp_path / "python"


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No descriptor, no child, no pending signal may be there for the low-level runtime."""
    before = descriptors.opened()
    yield
    assert descriptors.opened() == before
    assert signal.SIGCHLD not in signal.sigpending()


def script(path: Path, text: str) -> str:
    """Make *path* a shell script and return it."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def assert_no_child() -> None:
    """Assert that every child has been waited for."""
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_question_and_answer_may_be_larger_than_a_pipe(interpreter: Path) -> None:
    """Both at the same time: neither side may wait for the other to read first."""
    argument = {"text": "x" * (1 << 20), "list": list(range(1000))}
    assert slowpath.ask(script(interpreter, "cat"), "echo", argument) == argument
    assert_no_child()


def test_the_interpreter_may_be_a_command_of_several_words(interpreter: Path) -> None:
    """A Python that has its own loader is started by that."""
    inner = script(interpreter, 'cat >/dev/null; printf \'["%s", "%s"]\' "$1" "$2"')
    assert slowpath.ask(f"/bin/sh\n{inner}\n-x", "word", None) == ["-x", "-I"]
    with pytest.raises(GpuRuntimeError, match=r'cannot start "/no/loader --library-path /x p":'):
        slowpath.ask("/no/loader\n--library-path\n/x\np", "word", None)


def test_the_child_has_nothing_of_the_engine(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own environment, the two pipes, and the question on its command line."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    code = f"""
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ), {PIPES}, os.readlink("/proc/self/fd/2")]))
"""
    there = eval(PIPES).values()
    (interpreter.parent / "code.py").write_text(code)
    path = script(interpreter, f'exec {sys.executable} -I {interpreter.parent}/code.py "$@"')
    arguments, environment, pipes, errors = slowpath.ask(path, "word", None, 7)
    library = str(Path(slowpath.__file__).parents[1])
    assert arguments == ["-I", "-B", "-X", "utf8", "-c", slowpath.CODE, "word", "7", library]
    environment.pop("PWD", None)
    assert {**environment, **slowpath.ENVIRONMENT} == environment
    assert not [name for name in environment if name.startswith(("PYTHON", "NVIDIA"))]
    assert [fd for fd, pipe in pipes.items() if pipe not in there] == ["0", "1"]
    assert errors == "/dev/null"


def test_the_real_one_answers() -> None:
    """With the interpreter of the command line."""
    answer = slowpath.ask(sys.executable, "yaml", {"/a": "cdiVersion: 0.5.0\n", "/b": "a: ["})
    assert answer["/a"] == {"document": {"cdiVersion": "0.5.0"}}
    assert set(answer["/b"]) == {"error", "category"}


@pytest.mark.parametrize(
    "text",
    ["exit 0", "exit 3", "echo no JSON", "printf '\\377'", "kill -9 $$", "exec <&- >&-", "echo {"],
)
def test_no_answer_is_an_error(interpreter: Path, text: str) -> None:
    """It says how to see why; the traceback that is to be seen then is the operator's."""
    path = script(interpreter, text)
    with pytest.raises(GpuRuntimeError) as caught:
        slowpath.ask(path, "yaml", "x" * (1 << 20))
    assert caught.value.message == f'"{path}" did not answer the question "yaml"'
    assert caught.value.hint == f'run "{path} -m gpuruntime.slowpath_server yaml" to see why'
    assert_no_child()


@pytest.mark.parametrize("name", ["nowhere/python", "."])
def test_an_interpreter_that_cannot_be_started_is_an_error(tmp_path: Path, name: str) -> None:
    """The venv was removed, or moved."""
    with pytest.raises(GpuRuntimeError, match=r'cannot start "') as caught:
        slowpath.ask(str(tmp_path / name), "yaml", {})
    assert caught.value.hint is not None
    assert_no_child()


def test_too_few_open_files_are_an_error_with_a_hint(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bug of ours, and one pipe of two is not left open."""
    before = descriptors.opened()
    pipes = [os.pipe]

    def pipe() -> tuple[int, int]:
        if not pipes:
            raise OSError(errno.EMFILE, "Too many open files")
        return pipes.pop()()

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(GpuRuntimeError, match="Too many open files") as caught:
        slowpath.ask(str(interpreter), "yaml", {})
    assert "RLIMIT_NOFILE" in (caught.value.hint or "")
    assert descriptors.opened() == before


def test_an_answer_without_end_is_none(interpreter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take all memory of the node."""
    monkeypatch.setattr(slowpath, "MAX_ANSWER_BYTES", 1 << 16)
    with pytest.raises(GpuRuntimeError, match="did not answer the question"):
        slowpath.ask(script(interpreter, "exec yes"), "yaml", {})
    assert_no_child()


@pytest.mark.slow
@pytest.mark.parametrize("question", ["discover", "make-nodes"])
def test_a_driver_that_does_not_answer_is_an_error_in_time(
    interpreter: Path, question: str
) -> None:
    """Also for the child that cannot say so itself."""
    start = time.monotonic()
    with pytest.raises(DriverError) as caught:
        slowpath.ask(script(interpreter, "exec sleep 100"), question, {}, SHORT_S)
    assert caught.value.message == "the driver did not answer in 0.2 s"
    assert SHORT_S + LATE_S <= time.monotonic() - start < 20
    # It is not waited for, as it may not end; one that ends at once is gone already.
    try:
        _, status = os.waitpid(-1, 0)
    except ChildProcessError:
        return
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_the_child_s_own_deadline_is_no_wrong_answer(interpreter: Path) -> None:
    """It ends by SIGALRM; another question than the driver's is no DriverError."""
    path = script(interpreter, "kill -ALRM $$; exec sleep 100")
    with pytest.raises(DriverError, match="the driver did not answer in 30 s"):
        slowpath.ask(path, "discover", {})
    with pytest.raises(
        GpuRuntimeError, match='did not answer the question "yaml" in 30 s'
    ) as caught:
        slowpath.ask(path, "yaml", {})
    assert not isinstance(caught.value, DriverError)
    assert_no_child()


@pytest.mark.slow
def test_the_real_one_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    """Were the start path gone, it would stay for ever: here nobody ends its question."""
    reader, writer = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-m", "gpuruntime.slowpath_server", "yaml", "0.1"],
        slowpath.ENVIRONMENT,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, reader, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(tmp_path / "out"), os.O_WRONLY | os.O_CREAT, 0o600),
        ],
    )
    start = time.monotonic()
    _, status = os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    assert os.WTERMSIG(status) == signal.SIGALRM
    assert time.monotonic() - start < 60
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_habits_of_an_engine_neither_reach_the_child_nor_come_from_it(
    interpreter: Path, disposition: signal.Handlers
) -> None:
    """An engine that ignores SIGCHLD gets no status; one that blocks it must find none pending."""
    answer = 'sed -n "s/^Sig\\(Blk\\|Ign\\):\\t\\(.*\\)/\\"\\2\\"/p" /proc/self/status'
    path = script(interpreter, f'echo "[$({answer} | paste -sd,)]"')
    old = signal.signal(signal.SIGCHLD, disposition)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGALRM))
    try:
        blocked, ignored = slowpath.ask(path, "signals", None)
        assert signal.SIGCHLD not in signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, signal.SIGALRM))
        signal.signal(signal.SIGCHLD, old)
    assert int(blocked, 16) == 0
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE):
        assert not int(ignored, 16) >> (number - 1) & 1
