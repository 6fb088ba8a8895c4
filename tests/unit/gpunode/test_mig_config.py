# SPDX-License-Identifier: Apache-2.0
"""The file of MIG configs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from unit.gpunode.nodes import T4, gpu

from gpunode import mig_config
from gpunode.layouts import RequestedInstance
from gpunode.mig_profiles import parse
from gpunode.model import NodeGpu
from gpuruntime.errors import ArgumentError, ConfigError

FILE = """\
version: v1
mig-configs:
  all-disabled:
  - {devices: all, mig-enabled: false}
  all-1g.5gb:
  - devices: all
    mig-enabled: true
    mig-devices: {"1g.5gb": 7}
  mixed:
  - device-filter: ["0x20B010DE", "0x20B510DE:0x153310DE"]
    devices: [0, 1]
    mig-enabled: true
    mig-devices:
      "1g.5gb": 2
      "1c.3g.20gb": 3
"""


def read(tmp_path: Path, text: str = FILE) -> dict[str, mig_config.MigConfig]:
    """Return the configs of a file with *text*."""
    (tmp_path / "c.yaml").write_text(text)
    return mig_config.read(str(tmp_path / "c.yaml"))


def known(index: int, device: str = "0x20B010DE", subsystem: str = "") -> NodeGpu:
    """Return a GPU with PCI identifiers."""
    return dataclasses.replace(gpu(index), device_id=device, subsystem_id=subsystem)


def test_a_file(tmp_path: Path) -> None:
    """Each config has its entries, with their lines."""
    configs = read(tmp_path)
    assert list(configs) == ["all-disabled", "all-1g.5gb", "mixed"]
    (entry,) = configs["mixed"].entries
    assert entry.devices == (0, 1)
    assert entry.mig_devices == {parse("1g.5gb"): 2, parse("1c.3g.20gb"): 3}
    assert entry.line == 10


def test_what_is_written_reads_the_same(tmp_path: Path) -> None:
    """Export is the input of apply."""
    configs = read(tmp_path)
    again = read(tmp_path, mig_config.written(configs))
    assert [
        dataclasses.replace(one, line=0) for config in again.values() for one in config.entries
    ] == [
        dataclasses.replace(one, line=0) for config in configs.values() for one in config.entries
    ]


def entry(text: str) -> str:
    """Return a file whose only entry has *text*."""
    return f"version: v1\nmig-configs:\n  c:\n  - {text}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: v2\n", 'line 1: unknown version: "v2"'),
        ("version: v1\n", 'has no "mig-configs"'),
        ("version: v1\nmig-configs: {}\n", "line 2"),
        ("version: v1\nmig-configs: {c: []}\n", "line 2"),
        (entry("{devices: all, mig-enabled: false, x: 1}"), 'line 4: unknown key "'),
        (entry("{mig-enabled: false}"), 'has no "devices"'),
        (entry("{devices: all}"), 'has no "mig-enabled"'),
        (entry("{devices: all, mig-enabled: true}"), 'no "mig-devices"'),
        (entry('{devices: all, mig-enabled: false, mig-devices: {"1g.5gb": 1}}'), "false"),
        (entry('{devices: all, mig-enabled: true, mig-devices: {"1g.5gb": 0}}'), "is 0"),
        (entry('{devices: all, mig-enabled: true, mig-devices: {"1g.5gb": -1}}'), "-1"),
        (entry('{devices: all, mig-enabled: true, mig-devices: {"1g.5g": 1}}'), '"1g.5g" is not'),
        (entry('{devices: all, mig-enabled: true, mig-devices: {" 1g.5gb": 1}}'), "is not"),
        # Complaint 24: a bare number.
        (entry("{devices: 7, mig-enabled: false}"), "a list of GPU indices such as [7]"),
        (entry("{devices: [-1], mig-enabled: false}"), "-1"),
        (entry("{devices: all, mig-enabled: 1}"), "true or false"),
        (entry('{devices: all, mig-enabled: false, device-filter: "20B0"}'), "20B0"),
    ],
)
def test_errors_name_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    """Nothing of a file with an error is used."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert message in error.value.message
    assert error.value.hint


def test_a_config_is_selected(tmp_path: Path) -> None:
    """By name; without one the file must have one only."""
    configs = read(tmp_path)
    assert mig_config.select(configs, "mixed").name == "mixed"
    for name in (None, "mixd"):
        with pytest.raises(ArgumentError) as error:
            mig_config.select(configs, name)
        assert "all-1g.5gb, all-disabled, mixed" in (error.value.hint or "")
    only = read(tmp_path, entry("{devices: all, mig-enabled: false}"))
    assert mig_config.select(only, None).name == "c"


@pytest.mark.parametrize(
    ("text", "gpus", "covered"),
    [
        ("devices: all, mig-enabled: false", [known(0), known(1)], [0, 1]),
        ("devices: [1], mig-enabled: false", [known(0), known(1)], [1]),
        ("devices: all, mig-enabled: false", [known(0), gpu(1, T4)], [0]),
        # A GPU without MIG is as requested if MIG is to be off.
        ("devices: [0], mig-enabled: false", [gpu(0, T4)], []),
        ("devices: all, mig-enabled: false, device-filter: '0x20b010de'", [known(0)], [0]),
        (
            "devices: all, mig-enabled: false, device-filter: '0x20B510DE:0x153310DE'",
            [known(0, "0x20B510DE", "0x153310DE"), known(1, "0x20B510DE", "0x000010DE")],
            [0],
        ),
    ],
)
def test_an_entry_covers_gpus(
    tmp_path: Path, text: str, gpus: list[NodeGpu], covered: list[int]
) -> None:
    """By index and by PCI identifiers."""
    config = read(tmp_path, entry(f"{{{text}}}"))["c"]
    assert sorted(mig_config.requested_states(config, gpus)) == covered


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: [0, 7], mig-enabled: false", "GPU 7 is not on this node"),
        ("devices: [1], mig-enabled: true, mig-devices: {}", "GPU 1 (Tesla T4) does not support"),
    ],
)
def test_an_index_must_be_right(tmp_path: Path, text: str, message: str) -> None:
    """The error names the config and the line of the entry."""
    config = read(tmp_path, entry(f"{{{text}}}"))["c"]
    with pytest.raises(ConfigError, match='line 4: MIG config "c": ') as error:
        mig_config.requested_states(config, [gpu(0), gpu(1, T4)])
    assert message in error.value.message


@pytest.mark.parametrize(
    ("requested", "instances"),
    [
        ({"1g.5gb": 2}, [("1g.5gb", (1,))] * 2),
        ({"1c.3g.20gb": 3}, [("3g.20gb", (1, 1, 1))]),
        (
            {"1c.3g.20gb": 2, "2c.3g.20gb": 1, "3g.20gb": 1},
            [("3g.20gb", (3,)), ("3g.20gb", (2, 1)), ("3g.20gb", (1,))],
        ),
        # Complaint 24: 79 or 80 GB.
        ({"7g.79gb": 1}, [("7g.80gb", (7,))]),
        ({"9g.90gb": 1}, [("9g.90gb", (9,))]),
    ],
)
def test_mig_devices_become_gpu_instances(
    requested: dict[str, int], instances: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Small compute instances share a GPU instance."""
    available = ("1g.5gb", "1g.5gb+me", "3g.20gb", "7g.80gb")
    found = mig_config.requested_instances({parse(n): c for n, c in requested.items()}, available)
    assert found == [RequestedInstance(*one) for one in instances]
