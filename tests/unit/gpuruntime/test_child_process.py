# SPDX-License-Identifier: Apache-2.0
"""Children that answer, hang, flood or leave grandchildren: what is returned and what stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import descriptors
import pytest

from gpuruntime import child_process
from gpuruntime.child_process import ENDED, FLOODED, LATE, STUCK

# Of a child that must be ended by it.
SHORT_S = 0.3
# Of a child that ends before it; what waits for this one instead is seen by the clock.
LONG_S = 60.0
LIMIT = 1 << 20

Start = Callable[[str], child_process.Child]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No descriptor, no child, not even a zombie, and no pending signal stays."""
    before = descriptors.opened()
    yield
    assert descriptors.opened() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert signal.SIGCHLD not in signal.sigpending()


def spawned(script: str, data: bytes = b"", *, has_output: bool = True) -> child_process.Child:
    """Start the shell with *script*."""
    arguments = ["sh", "-c", script]
    return child_process.spawn("/bin/sh", arguments, {}, data, has_output=has_output)


def forked(script: str) -> child_process.Child:
    """Fork a process that becomes the shell with *script*, and writes to the helper's pipe."""

    def body(writer: int) -> int:
        os.dup2(writer, 1)
        os.close(writer)
        os.execv("/bin/sh", ["sh", "-c", script])

    return child_process.fork(body)


@pytest.fixture(params=[spawned, forked], ids=["spawn", "fork"])
def start(request: pytest.FixtureRequest) -> Start:
    """Return each of the two ways to start a child."""
    way: Start = request.param
    return way


@pytest.mark.parametrize(
    ("script", "deadline_s", "how", "status", "output"),
    [
        pytest.param("echo done", LONG_S, ENDED, 0, b"done\n", id="answers"),
        pytest.param("echo no; exit 7", LONG_S, ENDED, 7, b"no\n", id="fails"),
        pytest.param("echo a; kill -SEGV $$", LONG_S, ENDED, -signal.SIGSEGV, b"a\n", id="signal"),
        pytest.param("exec sleep 100", SHORT_S, LATE, -signal.SIGKILL, b"", id="sleeps"),
        pytest.param(
            "trap '' TERM INT HUP; echo a; while :; do sleep 100; done",
            *(SHORT_S, LATE, -signal.SIGKILL, b"a\n"),
            id="ignores SIGTERM",
        ),
        pytest.param("kill -STOP $$", SHORT_S, LATE, -signal.SIGKILL, b"", id="is stopped"),
        pytest.param(
            "echo a; exec >&-; exec sleep 100",
            *(SHORT_S, STUCK, -signal.SIGKILL, b"a\n"),
            id="closes its output and lives on",
        ),
    ],
)
def test_the_outcome_has_a_name(
    start: Start, script: str, deadline_s: float, how: str, status: int, output: bytes
) -> None:
    """Callers tell a child that failed from one that was late, and have what it wrote."""
    begin = time.monotonic()
    outcome = start(script).finish(deadline_s, LIMIT)
    assert (outcome.how, outcome.status, outcome.output) == (how, status, output)
    assert time.monotonic() - begin < LONG_S / 2


def test_a_flood_is_ended_at_the_limit(start: Start) -> None:
    """It would take all memory of the node."""
    outcome = start("exec yes").finish(LONG_S, LIMIT)
    assert (outcome.how, outcome.status) == (FLOODED, -signal.SIGKILL)
    assert LIMIT < len(outcome.output) <= LIMIT + (1 << 16)


def test_a_flood_does_not_outlast_the_deadline(start: Start) -> None:
    """There is always something to read, and the clock is looked at even so."""
    outcome = start("exec yes").finish(SHORT_S, 1 << 40)
    assert (outcome.how, outcome.status) == (LATE, -signal.SIGKILL)


def is_alive(pid: str) -> bool:
    """Return whether the process *pid* runs; one that nobody has waited for does not."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_ends(pid: bytes) -> None:
    """Assert that *pid*, which was killed, ends."""
    assert pid.strip()
    end = time.monotonic() + LONG_S / 2
    while is_alive(pid.decode().strip()):
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("ending", "deadline_s", "how"),
    [("exit 0", LONG_S, ENDED), ("wait", SHORT_S, LATE), ("kill -9 $$", LONG_S, ENDED)],
)
def test_a_grandchild_neither_delays_the_outcome_nor_outlives_it(
    start: Start, ending: str, deadline_s: float, how: str
) -> None:
    """It keeps the pipe open; what the child wrote before its end is whole."""
    begin = time.monotonic()
    outcome = start(f"sleep 200 & echo $!; {ending}").finish(deadline_s, LIMIT)
    assert outcome.how == how
    assert_ends(outcome.output)
    assert time.monotonic() - begin < LONG_S / 2


def test_all_output_of_an_ended_child_is_read_though_a_grandchild_keeps_the_pipe(
    start: Start,
) -> None:
    """More than one read takes."""
    outcome = start("head -c 300000 /dev/zero; sleep 200 & exit 0").finish(LONG_S, LIMIT)
    assert (outcome.how, outcome.output) == (ENDED, bytes(300000))


def test_a_grandchild_of_another_group_does_not_delay_the_outcome(start: Start) -> None:
    """A daemon that the child starts may keep the pipe for ever."""
    begin = time.monotonic()
    # It writes its id when it is in the session of its own.
    script = "setsid sh -c 'echo $$; exec sleep 200' & sleep 0.5; exit 0"
    outcome = start(script).finish(LONG_S, LIMIT)
    pid = int(outcome.output)
    os.kill(pid, signal.SIGKILL)
    assert outcome.how == ENDED
    assert time.monotonic() - begin < LONG_S / 2


def test_input_and_output_may_be_larger_than_a_pipe() -> None:
    """Neither side waits for the other to read first."""
    data = os.urandom(LIMIT // 2)
    assert spawned("exec cat", data).finish(LONG_S, LIMIT).output == data


def test_a_child_that_reads_no_input_ends_by_itself() -> None:
    """A broken pipe is no error of ours."""
    outcome = spawned("exec <&-; echo a", bytes(LIMIT)).finish(LONG_S, LIMIT)
    assert (outcome.how, outcome.status, outcome.output) == (ENDED, 0, b"a\n")


def test_input_that_is_not_read_does_not_outlast_the_deadline() -> None:
    """The child has it open, and sleeps."""
    assert spawned("exec sleep 100", bytes(LIMIT)).finish(SHORT_S, LIMIT).how == LATE


def test_a_child_without_output_is_waited_for(tmp_path: Path) -> None:
    """It has its input, and its status counts."""
    child = spawned(f"cat > {tmp_path}/input; exit 3", b"state", has_output=False)
    outcome = child.finish(LONG_S, 0)
    assert (outcome.how, outcome.status, outcome.output) == (ENDED, 3, b"")
    assert (tmp_path / "input").read_bytes() == b"state"
    assert spawned("sleep 100", has_output=False).finish(SHORT_S, 0).how == STUCK


def test_many_children_share_one_deadline(start: Start) -> None:
    """One that hangs costs the others neither their time nor what is more than a pipe takes."""
    scripts = ("exec sleep 100", "head -c 200000 /dev/zero", "exec sleep 100", "exit 4")
    outcomes = child_process.finish([start(script) for script in scripts], 2 * SHORT_S, LIMIT)
    assert [outcome.how for outcome in outcomes] == [LATE, ENDED, LATE, ENDED]
    assert [len(outcome.output) for outcome in outcomes] == [0, 200000, 0, 0]


def test_an_exception_ends_the_child_as_well(start: Start, tmp_path: Path) -> None:
    """Ctrl-C of the operator, or a deadline of the caller's own."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    child = start(f"sleep 200 & echo $! > {tmp_path}/pid; wait")
    try:
        signal.setitimer(signal.ITIMER_REAL, SHORT_S)
        with pytest.raises(KeyboardInterrupt):
            child.finish(LONG_S, LIMIT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert_ends((tmp_path / "pid").read_bytes())


def test_an_exception_in_a_forked_child_stays_there(capfd: pytest.CaptureFixture[str]) -> None:
    """It neither unwinds into the parent's code nor prints a traceback."""

    def body(writer: int) -> int:
        os.write(writer, b"a")
        raise RuntimeError

    outcome = child_process.fork(body).finish(LONG_S, LIMIT)
    assert (outcome.how, outcome.status, outcome.output) == (ENDED, 1, b"a")
    assert capfd.readouterr() == ("", "")


def test_who_ignores_sigchld_gets_the_output_without_a_status(start: Start) -> None:
    """The kernel reaps the child of such an engine's runtime."""
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        outcome = start("echo done; exit 7").finish(LONG_S, LIMIT)
        late = start("exec sleep 100").finish(SHORT_S, LIMIT)
    finally:
        signal.signal(signal.SIGCHLD, old)
    assert (outcome.how, outcome.status, outcome.output) == (ENDED, None, b"done\n")
    assert (late.how, late.status) == (LATE, None)


def test_a_program_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    """No pipe stays open."""
    with pytest.raises(FileNotFoundError):
        child_process.spawn(str(tmp_path / "nowhere"), ["x"], {}, b"")
