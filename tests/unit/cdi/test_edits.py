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


BOUND: dict[str, Any] = {
    "path": "/dev/x",
    "hostPath": "/dev/y",
    "type": "c",
    "major": 195,
    "minor": 3,
    "fileMode": 0o666,
    "permissions": "rw",
    "bind": True,
}
BIND = {
    "destination": "/dev/x",
    "source": "/dev/y",
    "options": ["rbind", "rprivate", "nosuid", "noexec"],
}
RULE = {"allow": True, "type": "c", "major": 195, "minor": 3, "access": "rw"}


def test_a_node_to_bind_is_a_mount_and_a_rule() -> None:
    """And no device; also in a user namespace without idmap, which devtmpfs refuses."""
    config = applied({"linux": {"namespaces": [{"type": "user"}]}}, deviceNodes=[BOUND])
    assert config["mounts"] == [BIND]
    assert config["linux"]["devices"] == []
    assert config["linux"]["resources"] == {"devices": [RULE]}


def test_a_node_to_bind_takes_the_devices_of_its_path_away() -> None:
    """However the path is written: runc would put them on top of the mount."""
    others = [{"path": "/dev/xx", "type": "c"}, {"type": "c"}, {"path": "/dev/x/y"}]
    config = {
        "linux": {
            "devices": [
                {"path": "/dev/x", "type": "c", "major": 195, "minor": 0},
                others[0],
                {"path": "/dev//x"},
                others[1],
                {"path": "/dev/pts/../x"},
                {"path": "/dev/x"},
                others[2],
            ]
        }
    }
    assert applied(config, deviceNodes=[BOUND])["linux"]["devices"] == others


def test_a_node_to_bind_replaces_and_sorts_as_mounts_do() -> None:
    """The mount on /dev comes first, and one of the same destination goes."""
    deep = {"destination": "/dev/a/b", "source": "d"}
    config: dict[str, Any] = {
        "mounts": [deep, {"destination": "/dev/x", "source": "old"}, {"destination": "/dev"}]
    }
    mounts = [{"hostPath": "/m", "containerPath": "/lib/m", "options": ["bind"]}]
    config["linux"] = {"namespaces": [{"type": "user"}]}
    result = applied(config, deviceNodes=[BOUND], mounts=mounts)
    assert result["mounts"] == [
        {"destination": "/dev"},
        BIND,
        {"destination": "/lib/m", "source": "/m", "options": ["bind", "idmap"]},
        deep,
    ]
    again = applied(copy.deepcopy(result), deviceNodes=[BOUND], mounts=mounts)
    assert again["mounts"] == result["mounts"]


def test_nodes_of_both_sorts_keep_their_order() -> None:
    """Rules come in the order of the nodes, devices as well."""
    plain = {"path": "/dev/z", "type": "c", "major": 195, "minor": 255, "permissions": "rw"}
    config = applied({}, deviceNodes=[BOUND, plain, {**BOUND, "path": "/dev/b", "minor": 4}])
    minors = [rule["minor"] for rule in config["linux"]["resources"]["devices"]]
    assert minors == [3, 255, 4]
    assert [device["path"] for device in config["linux"]["devices"]] == ["/dev/z"]
    assert [mount["destination"] for mount in config["mounts"]] == ["/dev/x", "/dev/b"]


def test_a_node_to_bind_says_so() -> None:
    """Who looks for it in linux.devices finds it in the log."""
    given: Any = {"deviceNodes": [BOUND]}
    assert edits.describe(given) == ["device /dev/x bound from /dev/y c 195:3 rw"]


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize(
    "rules",
    [
        [{"allow": False, "access": "rwm"}],
        [{"allow": True, "access": "rwm"}],
        [
            {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rwm"},
            {"allow": False, "access": "rwm"},
            {"allow": False, "type": "c", "major": 195, "minor": 3, "access": "w"},
            {"allow": True, "type": "c", "major": 195, "access": "m"},
        ],
        [],
    ],
)
def test_req_07_rules_of_the_engine_stay_and_ours_come_after(
    rules: list[dict[str, Any]], *, bind: bool
) -> None:
    """REQ-08: in order and untouched; ours names one device, never to make it."""
    config = {"linux": {"resources": {"devices": copy.deepcopy(rules), "pids": {"limit": 7}}}}
    resources = applied(config, deviceNodes=[{**BOUND, "bind": bind}])["linux"]["resources"]
    assert resources == {"devices": [*rules, RULE], "pids": {"limit": 7}}


ALL = {"allow": True, "access": "rwm"}
NOTHING = {"allow": False, "access": "rwm"}
WIDE = {"allow": True, "type": "c", "access": "rw"}


@pytest.mark.parametrize(
    ("rules", "answer"),
    [
        ([], False),
        ([NOTHING], False),
        # B082: as docker's --privileged has it, and as others do.
        ([ALL], True),
        ([NOTHING, ALL], True),
        ([{**ALL, "type": "a", "major": None, "minor": None}], True),
        ([{**ALL, "type": "a", "major": -1, "minor": -1}], True),
        # The kernel takes "a" for all, whatever else is in the rule.
        ([{"allow": True, "type": "a", "major": 1, "minor": 3, "access": "r"}], True),
        ([{"allow": True}], True),
        ([WIDE], True),
        ([{**WIDE, "major": -1, "minor": -1}], True),
        ([{**WIDE, "access": "r"}, {**WIDE, "access": "wm"}], True),
        ([{**WIDE, "access": "r"}], False),
        # containerd's: to make any node, and to use none.
        ([NOTHING, {**WIDE, "access": "m"}, {**ALL, "type": "b"}], False),
        ([{**WIDE, "major": 195}], False),
        ([{**WIDE, "minor": 3}], False),
        ([{**WIDE, "major": 0, "minor": 0}], False),
        # The order counts.
        ([ALL, NOTHING], False),
        ([ALL, NOTHING, RULE], False),
        ([ALL, {**NOTHING, "type": "c"}], False),
        ([ALL, {**RULE, "allow": False}], False),
        ([ALL, {**NOTHING, "type": "c", "access": "m"}], True),
        ([ALL, {**NOTHING, "type": "b"}], True),
    ],
)
def test_whether_every_device_is_allowed_anyway(rules: list[dict[str, Any]], answer: bool) -> None:
    """REQ-08: it is left as it is, and can be told."""
    assert edits.allows_all({"linux": {"resources": {"devices": rules}}}) is answer


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"linux": None},
        {"linux": {"resources": None}},
        {"linux": {"resources": {"devices": None}}},
    ],
)
def test_without_rules_not_every_device_is_allowed(config: dict[str, Any]) -> None:
    """Low-level runtimes begin with none."""
    assert edits.allows_all(config) is False
