# SPDX-License-Identifier: Apache-2.0
"""Which of several config files a node uses, by the value of its label: pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpuruntime.errors import ConfigError, escape

# Fallback strategies.
NAMED, SINGLE, EMPTY = "named", "single", "empty"
STRATEGIES = (NAMED, SINGLE, EMPTY)
DEFAULT_NAME = "default"
NODE_LABEL = "nvidia.com/device-plugin.config"
# What the strategy `empty` uses in place of a file.
NO_FILE = "/dev/null"


def choose(
    value: str | None, names: Sequence[str], default: str, strategies: Sequence[str]
) -> str:
    """Return the name of the config for the label's *value*, "" for an empty config.

    *names* are the configs that exist. Without a value *default* is used, without that the first
    of *strategies* that applies. Raises ConfigError if no config has the name, or none applies.
    """
    if value:
        return _existing(value, names, f'the label of the node names the config "{escape(value)}"')
    if default:
        return _existing(default, names, f'the default config is "{escape(default)}"')
    for strategy in strategies:
        if strategy == NAMED and DEFAULT_NAME in names:
            return DEFAULT_NAME
        if strategy == SINGLE and len(names) == 1:
            return names[0]
        if strategy == EMPTY:
            return ""
    raise ConfigError(
        f"no config is chosen: the node has no label, and no fallback strategy applies to "
        f"{_shown(names)}",
        "label the node, or name a default config",
    )


def _existing(name: str, names: Sequence[str], what: str) -> str:
    if name not in names:
        raise ConfigError(f"{what}, which does not exist", f"use one of: {_shown(names)}")
    return name


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names) or "no configs"
