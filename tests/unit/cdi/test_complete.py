# SPDX-License-Identifier: Apache-2.0
"""Device nodes are completed from the host: what is given stands, what is missing is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cdi.complete import complete
from cdi.errors import CdiError


def completed(**node: Any) -> dict[str, Any]:
    """Return *node* completed."""
    return dict(complete({"deviceNodes": [node]})["deviceNodes"][0])


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
