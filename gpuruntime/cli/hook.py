# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime hook`: run a hook of CDI specs by hand; execs the hook program.

CDI specs name the hook program itself. It is not imported here: it must start without the
environment, which this command line reads.
"""

from __future__ import annotations

import os
import shutil
import sys

import click

from gpuruntime.errors import ConfigError
from gpuruntime.plan.gpu_edits import HOOK_NAME
from gpuruntime.system import hook_usage


class HookCommand(click.Command):
    """A hook, with options for help and completion only: the hook program parses them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep *args* unparsed, unless they request the help."""
        if args in (["--help"], ["-h"]):
            return super().parse_args(ctx, ["--help"])
        ctx.args = args
        return []

    def invoke(self, ctx: click.Context) -> None:
        """Become the hook program; raise ConfigError if it is not installed."""
        path = _program()
        outer = ctx.find_root().params
        switches = [f"--{name}" for name in ("debug", "quiet") if outer.get(name)]
        os.execv(path, [path, *switches, str(self.name), *ctx.args])


def _program() -> str:
    """Return the path of the hook program beside this program, or in PATH."""
    directories = [
        os.path.dirname(path)
        for path in (os.path.realpath(sys.argv[0]), os.path.abspath(sys.executable))
    ]
    path = shutil.which(HOOK_NAME, path=os.pathsep.join(directories)) or shutil.which(HOOK_NAME)
    if path is None:
        raise ConfigError(
            f'"{HOOK_NAME}" is neither beside this program nor in PATH', "install gpuruntime again"
        )
    return os.path.abspath(path)


def _option(name: str, value: str, text: str) -> click.Option:
    return click.Option(
        [name], is_flag=not value, metavar=value or None, multiple=bool(value), help=text
    )


@click.group(subcommand_metavar="HOOK [ARGS]...")
def hook() -> None:
    """Run a hook of CDI specs, with the OCI state on standard input.

    CDI specs call "gpu-cdi-hook" instead, which does not read the environment. An unknown hook is
    an error here; for "gpu-cdi-hook", it is a warning.
    """


for _name, (_purpose, _options) in hook_usage.HOOKS.items():
    _parameters = [_option(*row) for row in (*_options, *hook_usage.COMMON) if row[0] != "--help"]
    hook.add_command(HookCommand(_name, params=list(_parameters), help=_purpose))
