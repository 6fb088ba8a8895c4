# SPDX-License-Identifier: Apache-2.0
"""The services that the agent can run: a table, and their options as those of their commands.

The module of each has `agent_service`, which returns the service for the options of its command.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunode.cli.main import COMMANDS
from gpunode.config.settings import AUTO

if TYPE_CHECKING:
    from gpunode.config.file import ConfigFile
    from gpunode.services.service_group import Service
    from gpunode.services.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Row:
    """A service: whether it *is_root*, else it is the user nobody, and its other defaults."""

    is_root: bool
    defaults: tuple[tuple[str, str], ...] = ()
    # Whether it has the option --nvidia-driver-root.
    has_root: bool = True
    # Whether its option --config-file names another file than that of the other services.
    has_own_file: bool = False


DEVICE_PLUGIN, EXPORTER, FEATURE_DISCOVERY, MPS_DAEMON = (
    *("device-plugin", "exporter", "feature-discovery", "mps-daemon"),
)
MIG_MANAGER = "mig-manager"
SERVICES: dict[str, Row] = {
    DEVICE_PLUGIN: Row(is_root=True, defaults=(("device-list-strategy", AUTO),)),
    MPS_DAEMON: Row(is_root=True),
    FEATURE_DISCOVERY: Row(is_root=False),
    EXPORTER: Row(is_root=False, has_root=False),
    MIG_MANAGER: Row(is_root=True, has_own_file=True),
}
_SCHEMA = str(Path(__file__).parent.parent / "config" / "agent_schema.json")
# Options that the agent has for all of its services.
_OF_AGENT = ("healthz", "log-format", "once", "oneshot", "nvidia-driver-root")
_CONFIG_FILE = "config-file"


def read(path: str) -> ConfigFile:
    """Return the config file of the agent; raise ConfigError."""
    from gpunode.config import file as files  # noqa: PLC0415

    return files.read(path, _SCHEMA)


def arguments(file: ConfigFile, name: str) -> list[str]:
    """Return the arguments of the command *name* for the agent's *file*; raise ConfigError."""
    place = ("services", name)
    options: dict[str, Any] = file.get(place) or {}
    for option in options:
        is_shared = option == _CONFIG_FILE and not SERVICES[name].has_own_file
        if is_shared or option in _OF_AGENT:
            problem = f'"services.{name}.{option}" is not a setting of one service'
            raise file.error((*place, option), problem, "remove it: the agent has it for all")
    texts = {**dict(SERVICES[name].defaults), **options}
    root = file.get(("driver-root",))
    if root and SERVICES[name].has_root:
        texts["nvidia-driver-root"] = root
    flags = _flags(name)
    # A flag has no value.
    result = [f"--{option}" for option in flags if texts.get(option) is True]
    result += [
        f"--{option}={_text(value)}"
        for option, value in texts.items()
        if option not in flags or not isinstance(value, bool)
    ]
    try:
        context(name, result)
    except click.UsageError as error:
        problem = f'cannot use "services.{name}": {error.format_message()}'
        raise file.error(place, problem, f'"gpu-node {name} --help" has the options') from error
    return result


def context(name: str, texts: Sequence[str]) -> click.Context:
    """Return the options of the command *name* with the arguments *texts*."""
    return _command(name).make_context(name, list(texts))


def _command(name: str) -> click.Command:
    module, attribute, _ = COMMANDS[name]
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


def _flags(name: str) -> set[str]:
    """Return the options of the command *name* that take no value, without dashes."""
    return {
        text.removeprefix("--")
        for parameter in _command(name).params
        if isinstance(parameter, click.Option) and parameter.is_flag
        for text in parameter.opts
    }


def maker(name: str, ctx: click.Context, surroundings: Surroundings) -> Callable[[], Service]:
    """Return what makes the service *name* of the options in *ctx*."""
    module = importlib.import_module(COMMANDS[name][0])

    def make() -> Service:
        service: Service = module.agent_service(ctx, surroundings)
        return service

    return make


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
