# SPDX-License-Identifier: Apache-2.0
"""Entry of the hook role: root on the host, in front of a file system that an attacker wrote.

Nothing is trusted: no environment variable is read, descriptors but 0, 1 and 2 are closed, the
root comes from bundle and config.json, and no path below it is used as a string. The shim, which
must be transparent, shares none of this.

There are two processes. One reads the command line, and waits; its child does the rest, confined
as gpuruntime.system.seccomp has it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import errno
import os
import sys
import time

from gpuruntime import __version__
from gpuruntime.errors import BundleError, GpuRuntimeError, MountError, RequestError, bug, escape
from gpuruntime.system import paths, seccomp, syscalls
from hooks import options, state, update_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from gpuruntime.system.ops import Operation
    from hooks import prestart

# The incumbent's hooks that a spec may name one by one.
CLASSIC = (
    *("create-symlinks", "enable-cuda-compat", "update-ldcache", "chmod", "noop"),
    *("disable-device-node-modification", "update-application-profile"),
)
# The hook that engines put in front of the container's root themselves, and its old name.
PRESTART_PROGRAMS = (
    *("gpu-container-runtime-hook", "nvidia-container-runtime-hook"),
    "nvidia-container-toolkit",
)
HELP, VERSION = ("--help", "-help", "-h", "help"), ("--version", "-version", "-v")
USAGE = f"""\
usage: PROGRAM [--deadline SECONDS] [--debug] [--quiet] HOOK [OPTION...]
hooks: {", ".join((update_container.NAME, *CLASSIC))}
CDI specs call it, with the OCI state on standard input; "gpuruntime cdi generate" writes them.
"""
DEADLINE_S, MAX_DEADLINE_S = 10, 600
# How long after the deadline the child is left, and how long we then try to be heard.
GRACE_S = 0.4
MIN_DESCRIPTORS = 64
MIN_PIDS, MIN_MEMORY_MIB = 8, 16
MAX_REPORT_BYTES = 64 << 10


def main(cli_python: str = "") -> None:
    """Run the hook that `sys.argv` (['-c', argv[0], arguments…]) names; never returns.

    *cli_python* is the interpreter that asks the driver, for the prestart hook.
    The work is done in a child. A file system of the container that does not answer, served by
    FUSE for example, holds whoever asks it, and no signal ends that: then the child is left.
    """
    program = os.path.basename(sys.argv[1])
    try:
        # First of all: a container that shares our pid namespace must not look into this process.
        syscalls.set_undumpable()
        syscalls.close_range(3)
        # The launcher has set it, for a start that does not come here.
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        # Without a traceback; the child ends when we do.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        _raise_limit()
        if program in PRESTART_PROGRAMS:
            text, status = run_prestart(sys.argv[2:], program, cli_python)
        else:
            text, status = run(sys.argv[2:], program)
    except Exception as error:  # noqa: BLE001 (a bug is one line for the engine, no traceback)
        text, status = _explain(error, program)
    _leave(text, status)


def run(arguments: list[str], program: str) -> tuple[str, int]:
    """Do what *arguments* ask for, within the deadline; return what to say, and the exit status.

    Raises GpuRuntimeError.
    """
    told = answer(arguments, program)
    if told:
        # It was asked for, and is no message.
        os.write(1, told.encode("ascii", "backslashreplace"))
        return "", 0
    front, rest = options.split_global(arguments)
    name = rest[0] if rest else ""
    words = [*front, *rest[1:]]
    if name == update_container.NAME:
        given = update_container.read(words)
        operations = update_container.plan(given)
    elif name in CLASSIC:
        from hooks import classic  # noqa: PLC0415 (our own specs never need it)

        given = classic.read(name, words)
        operations = classic.plan(name, given)
    else:
        # A spec written by a newer version must not keep containers from starting. But where an
        # option is not known, its value may have been taken for the name.
        options.parse(program, front, ())
        if not name:
            help_ = f'"{program} {HELP[0]}" lists them'
            return f"{program}: warning: no hook is named, nothing is done; {help_}", 0
        return f'{program}: warning: there is no hook "{escape(name)}", nothing is done', 0
    deadline = Deadline(read_deadline(given))
    if not operations:
        return "", 0
    return _supervise(Work(program, given, operations), deadline)


def answer(arguments: list[str], program: str) -> str:
    """Return what a person asks for with *arguments*, "" for a hook's own."""
    asked = arguments[-1] if len(arguments) in (1, 2) else ""
    if asked in HELP:
        return USAGE.replace("PROGRAM", program)
    if len(arguments) == 1 and asked in VERSION:
        return f"{program} version {__version__}\n"
    return ""


def run_prestart(arguments: list[str], program: str, cli_python: str) -> tuple[str, int]:
    """Do the work of a prestart hook; return what to say, and the exit status.

    Raises GpuRuntimeError.
    """
    from hooks import prestart  # noqa: PLC0415 (no other hook needs what it brings)

    command, given = prestart.read(arguments)
    if command != prestart.NAME:
        return prestart.answer(command, given, program)
    deadline = Deadline(DEADLINE_S)
    deadline.late = deadline.no_root
    deadline.set_alarm()
    state_ = state.read_document(0)
    # The driver has a deadline of its own.
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    found = prestart.plan(state_, given, cli_python)
    if found is None:
        return "", 0
    if found.warning:
        return f"{program}: warning: {escape(found.warning)}", 0
    return _supervise(ContainerWork(program, given, found), Deadline(found.deadline_s))


def read_deadline(given: options.Given) -> int:
    """Return the seconds that the hook has; raise RequestError."""
    value = options.last(given, options.DEADLINE, str(DEADLINE_S))
    plain = value.isascii() and value.isdigit() and len(value) <= len(str(MAX_DEADLINE_S))
    if not plain or not 1 <= int(value) <= MAX_DEADLINE_S:
        raise RequestError(
            f'"{value[: options.MAX_SHOWN_CHARS]}" is no deadline',
            f"give --{options.DEADLINE} a number of seconds from 1 to {MAX_DEADLINE_S}",
        )
    return int(value)


class Deadline:
    """The time at which the hook gives up: with `late`, raised wherever it is by then."""

    def __init__(self, seconds: int) -> None:
        self.end = time.monotonic() + seconds
        self._seconds = seconds
        self.no_work = self.no_step("")
        self.no_root = BundleError(
            f"reading the state and opening the container's root was not done in {seconds} s",
            "close standard input behind the state",
        )
        self.late: GpuRuntimeError = self.no_work

    def no_step(self, step: str) -> MountError:
        """Return what to say where *step*, described in a line, is what takes too long."""
        return MountError(
            f"the work in the container's root was not done in {self._seconds} s"
            f"{step and f': it could not {step}'}",
            "look for a file system of the container that does not answer",
        )

    def set_alarm(self, grace: float = 0) -> None:
        """Raise `late` in this process, *grace* seconds after the time."""
        _signal.signal(_signal.SIGALRM, self._give_up)
        left = self.end + grace - time.monotonic()
        _signal.setitimer(_signal.ITIMER_REAL, max(left, 0.001))

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        # Unwinds, so that nothing half-made is left.
        del number, frame
        raise self.late


class Work:
    """What the child has to do, and how much it says about that."""

    def __init__(
        self, program: str, given: options.Given, operations: Sequence[Operation]
    ) -> None:
        self.program = program
        self.operations = operations
        self.state = options.last(given, options.CONTAINER_SPEC, "-")
        self.is_quiet = any(switch in given for switch in options.QUIET)
        self.is_verbose = not self.is_quiet and any(switch in given for switch in options.DEBUG)

    def warn(self, text: str) -> None:
        """Say what does not keep the container from starting."""
        if not self.is_quiet:
            _say(f"{self.program}: warning: {escape(text)}")

    def execute(self, deadline: Deadline) -> None:
        """Confine this process and carry the operations out in time; raise GpuRuntimeError."""
        deadline.late = deadline.no_root
        deadline.set_alarm()
        self.enter()
        try:
            paths.require_proc()
        except OSError as error:
            raise BundleError(
                f"the hook cannot be sure of its descriptors: {error}",
                'mount a procfs on "/proc" of the host, and nothing over it',
            ) from error
        self._confine()
        document, root = state.open_container(self.bundle())
        for planned in self.operations:
            operation: Operation = planned
            if hasattr(planned, "for_config"):
                operation = planned.for_config(document)
            step = operation.describe()
            deadline.late = deadline.no_step(step)
            if self.is_verbose:
                _say(f"{self.program}: {escape(step)}")
            operation.execute(root, self.warn)
        deadline.late = deadline.no_work

    def enter(self) -> None:
        """Go to where the container's root can be reached: a createContainer hook is there."""

    def bundle(self) -> str:
        """Return the bundle's path; raise BundleError."""
        return state.read_bundle(state.open_state(self.state))

    def _confine(self) -> None:
        # The host's ldconfig, where the operator wants it, is a process to be started.
        if any(getattr(operation, "ldconfig", "") for operation in self.operations):
            return
        try:
            if not seccomp.confine():
                self.warn("the kernel has no system call filters, the hook works without")
        except OSError as error:
            raise MountError(
                f"cannot confine the process that works in the container's root: {error}",
                "allow the runtime prctl(PR_SET_SECCOMP)",
            ) from error


class ContainerWork(Work):
    """The work of a prestart hook, in the container's mount namespace."""

    def __init__(self, program: str, given: options.Given, found: prestart.Plan) -> None:
        super().__init__(program, given, found.operations)
        self._found = found

    def enter(self) -> None:
        """Enter the mount namespace; raise BundleError."""
        self._found.enter()

    def bundle(self) -> str:
        """Return the bundle's path."""
        return self._found.bundle


def _supervise(work: Work, deadline: Deadline) -> tuple[str, int]:
    """Have a child do *work*; return what it says, and its status, or 1 if it is not done."""
    # The runtime waits for whoever holds its pipes: the child has only one of ours.
    us = os.getpid()
    try:
        report, stderr = os.pipe()
        child = os.fork()
    except OSError as error:
        raise _no_process(error) from error
    if child == 0:
        status = 1
        try:
            os.close(report)
            os.dup2(stderr, 2)
            os.close(stderr)
            status = _be_child(work, deadline, us)
        finally:
            os._exit(status)
    os.close(stderr)
    text = b""
    failure: GpuRuntimeError | None
    try:
        deadline.set_alarm(GRACE_S)
        while True:
            chunk = os.read(report, MAX_REPORT_BYTES)
            if not chunk:
                break
            text += chunk[: MAX_REPORT_BYTES - len(text)]
        _, status = os.waitpid(child, 0)
        failure = _failure(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
    except MountError as error:
        _kill(child)
        failure = error
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
    said = text.decode("ascii", "backslashreplace").rstrip("\n")
    if failure is None:
        return said, os.WEXITSTATUS(status)
    last, status = _explain(failure, work.program)
    return f"{said}\n{last}" if said else last, status


def _be_child(work: Work, deadline: Deadline, parent: int) -> int:
    """Do *work* in this process, the child of *parent*; return the exit status."""
    try:
        syscalls.die_with_parent()
        if os.getppid() != parent:
            # It ended before that.
            return 1
        os.setsid()
        null = os.open("/dev/null", os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        _be_first_victim()
        work.execute(deadline)
    except Exception as error:  # noqa: BLE001 (as above)
        text, status = _explain(error, work.program)
        _say(text)
        return status
    return 0


def _be_first_victim() -> None:
    """Have the kernel end this process where memory is short: then the other can say so."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)
    except OSError:
        # Only the message would be better.
        pass


def _raise_limit() -> None:
    """Have enough descriptors for paths of some depth, if that is allowed."""
    if os.sysconf("SC_OPEN_MAX") >= MIN_DESCRIPTORS:
        return
    import resource  # noqa: PLC0415 (hardly any caller has such a limit)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_DESCRIPTORS, max(hard, MIN_DESCRIPTORS)))
    except (OSError, ValueError):
        # Whatever needs more of them fails, and says so.
        pass


def _kill(child: int) -> None:
    """End *child* and what it has started."""
    for kill in (os.killpg, os.kill):
        try:
            kill(child, _signal.SIGKILL)
        except ProcessLookupError:
            # It has ended, or has no group of its own yet.
            pass


def _no_process(error: OSError) -> MountError:
    hint = f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more"
    if error.errno == errno.EAGAIN:
        hint = f"give the container a pids limit of {MIN_PIDS} or more"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        hint = f"allow the runtime {MIN_DESCRIPTORS} open files or more"
    return MountError(
        f"cannot start the process that works in the container's root: {error.strerror}", hint
    )


def _failure(number: int) -> MountError:
    """Return what to say of a child that signal *number* ended."""
    work = "the work in the container's root"
    if number == _signal.SIGSYS:
        return MountError(
            f"{work} was ended by the kernel: it made a system call that no hook needs",
            "report it with the kernel's audit record, which has the number of the call",
        )
    return MountError(
        f"{work} was ended by signal {number}",
        f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more"
        if number == _signal.SIGKILL
        else None,
    )


def _explain(error: Exception, program: str) -> tuple[str, int]:
    """Return what to say of *error*, and the exit status."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        error = MountError(
            "the memory is not enough for the hook",
            f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more",
        )
    elif getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        error = MountError(
            "there are too few descriptors for the hook",
            f"allow the runtime {MIN_DESCRIPTORS} open files or more",
        )
    elif isinstance(error, ImportError):
        error = GpuRuntimeError(f"cannot load the hook: {error}", "install gpuruntime again")
    known = error if isinstance(error, GpuRuntimeError) else bug(error)
    return f"{program}: {known.lines()}", known.exit_code


def _leave(text: str, status: int) -> None:
    """Say *text* and exit with *status*, also where nobody reads what we say."""
    _signal.signal(_signal.SIGALRM, lambda *_: os._exit(status))
    _signal.setitimer(_signal.ITIMER_REAL, GRACE_S)
    _say(text)
    # Nothing is buffered, and Python's own end would take longer than many a step.
    os._exit(status)


def _say(text: str) -> None:
    """Write *text*, if there is any, to stderr, which the low-level runtime relays."""
    if not text:
        return
    try:
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
    except OSError:
        # What there is to say does not decide whether the container starts.
        pass
