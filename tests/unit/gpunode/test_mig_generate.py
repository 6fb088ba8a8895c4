# SPDX-License-Identifier: Apache-2.0
"""The generated file of MIG configs."""

from __future__ import annotations

from unit.gpunode.test_layouts import A30, A100

from gpunode import mig_config, mig_generate
from gpunode.mig_generate import GpuKind


def test_one_kind_of_gpu() -> None:
    """As many devices of each profile as fit, and a balanced config."""
    configs = mig_generate.configs([GpuKind("0x20B010DE", A100)])
    document = mig_config.as_document(configs)
    counts = {
        name: config.entries[0].mig_devices
        for name, config in configs.items()
        if config.entries[0].mig_devices
    }
    assert {name: {str(p): n for p, n in each.items()} for name, each in counts.items()} == {
        "all-1g.5gb": {"1g.5gb": 7},
        "all-1g.5gb.me": {"1g.5gb+me": 1},
        "all-1g.10gb": {"1g.10gb": 4},
        "all-2g.10gb": {"2g.10gb": 3},
        "all-3g.20gb": {"3g.20gb": 2},
        "all-4g.20gb": {"4g.20gb": 1},
        "all-7g.40gb": {"7g.40gb": 1},
        "all-balanced": {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1},
    }
    assert document["mig-configs"]["all-disabled"] == [{"devices": "all", "mig-enabled": False}]  # type: ignore[index]


def test_two_kinds_have_filters() -> None:
    """Where their devices differ."""
    configs = mig_generate.configs([GpuKind("0x20B010DE", A100), GpuKind("0x20B710DE", A30)])
    assert [entry.filters for entry in configs["all-1g.5gb"].entries] == [("0x20b010de",)]
    balanced = configs["all-balanced"].entries
    assert [entry.filters for entry in balanced] == [("0x20b010de",), ("0x20b710de",)]
    assert sum(balanced[1].mig_devices.values()) == 3
    assert not configs["all-disabled"].entries[0].filters


def test_a_node_without_mig() -> None:
    """Only the two configs that need no profile."""
    assert list(mig_generate.configs([])) == ["all-disabled", "all-enabled"]
