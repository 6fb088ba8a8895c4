# SPDX-License-Identifier: Apache-2.0
"""Entry of the hook role: root on the host, in front of a file system that an attacker wrote.

Nothing is trusted: no environment variable is read, descriptors but 0, 1 and 2 are closed, the
root comes from bundle and config.json, and no path below it is used as a string. The shim, which
must be transparent, shares none of this.

This process is the child of the launcher, which waits for it (hooks.supervision). It does its work
confined to the system calls of gpuruntime.system.seccomp.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import posix as os
import sys

from cdi.pathnames import basename
from gpuruntime import __version__
from gpuruntime.errors import BundleError, MountError, escape
from gpuruntime.system import paths, seccomp, syscalls
from hooks import options, state, update_container
from hooks.report import MIN_DESCRIPTORS, Report, explain
from hooks.supervision import Deadline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuruntime.system.operation import Operation
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
# Names of the program whose words scripts parse.
INCUMBENTS = ("nvidia-cdi-hook", "nvidia-ctk")
HELP, VERSION = ("--help", "-help", "-h", "help"), ("--version", "-version", "-v")
DEADLINE_S, MAX_DEADLINE_S = 10, 600
# The operator's deadline for the driver has no limit; the launcher waits no longer than this.
LONGEST_S = 86400


def main(cli_python: str = "", *, is_supervised: bool = False) -> None:
    """Run the hook that `sys.argv` (['-c', argv[0], arguments…]) names; never returns.

    *cli_python* is the interpreter that queries the driver, for the prestart hook. The launcher
    says that it *is_supervised*.
    """
    program = basename(sys.argv[1])
    report = Report(is_supervised=is_supervised)
    status = 1
    try:
        text, status = _main(program, cli_python, report)
        report.say(text, status)
    finally:
        # Nothing is buffered, and Python's own end would take longer than many a step.
        os._exit(status)


def _main(program: str, cli_python: str, report: Report) -> tuple[str, int]:
    """Do what the command line asks for; return what to say, and the exit status."""
    try:
        # First of all: a container that shares our pid namespace must not look into this process.
        syscalls.set_undumpable()
        # The launcher has set it; the kernel may drop it where an exec changes rights.
        syscalls.die_with_parent()
        syscalls.close_range(3)
        # Without a traceback.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        _raise_limit()
        if program in PRESTART_PROGRAMS:
            return run_prestart(sys.argv[2:], program, cli_python, report)
        return run(sys.argv[2:], program, report)
    except Exception as error:  # noqa: BLE001 (a bug is one line for the engine, no traceback)
        return explain(error, program)


def run(arguments: list[str], program: str, report: Report) -> tuple[str, int]:
    """Do what *arguments* ask for, within the deadline; return what to say, and the exit status.

    *report* gets the warnings. Raises GpuRuntimeError.
    """
    help_text = information(arguments, program)
    if help_text:
        # A person requested it: unlike messages it goes to standard output.
        os.write(1, help_text.encode("ascii", "backslashreplace"))
        return "", 0
    front, rest = options.split_global(arguments)
    name = rest[0] if rest else ""
    words = [*front, *rest[1:]]
    if name == update_container.NAME:
        option_values = update_container.read(words)
        operations = update_container.plan(option_values)
    elif name in CLASSIC:
        from hooks import classic  # noqa: PLC0415 (our own specs never need it)

        option_values = classic.read(name, words)
        operations = classic.plan(name, option_values)
    else:
        # A spec written by a newer version must not keep containers from starting. But where an
        # option is not known, its value may have been taken for the name.
        options.parse(program, front, ())
        if not name:
            help_ = f'"{program} {HELP[0]}" lists them'
            return f"{program}: warning: no hook is named, nothing is done; {help_}", 0
        return f'{program}: warning: there is no hook "{escape(name)}", nothing is done', 0
    deadline = Deadline(read_deadline(option_values))
    if operations:
        Work(program, option_values, operations, report).execute(deadline)
    return "", 0


def information(arguments: list[str], program: str) -> str:
    """Return the usage or the version if *arguments* request that, else ""."""
    if len(arguments) == 1 and arguments[0] in VERSION:
        # Scripts look for these words in the output of the incumbent's program.
        front = f"NVIDIA CDI Hook version {__version__}\n" if program in INCUMBENTS else ""
        return f"{front}{program} version {__version__}\n"
    others = [word for word in arguments if word not in HELP]
    # More arguments may have the word as a value, which is data.
    if len(arguments) > 2 or len(others) == len(arguments):
        return ""
    from gpuruntime.system import hook_usage  # noqa: PLC0415 (no container's start needs it)

    # The launcher removes the word from the incumbent's command line.
    words = f"{program} hook" if program == "nvidia-ctk" else program
    if others and others[0] in hook_usage.HOOKS:
        return hook_usage.of_hook(words, others[0])
    return hook_usage.of_program(words)


def run_prestart(
    arguments: list[str], program: str, cli_python: str, report: Report
) -> tuple[str, int]:
    """Do the work of a prestart hook; return what to say, and the exit status.

    *report* gets the warnings. Raises GpuRuntimeError.
    """
    from hooks import prestart  # noqa: PLC0415 (no other hook needs what it brings)

    if len(arguments) == 1 and arguments[0] in HELP:
        from gpuruntime.system import hook_usage  # noqa: PLC0415 (as above)

        os.write(1, hook_usage.of_prestart(program).encode("ascii", "backslashreplace"))
        return "", 0
    command, option_values = prestart.read(arguments)
    if command != prestart.NAME:
        return prestart.answer(command, option_values, program)
    deadline = Deadline(DEADLINE_S)
    deadline.error = deadline.no_root
    deadline.set_alarm()
    state_ = state.read_document(0)
    # The driver has a deadline of its own.
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    report.expect(LONGEST_S)
    plan = prestart.plan(state_, option_values, cli_python)
    if plan is None:
        return "", 0
    if plan.warning:
        return f"{program}: warning: {escape(plan.warning)}", 0
    ContainerWork(program, option_values, plan, report).execute(Deadline(plan.deadline_s))
    return "", 0


def read_deadline(option_values: options.OptionValues) -> int:
    """Return the seconds that the hook has; raise UsageError."""
    value = options.last(option_values, options.DEADLINE, str(DEADLINE_S))
    plain = value.isascii() and value.isdigit() and len(value) <= len(str(MAX_DEADLINE_S))
    if not plain or not 1 <= int(value) <= MAX_DEADLINE_S:
        raise options.UsageError(
            f'"{value[: options.MAX_SHOWN_CHARS]}" is not a deadline',
            f"give --{options.DEADLINE} a number of seconds from 1 to {MAX_DEADLINE_S}",
        )
    return int(value)


class Work:
    """What is to be done in the container's root, and how much is said about that."""

    def __init__(
        self,
        program: str,
        option_values: options.OptionValues,
        operations: Sequence[Operation],
        report: Report,
    ) -> None:
        self.program = program
        self.report = report
        self.operations = operations
        self.state = options.last(option_values, options.CONTAINER_SPEC, "-")
        self.is_quiet = any(switch in option_values for switch in options.QUIET)
        self.is_verbose = not self.is_quiet and any(
            switch in option_values for switch in options.DEBUG
        )

    def warn(self, text: str) -> None:
        """Say what does not keep the container from starting."""
        if not self.is_quiet:
            self.report.say(f"{self.program}: warning: {escape(text)}")

    def trace(self, describe: Callable[[], str]) -> None:
        """Say what is done next, as *describe* returns it, if the command line asks for that."""
        if self.is_verbose:
            self.report.say(f"{self.program}: {escape(describe())}")

    def execute(self, deadline: Deadline) -> None:
        """Confine this process and carry the operations out in time; raise GpuRuntimeError."""
        self.report.expect(deadline.seconds)
        _detach()
        deadline.error = deadline.no_root
        deadline.set_alarm()
        try:
            self._work(deadline)
        finally:
            deadline.disarm()

    def _work(self, deadline: Deadline) -> None:
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
            operation = planned.for_config(document)
            deadline.set_step(operation.describe)
            self.trace(operation.describe)
            operation.execute(root, self.warn)
        deadline.error = deadline.no_work

    def enter(self) -> None:
        """Go to where the container's root can be reached: a createContainer hook is there."""

    def bundle(self) -> str:
        """Return the bundle's path; raise BundleError."""
        return state.read_bundle(state.open_state(self.state))

    def _confine(self) -> None:
        # The host's ldconfig, where the operator wants it, is a process to be started.
        if any(operation.ldconfig for operation in self.operations):
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

    def __init__(
        self,
        program: str,
        option_values: options.OptionValues,
        plan: prestart.Plan,
        report: Report,
    ) -> None:
        super().__init__(program, option_values, plan.operations, report)
        self._plan = plan
        self._log = plan.log

    def warn(self, text: str) -> None:
        """Say, and log, what does not keep the container from starting."""
        super().warn(text)
        if self._log is not None:
            self._log.record(f"warning: {text}")

    def trace(self, describe: Callable[[], str]) -> None:
        """Log what is done next, and say it if the command line asks for that."""
        super().trace(describe)
        if self._log is not None:
            self._log.record(describe())

    def execute(self, deadline: Deadline) -> None:
        """Do the work as every hook, and log how it ended; raise GpuRuntimeError."""
        if self._log is not None and self._log.problem:
            super().warn(self._log.problem)
        try:
            super().execute(deadline)
        except Exception as error:
            if self._log is not None:
                self._log.record(f"failed: {error}")
            raise
        self.trace(lambda: "done")

    def enter(self) -> None:
        """Enter the mount namespace; raise BundleError."""
        self.trace(self._plan.summary)
        self._plan.enter()

    def bundle(self) -> str:
        """Return the bundle's path."""
        return self._plan.bundle


def _detach() -> None:
    """Have no standard output, and end first where memory is short: the launcher can say so."""
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, 1)
    os.close(null)
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
