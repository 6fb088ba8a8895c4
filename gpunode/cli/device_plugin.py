# SPDX-License-Identifier: Apache-2.0
"""`gpu-node device-plugin`: the options of the incumbent's device plugin, and the service."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpunode import service_log
from gpunode.cli import options
from gpunode.config import settings
from gpunode.config.effective import Config, OptionText
from gpunode.config.settings import Setting
from gpuruntime.cli.lazy import variables_of
from gpuruntime.errors import ArgumentError

if TYPE_CHECKING:
    from gpunode.services.device_plugin import DevicePlugin
    from gpunode.services.observation import Watch
    from gpunode.services.surroundings import Surroundings

_CONFIG_FILE_VARIABLE = "CONFIG_FILE"
# Of each service that reads the config file.
service_options = options.together(
    click.option(
        "--config-file",
        default="",
        envvar=_CONFIG_FILE_VARIABLE,
        metavar="FILE",
        help="Config file, version v1; SIGHUP reads it again.",
    ),
    options.healthz,
    options.log_format,
)


def _shown(value: Any) -> str:  # noqa: ANN401 (of any kind)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "10m" if value == settings.BY_NAME["health_quiet_time"].default else str(value)


def _option(setting: Setting) -> Callable[..., Any]:
    """Return the click option of *setting*; its text is parsed with the config file."""
    is_described = setting.default in (None, "", ())
    note = "" if is_described else f"  [default: {_shown(setting.default)}]"
    attributes: dict[str, Any] = {}
    if setting.kind == settings.BOOLEAN:
        # As with the incumbent, "--option" is the same as "--option=true".
        attributes = {"is_flag": False, "flag_value": "true"}
    return click.option(
        f"--{setting.option}",
        setting.name,
        envvar=list(setting.variables),
        multiple=setting.kind in (settings.WORDS, settings.INTEGERS),
        metavar=setting.kind.upper(),
        help=f"{setting.help}{note}",
        type=str,
        **attributes,
    )


setting_options = options.together(*map(_option, settings.SETTINGS))


def option_texts(
    ctx: click.Context, values: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, OptionText]:
    """Return the options that the command line or the environment set, with what set them."""
    texts = {}
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    for name, value in values.items():
        setting = settings.BY_NAME[name]
        source = ctx.get_parameter_source(name)
        text = ",".join(value) if isinstance(value, tuple) else value
        if source is ParameterSource.COMMANDLINE:
            texts[name] = OptionText(text, f"--{setting.option}")
        elif source is ParameterSource.ENVIRONMENT:
            variables = variables_of(parameters[name])
            variable = next(name for name in variables if environment.get(name))
            # click splits the values of several at blanks.
            texts[name] = OptionText(environment[variable], variable)
        elif setting.may_be_empty and environment.get(setting.variables[0]) == "":
            texts[name] = OptionText("", setting.variables[0])
    return texts


def load_config(path: str, options: Mapping[str, OptionText]) -> Config:
    """Return the config of the file *path*, "" for none, and *options*; raise ConfigError."""
    from gpunode.config.effective import effective  # noqa: PLC0415
    from gpunode.config.file import ConfigFile  # noqa: PLC0415

    if not path:
        return effective(options, ConfigFile())
    from gpunode.config import file as files  # noqa: PLC0415

    return effective(options, files.read(path))


def config_loader(ctx: click.Context, path: Callable[[], str] | None) -> Callable[[], Config]:
    """Return what reads the config: the options in *ctx*, and a file.

    *path* returns the path of the file, None for that of the options.
    """
    values = {name: value for name, value in ctx.params.items() if name in settings.BY_NAME}
    texts = option_texts(ctx, values, os.environ)
    path_of_file = path or (lambda: str(ctx.params["config_file"]))
    return lambda: load_config(path_of_file(), texts)


@click.command()
@setting_options
@service_options
@click.pass_context
def device_plugin(
    ctx: click.Context,
    /,
    *,
    log_format: str,
    **_: Any,  # noqa: ANN401 (by the setting)
) -> None:
    """Offer the GPUs of this node to the kubelet.

    A device plugin with the options, variables and config file of the incumbent's. An option
    takes precedence over its variable, and that over the config file. SIGHUP reads the config
    file again; SIGTERM stops, and removes the sockets.

    DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS select the XIDs that make a GPU unhealthy.
    """
    service_log.start(log_format)
    import asyncio  # noqa: PLC0415 (--help and errors do not need the service)

    from gpunode.services import standalone  # noqa: PLC0415
    from gpunode.services.observation import watcher  # noqa: PLC0415

    async def serve() -> None:
        await standalone.run(service(ctx, watcher), ctx.params["healthz"])

    asyncio.run(serve())


def agent_service(ctx: click.Context, surroundings: Surroundings) -> DevicePlugin:
    """Return the service of the options in *ctx* for the agent; raise as `service` does.

    The config file must not have another driver root than the agent's watcher.
    """
    plugin = service(ctx, surroundings.watch, surroundings.config_path)
    root = plugin.config.nvidia_driver_root
    if root != surroundings.driver_root:
        raise ArgumentError(
            f'the device plugin has the driver root "{root}", and the agent '
            f'"{surroundings.driver_root}"',
            'set "driver-root" in the config of the agent',
        )
    return plugin


def service(
    ctx: click.Context, watch: Watch, config_path: Callable[[], str] | None = None
) -> DevicePlugin:
    """Return the service of the options in *ctx*; raise ArgumentError or ConfigError.

    *config_path* returns the path of the config file, None for that of the options.
    """
    from gpunode.services.device_plugin import DevicePlugin  # noqa: PLC0415

    load = config_loader(ctx, config_path)
    return DevicePlugin(load, watch=watch)
