# SPDX-License-Identifier: Apache-2.0
"""Device nodes are completed from the host: what is given stands, what is missing is read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cdi import document, quick
from cdi.complete import complete, in_user_namespace
from cdi.errors import CdiError


def completed(*, user_namespace: bool = False, **node: Any) -> dict[str, Any]:
    """Return *node* completed."""
    edits: Any = {"deviceNodes": [node]}
    return dict(complete(edits, user_namespace=user_namespace)["deviceNodes"][0])


def test_numbers_type_and_mode_come_from_the_host() -> None:
    """The spec has none: majors are given at boot."""
    assert completed(path="/dev/null", permissions="rw") == {
        "path": "/dev/null",
        "permissions": "rw",
        "type": "c",
        "major": 1,
        "minor": 3,
        "fileMode": stat.S_IMODE(os.stat("/dev/null").st_mode),
    }


def test_the_host_path_is_looked_at_and_the_path_is_kept() -> None:
    """A driver container's /dev is elsewhere on the host."""
    node = completed(path="/dev/nvidia0", hostPath="/dev/zero")
    assert (node["path"], node["major"], node["minor"]) == ("/dev/nvidia0", 1, 5)


def test_a_node_given_in_full_is_taken_as_it_stands() -> None:
    """Also one that the host does not have."""
    given = {"path": "/dev/absent", "type": "c", "major": 240, "minor": 1}
    assert completed(**given) == given


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Who can write the link could give the container any device of the host."""
    link = tmp_path / "nvidia0"
    link.symlink_to("/dev/null")
    with pytest.raises(CdiError, match="not a device node"):
        completed(path=str(link))


@pytest.mark.parametrize("path", ["/dev/no-such-node", "/etc/passwd", "/dev"])
def test_what_is_no_node_is_an_error_that_names_it(path: str) -> None:
    """A GPU that cannot be given is an error before the container starts."""
    with pytest.raises(CdiError) as error:
        completed(path=path)
    assert f'"{path}"' in error.value.message
    assert error.value.category in ("host-device-missing", "host-not-a-device")


def test_another_type_is_an_error() -> None:
    """A block device where the spec has a character device is another device."""
    with pytest.raises(CdiError, match="type"):
        completed(path="/dev/null", type="b")


def test_a_fifo_has_no_numbers(tmp_path: Path) -> None:
    """And gets no cgroup rule later."""
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    fifo.chmod(0o640)
    assert completed(path=str(fifo)) == {"path": str(fifo), "type": "p", "fileMode": 0o640}


def test_the_edits_given_are_not_changed() -> None:
    """They belong to a spec that the next request may use too."""
    node: Any = {"path": "/dev/null"}
    edits: Any = {"deviceNodes": [node], "env": ["A=b"]}
    result = complete(edits)
    assert edits == {"deviceNodes": [{"path": "/dev/null"}], "env": ["A=b"]}
    assert result["env"] == ["A=b"]
    assert complete({}) == {"deviceNodes": []}


def test_under_the_name_of_another_device_the_hosts_node_is_bound() -> None:
    """What is at the container's path on the host is what runc would bind."""
    node = completed(user_namespace=True, path="/dev/null", hostPath="/dev/zero")
    assert node["bind"] is True
    assert (node["type"], node["major"], node["minor"]) == ("c", 1, 5)
    assert "bind" not in completed(path="/dev/null", hostPath="/dev/zero")


def test_no_spec_can_say_what_is_bound() -> None:
    """It is found on the host: the member is ours, not the format's."""
    node = {"path": "/dev/null", "hostPath": "/etc", "bind": True}
    device = {"name": "x", "containerEdits": {"deviceNodes": [node]}}
    spec = {"cdiVersion": "0.6.0", "kind": "a.b/c", "devices": [device]}
    assert quick.devices(json.dumps(spec), spec) is None
    with pytest.raises(CdiError, match='no member "bind"'):
        document.check(spec)
    del node["bind"]
    assert document.check(spec) == spec


@pytest.mark.parametrize("path", ["/dev/no-such-node", "/dev", "/etc/passwd", "/dev/nu\0ll"])
def test_under_a_name_that_is_no_device_the_hosts_node_is_bound(path: str) -> None:
    """As a driver container's nodes, where the host has loaded no driver itself."""
    assert completed(user_namespace=True, path=path, hostPath="/dev/zero")["bind"] is True


@pytest.mark.parametrize(
    "node",
    [
        {"path": "/dev/zero"},
        {"path": "/dev/zero", "hostPath": "/dev/zero"},
        {"path": "/dev/zero", "type": "c", "major": 1, "minor": 5},
        {"path": "/dev/zero", "type": "u", "major": 1, "minor": 5},
        # The spec's host path is another, and the numbers tell what is meant.
        {"path": "/dev/zero", "hostPath": "/dev/null", "type": "c", "major": 1, "minor": 5},
    ],
)
def test_where_the_host_has_the_device_at_the_path_nothing_changes(node: dict[str, Any]) -> None:
    """What engines write for a device is what others read."""
    assert completed(user_namespace=True, **node) == completed(**node)


def test_a_node_in_another_directory_is_the_same_device() -> None:
    """A driver container's own /dev has nodes of the same numbers: those count, not the file."""
    usual = os.lstat("/dev/zero")
    places = {"/dev/zero": usual, "/run/driver/dev/zero": usual}
    node: Any = {"path": "/dev/zero", "hostPath": "/run/driver/dev/zero"}
    edits = complete({"deviceNodes": [node]}, places.__getitem__, user_namespace=True)
    assert "bind" not in edits["deviceNodes"][0]


@pytest.mark.parametrize(
    "numbers",
    [
        {"type": "c", "major": 1, "minor": 3},
        {"type": "c", "major": 2, "minor": 5},
        {"type": "b", "major": 1, "minor": 5},
        {"type": "p"},
    ],
)
@pytest.mark.parametrize("place", [{"path": "/dev/zero"}, {"path": "/x", "hostPath": "/dev/zero"}])
def test_numbers_that_the_host_has_not_there_are_an_error(
    numbers: dict[str, Any], place: dict[str, str]
) -> None:
    """Nobody can make the node, and the container would get another device in silence."""
    assert completed(**place, **numbers)["type"] == numbers["type"]
    with pytest.raises(CdiError, match=r'"/dev/zero" is not device [bcp] [0-9]+:[0-9]+') as error:
        completed(user_namespace=True, **place, **numbers)
    assert error.value.category == "host-device-missing"


def test_a_pipe_is_that_of_its_path(tmp_path: Path) -> None:
    """Pipes have no numbers: one in the place of another is another."""
    for name in ("one", "two"):
        os.mkfifo(tmp_path / name)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert "bind" not in completed(user_namespace=True, path=one)
    assert completed(user_namespace=True, path=one, hostPath=two)["bind"] is True


def test_req_09_a_node_that_changes_while_it_is_looked_at_is_an_error() -> None:
    """What is written is what was seen first; what is there afterwards is not that."""
    seen = [os.lstat("/dev/zero"), os.lstat("/dev/null")]
    with pytest.raises(CdiError, match="is not device c 1:5"):
        complete(
            {"deviceNodes": [{"path": "/dev/nvidia0"}]}, lambda _: seen.pop(0), user_namespace=True
        )


@pytest.mark.parametrize(
    ("uid_map", "answer"),
    [
        ("         0          0 4294967295\n", False),
        ("         0     100000      65536\n", True),
        ("         0          0          1\n", True),
        ("         0       1000          1\n         1     100000      65536\n", True),
        # A new one, of which nobody has written the map yet.
        ("", True),
        (None, False),
    ],
)
def test_ours_is_told_by_the_map_of_ids(tmp_path: Path, uid_map: str | None, answer: bool) -> None:
    """B019, B020: rootless engines and nested hosts, and a kernel without user namespaces."""
    path = tmp_path / "uid_map"
    if uid_map is not None:
        path.write_text(uid_map)
    for linux in (None, {}, {"namespaces": None}, {"namespaces": [{"type": "pid"}, {}]}):
        assert in_user_namespace({"linux": linux}, str(path)) is answer
    assert in_user_namespace({}, str(path)) is answer


@pytest.mark.parametrize("namespace", [{"type": "user"}, {"type": "user", "path": "/proc/7/x"}])
def test_the_containers_own_is_told_by_the_config(tmp_path: Path, namespace: object) -> None:
    """A new one, or one that is there: runc binds in both."""
    config = {"linux": {"namespaces": [{"type": "mount"}, namespace]}}
    assert in_user_namespace(config, str(tmp_path / "none"))
