# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime runtime configure`: register the runtime with an engine, or undo that."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click

from gpuruntime.cli.comma_option import CommaOption
from gpuruntime.cli.output import write_stdout
from gpuruntime.engines import (
    config_files,
    config_paths,
    file_changes,
    file_sets,
    kubelet,
    oci_hook,
    undo_records,
)
from gpuruntime.engines.config_files import FileSet
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ArgumentError, ConfigError, escape

# The value of the incumbent's flag that stands for the engine's own default.
SENTINEL = "RUNTIME_SPECIFIC_DEFAULT"
PROGRAM = "gpu-container-runtime"
HOOK = "gpu-container-runtime-hook"
DUMP_TIMEOUT_S = 30
DIFFERENT = 1


def _flag(*names: str, help_: str) -> Callable[..., Any]:
    """Return an option that is true by its name alone, and may have a value after "="."""
    return click.option(
        *names, is_flag=False, flag_value="true", default=False, type=bool, help=help_, metavar=""
    )


@click.command()
@click.option(
    "--runtime",
    "--engine",
    "engine",
    metavar="ENGINE",
    help=f"The engine: {', '.join(config_paths.names())}.  [default: the installed one]",
)
@click.option("--config", "config_path", metavar="FILE", help="The engine's config file.")
@click.option(
    "--drop-in-config",
    "drop_in",
    metavar="FILE",
    help='The drop-in to write; "" to edit the config file itself.',
)
@click.option(
    "--runtime-name", "--nvidia-runtime-name", "name", help="The runtime's name in the engine."
)
@click.option("--runtime-path", "--nvidia-runtime-path", "path", help="The runtime's program.")
@_flag("--set-as-default", "--nvidia-set-as-default", help_="Make it the default runtime.")
@_flag("--cdi.enabled", "--cdi.enable", "--enable-cdi", "has_cdi", help_="Turn CDI on.")
@click.option(
    "--container-annotations",
    "annotations",
    cls=CommaOption,
    metavar="PREFIX",
    help="Make containerd pass annotations with this prefix; may be repeated.",
)
@_flag("--dry-run", help_="Print the new config, and a diff on standard error; write nothing.")
@_flag("--undo", help_="Remove the runtime, and restore what it replaced.")
@_flag("--check", help_="Print a diff and exit with 1 if the engine is not configured this way.")
@click.option("--config-source", default="file", show_default=True, metavar="file|command")
@click.option(
    "--executable-path", default="", help="The engine's program, for --config-source command."
)
@click.option("--config-mode", default="", help='"oci-hook": write a hook file instead.')
@click.option("--oci-hook-path", default="", help="The hook file.  [default: standard output]")
@click.option(
    "--nvidia-runtime-hook-path", "--runtime-hook-path", "hook", help="The hook's program."
)
@click.option(
    "--state-dir",
    envvar="GPURUNTIME_STATE_DIRECTORY",
    metavar="DIRECTORY",
    help="Where the original files are recorded.",
)
@click.pass_context
def configure(ctx: click.Context, /, **values: Any) -> None:  # noqa: ANN401 (click's)
    """Register the runtime with an engine: edit its config, and print how to restart it.

    All other content of the files stays the same, byte by byte. No engine is restarted. "--undo"
    removes one runtime; the last one restores the files, apart from edits made since.
    """
    options = _Options(**values)
    if options.check and (options.dry_run or options.undo):
        raise click.UsageError("--check excludes --dry-run and --undo")
    if options.is_hook and not options.oci_hook_path:
        write_stdout(oci_hook.document(options.hook_program))
        return
    engine_config, file_set = options.file_set()
    for note in file_set.notes:
        _warn(note)
    plan, make = file_changes.to_configure, file_changes.configure
    if options.undo:
        plan, make = file_changes.to_undo, file_changes.undo
    changes = plan(file_set.files, options.state)
    if options.dry_run:
        _print_configs(changes)
    elif options.check:
        if _print_differences(changes):
            ctx.exit(DIFFERENT)
    else:
        _report(make(changes, options.state), engine_config)


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    """The options of the command line, and the files and runtime that they select on this host."""

    engine: str | None
    config_path: str | None
    drop_in: str | None
    name: str | None
    path: str | None
    set_as_default: bool
    has_cdi: bool
    annotations: tuple[str, ...]
    dry_run: bool
    undo: bool
    check: bool
    config_source: str
    executable_path: str
    config_mode: str
    oci_hook_path: str
    hook: str | None
    state_dir: str | None

    @property
    def is_incumbent(self) -> bool:
        """Whether the command was called by the incumbent's name, which has other defaults."""
        return os.path.basename(sys.argv[0]) == "nvidia-ctk"

    @property
    def state(self) -> str:
        """The directory of the undo records."""
        return self.state_dir or undo_records.default_directory(dict(os.environ), os.geteuid())

    @property
    def is_hook(self) -> bool:
        """Whether to write a hook file instead of a config."""
        return self.config_mode in ("oci-hook", "hook")

    @property
    def hook_program(self) -> str:
        """The program of that hook."""
        incumbent = "/usr/bin/nvidia-container-runtime-hook"
        return self.hook or (incumbent if self.is_incumbent else installed(HOOK))

    def file_set(self) -> tuple[EngineConfig | None, FileSet]:
        """Return the engine, None for a hook file, and the files to edit; raise ConfigError."""
        if self.is_hook:
            text = oci_hook.document(self.hook_program)
            path = os.path.abspath(self.oci_hook_path)
            return None, FileSet([config_files.whole(path, text)], [])
        if self.config_mode not in ("", "config", "config-file"):
            _warn(f'ignoring unsupported config mode "{self.config_mode}"')
        engine_config = self.engine_config()
        entry = self.entry(engine_config)
        if self.undo:
            return engine_config, file_sets.to_undo(engine_config, entry)
        return engine_config, file_sets.to_configure(
            engine_config, entry, self.source(engine_config)
        )

    def engine_config(self) -> EngineConfig:
        """Return the location of the engine's config; raise ConfigError if it cannot be edited."""
        host = config_paths.this_host()
        default = "docker" if self.is_incumbent else None
        brand = "nvidia" if self.is_incumbent else "gpuruntime"
        name = self.engine or default or config_paths.choose(host)
        engine_config = config_paths.find(name, host, brand)
        if self.config_path:
            path = os.path.abspath(self.config_path)
            if engine_config.family == "docker" and config_paths.is_of_snap(path):
                raise config_paths.snap_refusal()
            if path != engine_config.config:
                if not self.is_incumbent:
                    engine_config = config_paths.beside(engine_config, path, brand)
                engine_config = dataclasses.replace(engine_config, config=path, socket="")
        if self.drop_in is None or self.drop_in == SENTINEL:
            return engine_config
        if self.drop_in and engine_config.family in ("docker", "template"):
            raise ArgumentError(
                f"{engine_config.name} does not support drop-in configs",
                "omit --drop-in-config",
            )
        if self.drop_in and not os.path.isabs(self.drop_in):
            raise ArgumentError(
                f'the drop-in "{self.drop_in}" is not an absolute path', "begin it with /"
            )
        drop_in = self.drop_in and os.path.normpath(self.drop_in)
        if drop_in == engine_config.config:
            drop_in = ""
        return dataclasses.replace(engine_config, drop_in=drop_in, last="")

    def entry(self, engine_config: EngineConfig) -> RuntimeEntry:
        """Return the runtime to register; raise ConfigError if its name or path is not valid."""
        brand = "nvidia" if self.is_incumbent else "gpuruntime"
        default = installed(PROGRAM)
        if self.is_incumbent:
            is_bare = engine_config.family == "docker"
            default = ("" if is_bare else "/usr/bin/") + "nvidia-container-runtime"
        entry = RuntimeEntry(
            self.name or brand,
            self.path or default,
            is_default=self.set_as_default,
            has_cdi=self.has_cdi,
            annotations=self.annotations,
            has_systemd_cgroup=kubelet.uses_systemd_cgroups(),
        )
        entry.check(is_absolute=engine_config.family != "docker")
        if entry.path.startswith("/") and not os.access(entry.path, os.X_OK) and not self.undo:
            _warn(f'there is no program "{entry.path}" yet')
        return entry

    def source(self, engine_config: EngineConfig) -> str | None:
        """Return the config that the engine's own program prints, None to read its file."""
        if self.config_source not in ("file", "command"):
            raise ArgumentError(
                f'unrecognized config source "{self.config_source}"', 'use "file" or "command"'
            )
        if self.config_source == "file":
            return None
        if engine_config.family not in ("containerd", "crio"):
            _warn(f"{engine_config.name} cannot print its config: its file is read")
            return None
        if engine_config.family == "crio":
            first = [self.executable_path or "crio", "status", "config"]
            return _first_output([first, ["crio-status", "config"]])
        program = self.executable_path or "containerd"
        chosen = ["--config", engine_config.config] if os.path.exists(engine_config.config) else []
        return _first_output([[program, *chosen, "config", "dump"]])


def _print_configs(changes: list[file_changes.FileChange]) -> None:
    """Print the new content of the files of *changes*, and the diffs on standard error.

    A single file is printed without a heading, so that another program can read it. Several files
    are TOML or templates of TOML: a comment names each.
    """
    texts = {change.path: change.after for change in changes if change.after is not None}
    for path, text in texts.items():
        end = "" if text.endswith("\n") else "\n"
        write_stdout(text + end if len(texts) == 1 else f"# {escape(path)}\n{text}{end}")
    click.echo("".join(change.diff() for change in changes), err=True, nl=False)
    _print_states(changes)


def _print_differences(changes: list[file_changes.FileChange]) -> bool:
    """Print *changes* as diffs, and return whether there is one."""
    write_stdout("".join(change.diff() for change in changes))
    _print_states(changes)
    return any(change.before != change.after for change in changes)


def _print_states(changes: list[file_changes.FileChange]) -> None:
    for change in changes:
        word = "unchanged" if change.before == change.after else "differs"
        click.echo(f'{word} "{escape(change.path)}"', err=True)


def _warn(note: str) -> None:
    click.echo(f"warning: {escape(note)}", err=True)


def _report(lines: list[str], engine_config: EngineConfig | None) -> None:
    """Print what was done to each file, and how to put that into effect."""
    for line in lines:
        click.echo(escape(line), err=True)
    if engine_config is None or all(line.startswith("unchanged") for line in lines):
        return
    if not engine_config.restart:
        click.echo("nothing to restart: the next container has it", err=True)
        return
    note = f" ({engine_config.note})" if engine_config.note else ""
    click.echo(f'to put it into effect, run "{engine_config.restart}"{note}', err=True)


def installed(program: str) -> str:
    """Return the path of the *program* that is installed beside this one."""
    # The command may have been called through a symlink in another directory.
    beside = os.path.join(os.path.dirname(os.path.realpath(sys.argv[0])), program)
    for path in (beside, os.path.join(sys.prefix, "bin", program)):
        if os.access(path, os.X_OK):
            return path
    return os.path.join("/usr/bin", program)


def _first_output(commands: list[list[str]]) -> str:
    """Return the output of the first of *commands* that succeeds; raise ConfigError."""
    errors = []
    for command in commands:
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=DUMP_TIMEOUT_S
            )
        except (OSError, ValueError) as error:
            errors.append(f"{command[0]}: {error}")
        except subprocess.CalledProcessError as error:
            errors.append(f"{' '.join(command)}: status {error.returncode}: {error.stderr}")
        except subprocess.TimeoutExpired:
            errors.append(f"{' '.join(command)}: no output in {DUMP_TIMEOUT_S} s")
        else:
            return process.stdout
    raise ConfigError(
        f"the engine failed to print its config: {'; '.join(errors)}",
        'use "--config-source file", or name the program with "--executable-path"',
    )
