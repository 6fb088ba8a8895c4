# SPDX-License-Identifier: Apache-2.0
"""Ask NVML about the GPUs, in a child process with a deadline.

A driver in trouble can block NVML for ever, in a state that no signal ends. So a child process
opens the library by path and calls it through pynvml, and a child that does not answer is
abandoned. The child is forked, which costs less than to start another interpreter.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import gc
import os
import time

from cdi import strictjson
from gpuruntime import child_process, remedies
from gpuruntime.discover import nvml_calls
from gpuruntime.discover.driver_errors import AbsentDriverError, MismatchedDriverError
from gpuruntime.errors import DriverError, escape
from gpuruntime.formats.driver_version import of_module_text, of_name
from gpuruntime.model import Gpu, LeftOutDevice, MigDevice
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    # The initialised NVML, and the directory of the kernel's files → the response as plain JSON.
    Describe = Callable[[nvml_calls.Nvml, str], dict[str, Any]]

DEADLINE_S = 30.0
# A process that sleeps in the kernel without a break for this long before the deadline waits for
# the driver. The kernel throttles a process above memory.high for less time than this.
_WATCH_S = 3.0
# For a short deadline: this fraction of it.
_WATCHED_PART = 0.25
# The interval at which the process is observed in that time.
_LOOK_S = 0.05
# The least time to read what a child has written, for a caller that comes after the deadline.
_READ_S = 0.2
_ANSWER_BYTES = 8 << 20


class NoAnswerError(DriverError):
    """The query failed for a reason that may not affect other processes.

    The library could not be loaded, the child was killed or got no CPU time, or its resource
    limits are too low.
    """


class Answer(Record):
    """What NVML reports: the driver's versions, the GPUs, the devices that are left out.

    *problems* are sentences about *left_out*, and about GPUs that lack something.
    *is_shared* says whether another process would get the same answer.
    """

    __slots__ = ("cuda_version", "driver_version", "gpus", "is_shared", "left_out", "problems")

    def __init__(
        self,
        driver_version: str | None,
        cuda_version: str,
        gpus: tuple[Gpu, ...],
        problems: tuple[str, ...],
        *,
        left_out: tuple[LeftOutDevice, ...] = (),
        is_shared: bool = True,
    ) -> None:
        self.driver_version = driver_version
        self.cuda_version = cuda_version
        self.gpus = gpus
        self.problems = problems
        self.left_out = left_out
        self.is_shared = is_shared


def query(library: str, deadline_s: float = DEADLINE_S, *, proc: str = "/proc") -> Answer:
    """Return the answer of the NVML at the host path *library* (see also `nvidia-smi -L`).

    Call it only in a process with one thread. Raises DriverError if NVML returns an error, or does
    not return in *deadline_s* seconds; its subclass NoAnswerError if the library cannot be loaded,
    or if this process's own limits may be the cause.
    """
    with Query(library, deadline_s, proc=proc) as started:
        return started.answer()


class Query:
    """A query of NVML that has been started; the caller may do other work before its answer.

    A context manager: at its end, a child that has not been waited for is killed.
    """

    def __init__(
        self,
        library: str,
        deadline_s: float = DEADLINE_S,
        *,
        proc: str = "/proc",
        describe: Describe = nvml_calls.describe,
    ) -> None:
        """Start the child; for the arguments and what is raised, see the function `query`.

        *describe* calls NVML in the child; what it returns is the response.
        """
        self._library = library
        self._deadline_s = deadline_s
        self._proc = proc
        self._end = time.monotonic() + deadline_s
        try:
            self._child = child_process.fork(
                lambda writer: _be_child(writer, library, deadline_s, proc, describe)
            )
        except OSError as error:
            raise NoAnswerError(
                f'cannot start the process that calls "{library}": {error.strerror}',
                "end other processes, or raise the limit on their number",
            ) from error
        self._is_finished = False

    def __enter__(self) -> Query:  # noqa: PYI034 (Self is newer than Python 3.9)
        """Return this query."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the child unless `answer` has waited for it."""
        if not self._is_finished:
            self._child.close()

    def answer(self) -> Answer:
        """Wait for the answer of NVML and return it; for what is raised, see `query`."""
        return answer_of(self.response())

    def response(self) -> dict[str, Any]:
        """Wait for the response of the child and return it; for what is raised, see `query`."""
        watched_s = min(_WATCH_S, self._deadline_s * _WATCHED_PART)
        watch = _SleepWatch(self._child.pid, self._end - watched_s, self._end)
        self._is_finished = True
        left_s = max(self._end - time.monotonic(), _READ_S)
        outcome = self._child.finish(left_s, _ANSWER_BYTES, watch.look)
        # A child whose exit hangs in the driver may still have written its whole answer.
        if outcome.how == child_process.LATE:
            message = f'the driver did not answer in {self._deadline_s:g} s: "{self._library}"'
            hint = remedies.CHECK_LOG
            if watch.has_slept:
                raise DriverError(message, hint)
            raise NoAnswerError(
                message, f"{hint}, and for a CPU limit on the cgroup of the runtime"
            )
        try:
            response: dict[str, Any] = strictjson.loads(outcome.output)
        except ValueError:
            raise NoAnswerError(
                f'"{self._library}" ended the process that asked it, '
                f"{how_it_ended(outcome.status)}",
                remedies.CHECK_NVIDIA_SMI,
            ) from None
        if "error" in response:
            raise failure(self._library, response["error"], response.get("code"), self._proc)
        return response


class AnsweredQuery:
    """A query whose answer is known, for a process that asks the NVML that it has loaded."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __enter__(self) -> AnsweredQuery:  # noqa: PYI034 (Self is newer than Python 3.9)
        """Return this query."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no child."""

    def answer(self) -> Answer:
        """Return the answer."""
        return self._answer


def answer_of(response: dict[str, Any]) -> Answer:
    """Return the answer that `nvml_calls.describe` returned as *response*."""
    gpus = tuple(
        Gpu(**{**gpu, "mig_devices": tuple(MigDevice(**mig) for mig in gpu["mig_devices"])})
        for gpu in response["gpus"]
    )
    return Answer(
        response["driver_version"],
        response["cuda_version"],
        gpus,
        tuple(response["problems"]),
        left_out=tuple(LeftOutDevice(**device) for device in response["left_out"]),
        is_shared=response["is_shared"],
    )


class _SleepWatch:
    """An observer of whether a process sleeps without a break from *start* to *end*.

    Such a process waits for the driver: one that is throttled, or waits for memory, is runnable at
    times, or its context switches grow.
    """

    def __init__(self, pid: int, start: float, end: float) -> None:
        self._pid = pid
        self._next = start
        self._latest_start = (start + end) / 2
        self._sleep: str | None = None
        self.has_slept = False

    def look(self) -> None:
        """Observe the process if the next observation is due."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        if self._sleep is None:
            # An observation that starts late proves nothing: this process got no CPU time either.
            self._sleep = _sleep_of(self._pid) if now < self._latest_start else ""
            return
        if _sleep_of(self._pid) != self._sleep:
            self._sleep = ""
        self.has_slept = bool(self._sleep)


def _sleep_of(child: int) -> str:
    """Return the context switch counts of *child*; "" if it does not sleep."""
    try:
        with open(f"/proc/{child}/status", encoding="ascii", errors="replace") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return ""
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    if facts.get("State", "").split()[:1] not in (["S"], ["D"]):
        return ""
    switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return " ".join(facts.get(name, "").strip() for name in switches)


def how_it_ended(status: int | None) -> str:
    """Return the exit status or signal of a child in words."""
    if status is None:
        return "status unknown"
    return f"status {status}" if status >= 0 else f"signal {-status}"


def failure(library: str, text: str, code: int | None, proc: str = "/proc") -> DriverError:
    """Return the error for the user where NVML of *library* failed with *code*.

    *text* is NVML's description. *code* is None if the library could not be loaded.
    """
    message = f'NVML of "{library}": {text}'
    host = remedies.LiveHost(proc.removesuffix("/proc"))
    if code is None or code in nvml_calls.OF_THIS_PROCESS:
        return NoAnswerError(message, remedies.CHECK_NVIDIA_SMI)
    if code == nvml_calls.DRIVER_MISMATCH:
        versions = of_name(os.path.realpath(library)), module_version(proc)
        installed, loaded = (version or "of unknown version" for version in versions)
        return MismatchedDriverError(
            f"{message}: the library is {installed}, the loaded kernel module {loaded}",
            remedies.version_mismatch(host, loaded, installed),
        )
    if code == nvml_calls.DRIVER_NOT_LOADED and module_version(proc) is None:
        why, action = remedies.unloaded_module(host)
        return AbsentDriverError(f"{message}: {why}", action)
    return DriverError(message, remedies.CHECK_NVIDIA_SMI)


def module_version(proc: str = "/proc") -> str | None:
    """Return the version of the loaded kernel module; None if there is none."""
    try:
        with open(f"{proc}/driver/nvidia/version", encoding="utf-8", errors="replace") as stream:
            first = stream.readline(4096)
    except OSError:
        return None
    return of_module_text(first) or None


def isolate(writer: int, deadline_s: float) -> None:
    """Make this forked child one that nothing of its parent depends on, with *writer* as 3.

    It ends after *deadline_s* even if its parent does not exist any more.
    """
    # An unreachable object of the parent must not close its descriptor's number here.
    gc.disable()
    # NVML may start nvidia-modprobe and wait for it.
    for number in (_signal.SIGCHLD, _signal.SIGALRM, _signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    # End the child even if its parent no longer exists.
    _signal.setitimer(_signal.ITIMER_REAL, deadline_s + 1)
    os.dup2(writer, 3, inheritable=False)
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    # An abandoned child must not hold the parent's locks or pipes.
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    os.environ.clear()
    os.environ.update({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"})


def write_response(response: dict[str, Any]) -> None:
    """Write *response* as JSON to the parent of this isolated child."""
    view = memoryview(strictjson.dumps(response).encode())
    while view:
        view = view[os.write(3, view) :]


def _be_child(writer: int, library: str, deadline_s: float, proc: str, describe: Describe) -> int:
    """Write what *describe* returns of *library* to *writer*, and return the exit status."""
    isolate(writer, deadline_s)
    try:
        library_calls = nvml_calls.Nvml(library)
        library_calls.ask("nvmlInit")
        response = describe(library_calls, proc)
    except nvml_calls.NvmlError as error:
        response = {"error": str(error), "code": error.code}
    except (OSError, ImportError) as error:
        # An error of the loader, which may lack memory or descriptors, not of NVML.
        response = {"error": escape(str(error))}
    write_response(response)
    return 0
