# SPDX-License-Identifier: Apache-2.0
"""`gpu-node mig`: the commands of nvidia-mig-parted."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from gpunode.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpunode.mig.change import TargetsOf
    from gpunode.mig.host import Host
    from gpunode.mig.states import Target
    from gpunode.mig_config import MigConfig

_FAILURE = "Assertion failure: selected configuration not currently applied"


@click.group()
@options.mig_host
@click.pass_context
def mig(context: click.Context, driver_root: str, state_directory: str, timeout: float) -> None:
    """Partition GPUs by MIG, as a file of configs describes."""
    from gpunode.mig.host import Host

    context.obj = Host(driver_root, state_directory, timeout)


_config_options = options.together(
    click.option(
        *("--config-file", "-f"),
        required=True,
        envvar="MIG_PARTED_CONFIG_FILE",
        metavar="FILE",
        help="File of MIG configs.",
    ),
    click.option(
        *("--selected-config", "-c"),
        default=None,
        envvar="MIG_PARTED_SELECTED_CONFIG",
        metavar="NAME",
        help="Config to use; it can be left out if the file has only one.",
    ),
    click.option(
        *("--mode-only", "-m", "--mode-change-only"),
        is_flag=True,
        envvar="MIG_PARTED_MODE_CHANGE_ONLY",
        help="Use the MIG modes of the config only.",
    ),
)
_change_options = options.together(
    click.option(
        *("--hooks-file", "-k"),
        default="",
        envvar="MIG_PARTED_HOOKS_FILE",
        metavar="FILE",
        help="File of programs to run before and after changes.",
    ),
    click.option(
        *("--skip-reset", "-s"),
        is_flag=True,
        envvar="MIG_PARTED_SKIP_RESET",
        help="Do not reset GPUs whose new mode needs it.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the steps and change nothing."),
)
_output_option = click.option(
    *("--output-format", "-o"),
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    envvar="MIG_PARTED_OUTPUT_FORMAT",
    help="Format of the output.  [default: yaml]",
)


@mig.command()
@_config_options
@_change_options
@click.pass_obj
def apply(
    host: Host,
    config_file: str,
    selected_config: str | None,
    hooks_file: str,
    *,
    mode_only: bool,
    skip_reset: bool,
    dry_run: bool,
) -> None:
    """Change the GPUs to a config of the file: all of them, or none."""
    from gpunode.mig import states

    config = _config(config_file, selected_config)
    variables = {
        "MIG_PARTED_CONFIG_FILE": config_file,
        "MIG_PARTED_SELECTED_CONFIG": config.name,
        "MIG_PARTED_HOOKS_FILE": hooks_file,
        "MIG_PARTED_SKIP_RESET": "true" if skip_reset else "",
        "MIG_PARTED_MODE_CHANGE_ONLY": "true" if mode_only else "",
    }
    _apply(
        host,
        lambda gpus: states.targets_of(config, gpus, mode_only=mode_only),
        hooks_file,
        {name: value for name, value in variables.items() if value},
        skip_reset=skip_reset,
        dry_run=dry_run,
    )


@mig.command(name="assert")
@_config_options
@click.pass_obj
def assert_(host: Host, config_file: str, selected_config: str | None, *, mode_only: bool) -> None:
    """Exit with 1 unless the GPUs have a config of the file.

    GPUs that the config does not cover may have any state: they are listed on standard error.
    """
    from gpunode.mig import states

    gpus = host.state()
    targets = states.targets_of(_config(config_file, selected_config), gpus, mode_only=mode_only)
    present = states.gpu_states(gpus)
    uncovered = sorted(set(present) - set(targets))
    if uncovered:
        click.echo(
            f"GPU {', '.join(map(str, uncovered))}: not covered by the config, any state is right",
            err=True,
        )
    if not all(target.is_met(present[index]) for index, target in targets.items()):
        click.echo(_FAILURE, err=True)
        sys.exit(1)
    click.echo("Selected MIG configuration currently applied")


@mig.command()
@_output_option
@click.pass_obj
def export(host: Host, output_format: str) -> None:
    """Print the present state as a file of configs, with the name "current"."""
    from gpunode.mig import states

    config = states.exported(states.gpu_states(host.state()), "current")
    _print({"current": config}, output_format)


@mig.command(name="generate-config")
@_output_option
@click.pass_obj
def generate_config(host: Host, output_format: str) -> None:
    """Print a file with the usual configs for the GPUs of this node."""
    from gpunode import mig_generate
    from gpunode.mig import states

    kinds = {
        state.device_id: mig_generate.GpuKind(
            state.device_id, states.without_placements(state.profiles)
        )
        for state in states.gpu_states(host.state()).values()
    }
    _print(mig_generate.configs(list(kinds.values())), output_format)


@mig.command()
@click.option(*("--checkpoint-file", "-f"), required=True, metavar="FILE", help="File to write.")
@click.pass_obj
def checkpoint(host: Host, checkpoint_file: str) -> None:
    """Write the present state to a file, for "restore"."""
    from gpunode.mig import journal, states

    gpus = {state.uuid: state.target.plain() for state in states.gpu_states(host.state()).values()}
    journal.write(checkpoint_file, {"version": "v1", "gpus": gpus})


@mig.command()
@click.option(*("--checkpoint-file", "-f"), required=True, metavar="FILE", help="File to read.")
@_change_options
@click.pass_obj
def restore(
    host: Host, checkpoint_file: str, hooks_file: str, *, skip_reset: bool, dry_run: bool
) -> None:
    """Change the GPUs to the state that "checkpoint" has written."""
    from gpunode.mig import journal, states
    from gpuruntime.errors import ConfigError

    document = journal.read(checkpoint_file)
    try:
        by_uuid = {uuid: states.from_plain(values) for uuid, values in document["gpus"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f'"{checkpoint_file}" is not a checkpoint', 'write one by "gpu-node mig checkpoint"'
        ) from error

    def targets(gpus: Sequence[Mapping[str, Any]]) -> dict[int, Target]:
        indices = {one.uuid: index for index, one in states.gpu_states(gpus).items()}
        missing = sorted(set(by_uuid) - set(indices))
        if missing:
            raise ConfigError(
                f'"{checkpoint_file}" has GPUs that are not on this node: {", ".join(missing)}',
                "use the checkpoint of this node",
            )
        return {indices[uuid]: target for uuid, target in by_uuid.items()}

    _apply(host, targets, hooks_file, {}, skip_reset=skip_reset, dry_run=dry_run)


@mig.command()
@click.pass_obj
def status(host: Host) -> None:
    """Print each GPU's mode and instances, and the processes that use them."""
    from gpunode.mig import states

    gpus = host.state()
    present = states.gpu_states(gpus)
    for gpu in gpus:
        state = present.get(gpu["index"])
        if state is None:
            click.echo(f"GPU {gpu['index']}: {gpu.get('error', 'no MIG')}")
            continue
        mode = "enabled" if state.mode else "disabled"
        if state.pending != state.mode:
            mode += f", {'enabled' if state.pending else 'disabled'} after a reset"
        click.echo(f"GPU {state.index} ({state.uuid}): MIG {mode}")
        for one in sorted(state.instances, key=lambda each: each.start):
            slices = ", ".join(str(each.slices) for each in one.compute_instances) or "none"
            holders = f"; in use by {', '.join(one.holders)}" if one.holders else ""
            click.echo(
                f"  {one.profile} at slice {one.start}: compute instances of slices: "
                f"{slices}{holders}"
            )
    if os.path.exists(f"{host.state_directory}/journal.json"):
        click.echo("a change was cut off: the next apply restores the old layout first")


def _apply(
    host: Host,
    targets_of: TargetsOf,
    hooks_file: str,
    variables: Mapping[str, str],
    *,
    skip_reset: bool,
    dry_run: bool,
) -> None:
    from gpunode.mig import change, engine, host_state, journal, states
    from gpunode.mig.commands import CommandError, HookFile

    if dry_run:
        gpus = host.state()
        targets, present = targets_of(gpus), states.gpu_states(gpus)
        engine.check(present, targets)
        for line in engine.described(present, targets):
            click.echo(line)
        return
    hooks = HookFile(hooks_file, variables)
    with journal.lock(host.state_directory):
        is_changed = change.apply(host, targets_of, hooks, _warn, skip_reset=skip_reset)
        if is_changed:
            try:
                host_state.renew(host.driver_root)
            except CommandError as error:
                _warn(error.lines())
    click.echo(f"MIG configuration {'' if is_changed else 'is already '}applied")


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _config(path: str, name: str | None) -> MigConfig:
    from gpunode import mig_config

    return mig_config.select(mig_config.read(path), name)


def _print(configs: Mapping[str, MigConfig], output_format: str) -> None:
    from gpunode import mig_config

    if output_format == "json":
        click.echo(json.dumps(mig_config.as_document(configs), indent=2))
    else:
        click.echo(mig_config.written(configs), nl=False)
