# SPDX-License-Identifier: Apache-2.0
"""The name that the runtime is called by says the mode, for the two names that say one."""

from __future__ import annotations

import pytest

from gpuruntime.config import MODES, Config
from gpuruntime.shim import main

MODE = "nvidia-container-runtime.mode"


@pytest.mark.parametrize("configured", [*MODES, "csv"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("nvidia-container-runtime.cdi", "cdi"),
        ("/usr/bin/nvidia-container-runtime.cdi", "cdi"),
        ("nvidia-container-runtime.legacy", "legacy"),
        ("./nvidia-container-runtime.legacy", "legacy"),
        ("nvidia-container-runtime", None),
        ("gpu-container-runtime", None),
        ("/x/nvidia-container-runtime.cdi/gpu-container-runtime", None),
        ("nvidia-container-runtime.csv", None),
        ("gpu-container-runtime.cdi", None),
        ("", None),
    ],
)
def test_the_name_says_the_mode(name: str, mode: str | None, configured: str) -> None:
    """Whatever the config says: engines name one program a mode, and share the config."""
    config = Config({MODE: configured, "swarm-resource": "RES"}, "/etc/config.toml")
    found = main.as_called(config, name)
    assert found.mode == found[MODE] == (mode or configured)
    # All else is the operator's.
    assert (found.swarm, found.path) == (("RES",), "/etc/config.toml")
    assert {**found.values, MODE: ""} == {**config.values, MODE: ""}
