# SPDX-License-Identifier: Apache-2.0
"""Edits on an OCI config where the corpus has no case of its own: order, sections, the lines."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cdi import edits


def applied(config: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return *config* after the edits *given*."""
    edits.apply(edits.merge([given]), config)  # type: ignore[typeddict-item]
    return config


def test_the_environment_keeps_its_order() -> None:
    """A replaced entry stays where it was, a new one comes last; of repeats the last is it."""
    config = {"process": {"env": ["A=1", "B=2", "A=3", "odd", "C=4"]}}
    assert applied(config, env=["C=5", "D=6", "A=7", "D=8"])["process"]["env"] == [
        *("A=1", "B=2", "A=7", "odd", "C=5", "D=8"),
    ]


def test_no_edits_make_no_sections() -> None:
    """A config that nothing was asked of stays byte for byte."""
    assert applied({"ociVersion": "1.0.2"}) == {"ociVersion": "1.0.2"}
    assert applied({}, additionalGids=[0]) == {}


@pytest.mark.parametrize("empty", [None, {}])
def test_a_null_section_is_made(empty: object) -> None:
    """Engines in Go write null for what they do not have."""
    node = {"path": "/dev/x", "type": "c", "major": 1, "minor": 3, "permissions": "rw"}
    config = copy.deepcopy({"linux": empty}) | copy.deepcopy({"process": empty})
    config = applied(config, deviceNodes=[node], env=["A=b"])
    assert config["process"] == {"env": ["A=b"]}
    assert config["linux"]["devices"] == [{k: node[k] for k in ("path", "type", "major", "minor")}]
    assert config["linux"]["resources"]["devices"] == [
        {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rw"}
    ]


def test_injecting_twice_equals_injecting_once_but_for_rules_and_hooks() -> None:
    """Nodes, mounts and environment have a place of their own each."""
    given: Any = {
        "env": ["A=b"],
        "deviceNodes": [{"path": "/dev/x", "type": "c", "major": 1, "minor": 3}],
        "mounts": [{"hostPath": "/a", "containerPath": "/b"}],
        "additionalGids": [7],
    }
    once = applied({}, **given)
    twice = applied(applied({}, **given), **given)
    assert len(twice["linux"]["resources"].pop("devices")) == 2
    assert len(once["linux"]["resources"].pop("devices")) == 1
    assert twice == once


def test_every_edit_describes_itself_in_one_line() -> None:
    """The debug log is the list of what is done."""
    given: Any = {
        "env": ["A=b"],
        "deviceNodes": [{"path": "/dev/x", "type": "c", "major": 1, "minor": 3}],
        "netDevices": [{"hostInterfaceName": "eth0", "name": "n"}],
        "mounts": [{"hostPath": "/a", "containerPath": "/b"}],
        "hooks": [{"hookName": "createContainer", "path": "/h"}],
        "additionalGids": [7],
    }
    assert edits.describe(given) == [
        "env A=b",
        "device /dev/x c 1:3 rwm",
        "net device eth0",
        "mount /a on /b",
        "hook createContainer /h",
        "group 7",
    ]
    assert edits.describe({}) == []
