# SPDX-License-Identifier: Apache-2.0
"""Which of several configs a node uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.config import named
from gpunode.services.config_choice import ConfigChoice, NamedConfigs
from gpuruntime.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "names", "default", "strategies", "expected"),
    [
        ("b", ["a", "b"], "a", (), "b"),
        (None, ["a", "b"], "a", (), "a"),
        ("", ["a", "b"], "a", (), "a"),
        (None, ["a", "default"], "", ("named", "single"), "default"),
        (None, ["a"], "", ("named", "single"), "a"),
        (None, ["a", "b"], "", ("named", "single", "empty"), ""),
        (None, [], "", ("empty",), ""),
    ],
)
def test_the_name(
    value: str | None, names: list[str], default: str, strategies: tuple[str, ...], expected: str
) -> None:
    """The label comes before the default, and that before the fallback strategies."""
    assert named.choose(value, names, default, strategies) == expected


@pytest.mark.parametrize(
    ("value", "default", "message"),
    [
        ("x", "a", 'the label of the node names the config "x", which does not exist'),
        ("../a", "", 'the config "../a", which does not exist'),
        (None, "x", 'the default config is "x", which does not exist'),
        (None, "", "no fallback strategy applies to a, b"),
    ],
)
def test_a_name_that_is_wrong(value: str | None, default: str, message: str) -> None:
    """A path is not a name."""
    with pytest.raises(ConfigError, match=message):
        named.choose(value, ["a", "b"], default, ("named", "single"))


def test_a_mounted_config_map_is_a_directory_of_configs(tmp_path: Path) -> None:
    """Its files are symlinks into a hidden directory; a wrong label keeps what is in force."""
    (tmp_path / "..data").mkdir()
    for name in ("a", "default"):
        (tmp_path / "..data" / name).write_text("")
        (tmp_path / name).symlink_to(f"..data/{name}")
    choice = ConfigChoice("", NamedConfigs(str(tmp_path)))
    paths: list[str] = []
    choice.on_change = lambda: paths.append(choice.path)
    for value in (None, "a", "a", "b", None):
        choice.take(value)
        assert bool(choice.problem) == (value == "b")
    assert paths == [f"{tmp_path}/{name}" for name in ("default", "a", "default")]
