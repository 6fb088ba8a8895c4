# SPDX-License-Identifier: Apache-2.0
"""Values that the shell completes, besides the options and choices that click completes itself.

A completion must be fast and silent: it reads files, but does not query the driver, and on any
error it has no values. Each function imports the modules that it needs when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Values = Callable[[], Iterable[str]]


def _engines() -> Iterable[str]:
    from gpuruntime.engines import config_paths  # noqa: PLC0415 (see above)

    return config_paths.names()


def _checks() -> Iterable[str]:
    from gpuruntime.cli.checks import check_table  # noqa: PLC0415

    return check_table.CHECKS


def _modes() -> Iterable[str]:
    from gpuruntime import config  # noqa: PLC0415

    return config.MODES


def _discovery_modes() -> Iterable[str]:
    from gpuruntime.cli import features, generator  # noqa: PLC0415

    return (*generator.PLATFORM_MODES, generator.MANAGEMENT, *features.MODES)


def _strategies() -> Iterable[str]:
    from gpuruntime.plan import devices  # noqa: PLC0415

    return devices.STRATEGIES


def _capabilities() -> Iterable[str]:
    from gpuruntime.request import capabilities  # noqa: PLC0415

    return (*capabilities.ALL, "all")


def _hooks() -> Iterable[str]:
    from gpuruntime.plan import gpu_edits  # noqa: PLC0415

    return gpu_edits.HOOKS


def _feature_flags() -> Iterable[str]:
    from gpuruntime.cli import generator  # noqa: PLC0415

    return generator.FEATURES


def _device_ids() -> Iterable[str]:
    """Return the ids of the saved inventory, or indices by the driver's directories."""
    from gpuruntime.cli import config_in_force  # noqa: PLC0415
    from gpuruntime.snapshots.inventory_snapshot import InventorySnapshot  # noqa: PLC0415

    saved = InventorySnapshot(config_in_force.driver_root(), _no_discovery).read()
    if saved is None:
        count = len(os.listdir("/proc/driver/nvidia/gpus"))
        return ("all", *map(str, range(count)))
    gpus = [item.gpu for item in saved.inventory.gpus]
    return ("all", *(str(gpu.index) for gpu in gpus), *(gpu.uuid for gpu in gpus))


def _no_discovery() -> object:
    raise AssertionError


def _qualified_names() -> Iterable[str]:
    from gpuruntime.cli import spec_dirs  # noqa: PLC0415

    return spec_dirs.load((), allow_untrusted=False).devices


def _settings() -> Iterable[str]:
    """Return each key with "=", and with each of its allowed values."""
    from gpuruntime.configfile import option_table  # noqa: PLC0415

    words = []
    for option in option_table.OPTIONS:
        choices = ("true", "false") if option.kind in ("bool", "optional") else option.choices
        words += [f"{option.key}={choice}" for choice in ("", *choices)]
    return dict.fromkeys(words)


# Command and option, or the metavar of an argument → its values.
VALUES: dict[tuple[str, str], Values] = {
    ("configure", "--runtime"): _engines,
    ("doctor", "--check"): _checks,
    ("explain", "--mode"): _modes,
    ("inject", "--device"): _qualified_names,
    ("set", "KEY[=VALUE]..."): _settings,
    ("set", "--set"): _settings,
    ("config", "--set"): _settings,
    **{
        (command, option): values
        for command in ("generate", "refresh")
        for option, values in (
            ("--mode", _discovery_modes),
            ("--device-id", _device_ids),
            ("--device-name-strategy", _strategies),
            ("--driver-capabilities", _capabilities),
            ("--disable-hook", _hooks),
            ("--enable-hook", _hooks),
            ("--feature-flag", _feature_flags),
        )
    },
    ("list", "--capability"): _capabilities,
    ("list", "--device"): _device_ids,
}


class CompletedString(click.types.StringParamType):
    """A string, or several with commas, that the shell completes by *values*."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the values for *incomplete*: they begin with the text behind its last comma."""
        del ctx, param
        front, comma, start = incomplete.rpartition(",")
        try:
            words = [word for word in self._values() if word.startswith(start)]
        except Exception:  # noqa: BLE001 (an error does not complete a word)
            return []
        return [CompletionItem(f"{front}{comma}{word}") for word in words]


def attach(command: click.Command) -> None:
    """Have the shell complete the options and arguments of *command* that VALUES lists."""
    for parameter in command.params:
        names = parameter.opts if isinstance(parameter, click.Option) else [parameter.metavar]
        for name in names:
            values = VALUES.get((str(command.name), str(name)))
            # Choices and paths are completed by their types.
            if values is not None and type(parameter.type) is click.types.StringParamType:
                parameter.type = CompletedString(values)
