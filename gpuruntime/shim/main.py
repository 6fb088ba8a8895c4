# SPDX-License-Identifier: Apache-2.0
"""The OCI runtime: add what a container requests, then become the low-level runtime.

Creates are the calls `create` and `run`; every other call passes through unchanged.

On the start path; `main` reads from the top: parse, load, find, inject, restore, exec. In this
role we are transparent: the engine's environment, descriptors, directory and signals reach the
low-level runtime unchanged. The hooks, which trust nothing, share none of this.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import posix as os
import sys

from cdi import pathnames
from cdi.edits import describe
from gpuruntime import config as settings
from gpuruntime.errors import ConfigError, GpuRuntimeError, bug, escape
from gpuruntime.log import Log
from gpuruntime.oci import argv, lowlevel
from gpuruntime.oci.bundle import CONFIG_NAME, Bundle, has_read_only_root
from gpuruntime.plan import injection
from gpuruntime.record import Record
from gpuruntime.request import parse
from gpuruntime.snapshots import config_snapshot
from gpuruntime.snapshots.grants import SavedGrants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuruntime.config import Config
    from gpuruntime.oci.argv import Command
    from gpuruntime.plan.early_commands import EarlyCommand
    from gpuruntime.plan.injection import Host, Injection

# CPython ignores these signals from its start on; a bit is set if the engine ignored one already.
_IGNORED_SIGNALS = ((1, _signal.SIGPIPE), (2, _signal.SIGXFSZ))
# A further bit of the same number: the launcher lacked what lets it replay such a create.
_LACKS_RECORD = 4
# What the launcher may do with the next create like this one: hand it to Python, pass it on to the
# low-level runtime as it is, or replay what was added.
PYTHON, PASS, REPLAY = "python", "pass", "replay"
# Names of the incumbent's runtime, and the mode that each has whatever the config says.
_MODES = {
    f"{settings.RUNTIME}.cdi": settings.CDI,
    f"{settings.RUNTIME}.legacy": settings.LEGACY,
}


class Outcome(Record):
    """What `inject` did: what the launcher may do *next_time*, and what config.json was before.

    *next_time* is PYTHON, PASS or REPLAY. *original* is b"" unless it is REPLAY.
    """

    __slots__ = ("next_time", "original")

    def __init__(self, next_time: str, original: bytes = b"") -> None:
        self.next_time = next_time
        self.original = original

    def is_news(self, flags: int) -> bool:
        """Return whether the launcher, which passed *flags*, needs new instructions."""
        return self.next_time == PASS or (self.next_time == REPLAY and bool(flags & _LACKS_RECORD))


def main(cli_python: str) -> None:
    """Become the low-level runtime, or exit with the code of an error; never returns.

    The launcher leaves in `sys.argv`: '-c', a number whose bits are the ignored signals and what
    it lacks, its own device and inode, argv[0], the arguments. *cli_python* is the interpreter
    behind the slow path.
    """
    _, flags, identity, launcher, *arguments = sys.argv
    # Until the command line is read there is no log to write to.
    log = Log(None, json_format=False)
    try:
        command = argv.parse(arguments)
        log = Log(command.log, json_format=command.log_format == "json")
        saved = SavedGrants()
        environment = settings.environment_of_process()
        config = config_snapshot.load(
            environment, lambda path: _compile(path, cli_python, log), saved
        )
        config = as_called(config, launcher)
        log.level = "debug" if command.debug else config.log_level
        log.debug_file = config.debug
        runtime = lowlevel.find(config.runtimes, environment.get("PATH"), identity, log.warning)
        if command.creates:
            from gpuruntime.shim.host import ShimHost  # noqa: PLC0415 (only for a create)

            host = ShimHost(config, cli_python, launcher, log, saved)
            outcome = inject(command, config, host, log, runtime)
            if outcome.is_news(int(flags)):
                _instruct(outcome, config, saved, (launcher, identity), log)
        _restore(int(flags))
        lowlevel.execute(runtime, arguments)
    except GpuRuntimeError as error:
        log.error(f"{pathnames.basename(launcher)}: {error.lines()}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        # Of a terminal's user, who sees what any program shows that does not handle the signal.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    except Exception as error:  # noqa: BLE001 (a bug is one line for the engine, no traceback)
        log.error(f"{pathnames.basename(launcher)}: {bug(error).lines()}")
        sys.exit(1)


def as_called(config: Config, program: str) -> Config:
    """Return *config* with the mode that the name of *program* says, if it says one."""
    mode = _MODES.get(pathnames.basename(program))
    if mode is None:
        return config
    return settings.Config({**config.values, f"{settings.RUNTIME}.mode": mode}, config.path)


def inject(command: Command, config: Config, host: Host, log: Log, runtime: str) -> Outcome:
    """Add the devices that the bundle's container requests to its config.json.

    *runtime* is the path of the low-level runtime. Raises GpuRuntimeError, with config.json
    untouched, if the request cannot be met.
    """
    # crun's --config names another file, which crun resolves before it enters the bundle.
    directory, name = pathnames.split(command.config or "")
    bundle = Bundle(directory, name) if name else Bundle(command.bundle or "", CONFIG_NAME)
    document, doubt = bundle.parse()
    if not parse.may_ask(bundle.data, config):
        return Outcome(PASS)
    if doubt is not None:
        raise bundle.ambiguous(doubt)
    decided = injection.decide(document, config, host)
    _log_decision(decided, config, log)
    early: list[EarlyCommand] = []
    # A hook would not find crun's other file.
    if has_read_only_root(document) and not name:
        from gpuruntime.plan import early_commands  # noqa: PLC0415 (few roots are read-only)

        early = early_commands.commands(decided.edits, document, runtime)
    if not decided.apply(document):
        return Outcome(PYTHON)
    bundle.store(document)
    if early:
        from gpuruntime.shim import early_hook  # noqa: PLC0415 (few roots are read-only)

        early_hook.run(early, command.bundle or "")
    if early or decided.warnings or decided.request.ignored:
        # The launcher runs no hooks and logs nothing.
        return Outcome(PYTHON)
    return Outcome(REPLAY, bundle.data)


def _log_decision(decided: Injection, config: Config, log: Log) -> None:
    """Log what of the request is ignored, the warnings, and on request what is added."""
    for ignored in decided.request.ignored:
        log.warning(f"ignored: {ignored}")
    for line in decided.warnings:
        log.warning(line)
    if log.is_on("info") and decided.request:
        how = "Auto-detected" if config.mode == settings.AUTO else "Using requested"
        log.record("info", f'{how} mode as "{decided.request.mode}"')
    for line in decided.notes:
        log.record("info", escape(line))
    if log.is_on("debug") and decided.edits is not None:
        for line in describe(decided.edits):
            log.record("debug", escape(line))


def _instruct(
    outcome: Outcome, config: Config, saved: SavedGrants, caller: tuple[str, str], log: Log
) -> None:
    """Write the files by which the launcher passes on, or replays, the next create like this one.

    *caller* is the launcher's argv[0], and its device and inode. A failure is only logged: the
    container is prepared, and starts.
    """
    try:
        from gpuruntime.launcher import companion  # noqa: PLC0415 (few creates are news)

        environment = settings.environment_of_process()
        companion.keep(environment)
        if outcome.next_time == REPLAY:
            from gpuruntime.launcher import replay  # noqa: PLC0415 (not for those to pass on)

            by = replay.Caller(*caller, environment.get("PATH", ""))
            replay.keep(outcome.original, config, saved.again(), by)
    except Exception as error:  # noqa: BLE001 (the container is prepared, and starts)
        log.record("debug", f"nothing is kept for the launcher: {type(error).__name__}")


def _compile(path: str, cli_python: str, log: Log) -> Any:  # noqa: ANN401 (JSON)
    """Return the values of the config file *path*, compiled by the full interpreter."""
    from gpuruntime import slowpath  # noqa: PLC0415 (once a config file)

    answer = slowpath.ask(cli_python, "config", path)
    if "error" in answer:
        raise ConfigError(answer["error"], answer["hint"])
    for warning in answer["warnings"]:
        log.warning(warning)
    return answer["values"]


def _restore(flags: int) -> None:
    """Undo what CPython's start changed and an exec hands on: two signals and LC_CTYPE."""
    for bit, number in _IGNORED_SIGNALS:
        if not flags & bit:
            _signal.signal(number, _signal.SIG_DFL)
    # CPython coerces the C locale by setting LC_CTYPE for its children. The kernel still has the
    # environment as it was; setenv and unsetenv leave the other entries where they are.
    with open("/proc/self/environ", "rb") as stream:
        entries = stream.read().split(b"\0")
    original = [entry[9:] for entry in entries if entry.startswith(b"LC_CTYPE=")]
    if not original:
        os.unsetenv("LC_CTYPE")
    elif os.environ.get(b"LC_CTYPE") != original[0]:
        os.putenv(b"LC_CTYPE", original[0])
