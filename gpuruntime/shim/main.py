# SPDX-License-Identifier: Apache-2.0
"""The OCI runtime: add what a container requests on `create`, then become the low-level runtime.

On the start path; reads from the top: parse, decide, apply, store, exec. In this role we are
transparent: the engine's environment, descriptors, directory and signals reach the low-level
runtime unchanged. The hooks, which trust nothing, share none of this.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import os
import sys

from cdi.edits import describe
from gpuruntime import config as settings
from gpuruntime.errors import ConfigError, GpuRuntimeError, bug, escape
from gpuruntime.log import Log
from gpuruntime.oci import argv, lowlevel
from gpuruntime.oci.bundle import CONFIG_NAME, Bundle, has_read_only_root
from gpuruntime.plan import hook_programs, injection
from gpuruntime.request import parse
from gpuruntime.snapshots import config_snapshot
from gpuruntime.snapshots.grants import SavedGrants, key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuruntime.config import Config
    from gpuruntime.grant import Grant
    from gpuruntime.oci.argv import Command
    from gpuruntime.plan.early_commands import EarlyCommand
    from gpuruntime.plan.injection import Host
    from gpuruntime.request.parse import Request
    from gpuruntime.shim.machine import Machine

# Set by CPython at its start; the launcher tells whether they were ignored before.
_IGNORED_BITS = ((1, _signal.SIGPIPE), (2, _signal.SIGXFSZ))
# Beside these: the launcher could have done this by itself, had we told it how.
_UNKNOWN_BIT = 4
# Names of the incumbent's runtime, and the mode that each has whatever the config says.
_MODES = {
    f"{settings.RUNTIME}.cdi": settings.CDI,
    f"{settings.RUNTIME}.legacy": settings.LEGACY,
}


def main(cli_python: str) -> None:
    """Become the low-level runtime, or exit with the code of an error; never returns.

    The launcher leaves in `sys.argv`: '-c', the ignored signals and what it lacks as a number, its
    own device and inode, argv[0], the arguments. *cli_python* is the interpreter behind the slow
    path.
    """
    _, ignored, identity, launcher, *arguments = sys.argv
    # Until the command line is read there is no log to write to.
    log = Log(None, json_format=False)
    try:
        command = argv.parse(arguments)
        log = Log(command.log, json_format=command.log_format == "json")
        saved = SavedGrants()
        config = config_snapshot.load(
            os.environ, lambda path: _compile(path, cli_python, log), saved
        )
        config = as_called(config, launcher)
        log.level = "debug" if command.debug else config.log_level
        log.debug_file = config.debug
        runtime = lowlevel.find(config.runtimes, os.environ.get("PATH"), identity, log.warning)
        if command.creates:
            host = ShimHost(config, cli_python, launcher, log, saved)
            given = inject(command, config, host, log, runtime)
            if given is None or (given and int(ignored) & _UNKNOWN_BIT):
                # The launcher could not tell: the next time it can.
                try:
                    tell(given, config, saved, (launcher, identity))
                except Exception as error:  # noqa: BLE001 (the container is prepared, and starts)
                    what = type(error).__name__
                    log.record("debug", f"nothing is kept for the launcher: {what}")
        _restore(int(ignored))
        lowlevel.execute(runtime, arguments)
    except GpuRuntimeError as error:
        log.error(f"{os.path.basename(launcher)}: {error.lines()}")
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 (a bug is one line for the engine, no traceback)
        log.error(f"{os.path.basename(launcher)}: {bug(error).lines()}")
        sys.exit(1)


def as_called(config: Config, program: str) -> Config:
    """Return *config* with the mode that the name of *program* says, if it says one."""
    mode = _MODES.get(os.path.basename(program))
    if mode is None:
        return config
    return settings.Config({**config.values, f"{settings.RUNTIME}.mode": mode}, config.path)


def inject(command: Command, config: Config, host: Host, log: Log, runtime: str) -> bytes | None:
    """Add the devices that the bundle's container asks for to its config.json.

    Returns the bytes that were there if this was all there is to do, and may be done again without
    a word, and None if no word of them asks for anything. *runtime* is the low-level one. Raises
    GpuRuntimeError, with config.json untouched, if the devices cannot be given.
    """
    # crun's --config names another file, which crun resolves before it enters the bundle.
    directory, name = os.path.split(command.config or "")
    bundle = Bundle(directory, name) if name else Bundle(command.bundle or "", CONFIG_NAME)
    document, doubt = bundle.parse()
    if not parse.may_ask(bundle.data, config):
        return None
    if doubt is not None:
        raise bundle.ambiguous(doubt)
    decided = injection.decide(document, config, host)
    for ignored in decided.asked.ignored:
        log.warning(f"ignored: {ignored}")
    for line in decided.warnings:
        log.warning(line)
    if log.is_on("info") and decided.asked:
        how = "Auto-detected" if config.mode == settings.AUTO else "Using requested"
        log.record("info", f'{how} mode as "{decided.asked.mode}"')
    for line in decided.notes:
        log.record("info", escape(line))
    if log.is_on("debug") and decided.edits is not None:
        for line in describe(decided.edits):
            log.record("debug", escape(line))
    early: list[EarlyCommand] = []
    # A hook would not find crun's other file.
    if has_read_only_root(document) and not name:
        from gpuruntime.plan import early_commands  # noqa: PLC0415 (few roots are read-only)

        early = early_commands.commands(decided.edits, document, runtime)
    if not decided.apply(document):
        return b""
    bundle.store(document)
    if early:
        from gpuruntime.shim import early_hook  # noqa: PLC0415 (few roots are read-only)

        early_hook.run(early, command.bundle or "")
    return b"" if early or decided.warnings or decided.asked.ignored else bundle.data


def tell(given: bytes | None, config: Config, saved: SavedGrants, called: tuple[str, str]) -> None:
    """Leave what the launcher lacked, whose argv[0], and device and inode, are *called*.

    That is how to know what asks for nothing, and if something was *given* to a config.json, how
    to give it again.
    """
    # Nothing that a GPU is to wait for.
    from gpuruntime.launcher import companion  # noqa: PLC0415

    companion.keep(os.environ)
    if given is not None:
        from gpuruntime.launcher import replay  # noqa: PLC0415

        caller = replay.Caller(*called, os.environ.get("PATH", ""))
        replay.keep(given, config, saved.again(), caller)


class ShimHost:
    """What the machine has, for `injection.decide`: what is *saved*, else worked out and kept."""

    def __init__(
        self, config: Config, cli_python: str, launcher: str, log: Log, saved: SavedGrants
    ) -> None:
        """Take argv[0] of the *launcher*, beside which its other names are."""
        self._config = config
        self._cli_python = cli_python
        self._launcher = launcher
        self._log = log
        self._saved = saved

    def grant(self, asked: Request) -> Grant:
        """Return what there is for *asked*, as it was for an earlier container if that holds."""
        hook = hook_programs.hook_of(asked, self.program)
        if asked.is_automatic and self._config["health"] == "nvml":
            return self._machine().work_out(asked, hook)[0]
        name = key(asked, hook)
        found = self._saved.find(name)
        if found is None:
            found, state = self._machine().work_out(asked, hook)
            if state is not None:
                self._saved.keep(name, found, state, of_inventory=asked.is_automatic)
        return found

    def program(self, name: str) -> str:
        """Return the path of the hook *name*; raise ConfigError if it is nowhere."""
        return hook_programs.find(name, self._config, self._launcher, os.environ.get("PATH"))

    def make_nodes(self, minors: Sequence[int]) -> bool:
        """Have the driver make its nodes; see Machine."""
        return self._machine().make_nodes(minors)

    def _machine(self) -> Machine:
        from gpuruntime.shim.machine import Machine  # noqa: PLC0415 (most creates do without)

        return Machine(self._config, self._cli_python, self._log)


def _compile(path: str, cli_python: str, log: Log) -> Any:  # noqa: ANN401 (JSON)
    """Return the values of the config file *path*, compiled by the full interpreter."""
    from gpuruntime import slowpath  # noqa: PLC0415 (once a config file)

    answer = slowpath.ask(cli_python, "config", path)
    if "error" in answer:
        raise ConfigError(answer["error"], answer["hint"])
    for warning in answer["warnings"]:
        log.warning(warning)
    return answer["values"]


def _restore(ignored: int) -> None:
    """Undo what CPython's start changed and an exec hands on: two signals and LC_CTYPE."""
    for bit, number in _IGNORED_BITS:
        if not ignored & bit:
            _signal.signal(number, _signal.SIG_DFL)
    # CPython coerces the C locale by setting LC_CTYPE for its children. The kernel still has the
    # environment as it was; setenv and unsetenv leave the other entries where they are.
    with open("/proc/self/environ", "rb") as stream:
        entries = stream.read().split(b"\0")
    original = [entry[9:] for entry in entries if entry.startswith(b"LC_CTYPE=")]
    if not original:
        os.unsetenv("LC_CTYPE")
    elif os.environb.get(b"LC_CTYPE") != original[0]:
        os.putenv(b"LC_CTYPE", original[0])
