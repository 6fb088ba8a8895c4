# SPDX-License-Identifier: Apache-2.0
"""Nodes with the names of a driver have its numbers, or they are of another time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdi.errors import CdiError
from gpuruntime.plan import node_numbers

DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
226 drm
233 gdrdrv
511 nvidia-uvm

Block devices:
  7 loop
240 nvidia-x
"""


def node(path: str, major: int, minor: int, kind: str = "c") -> Any:
    """Return edits with one node, as they are completed."""
    return {"deviceNodes": [{"path": path, "type": kind, "major": major, "minor": minor}]}


@pytest.mark.parametrize(
    "edits",
    [
        {},
        node("/dev/nvidia1", 195, 1),
        node("/dev/nvidiactl", 195, 255),
        node("/dev/nvidia-uvm", 511, 0),
        node("/dev/dri/card3", 226, 3),
        node("/dev/gdrdrv", 233, 0),
        # Not ours to judge.
        node("/dev/infiniband/rdma_cm", 10, 58),
        node("/dev/x", 1, 3),
    ],
)
def test_nodes_of_their_drivers_are_fine(tmp_path: Path, edits: Any) -> None:
    """The kernel names the driver of each number."""
    (tmp_path / "devices").write_text(DEVICES)
    node_numbers.check(edits, str(tmp_path / "devices"))


@pytest.mark.parametrize(
    "edits",
    [
        node("/dev/nvidia1", 195, 0),
        node("/dev/nvidia1", 1, 1),
        node("/dev/nvidia1", 195, 1, "b"),
        node("/dev/nvidia1", 0, 0, "p"),
        node("/dev/nvidia1", 240, 1),
        node("/dev/nvidia-uvm", 509, 0),
        node("/dev/dri/card3", 195, 3),
        node("/dev/gdrdrv", 1, 1),
    ],
)
def test_a_node_with_the_number_of_another_driver_is_missing(tmp_path: Path, edits: Any) -> None:
    """REQ-09: left from before the module was loaded again, or put there."""
    (tmp_path / "devices").write_text(DEVICES)
    with pytest.raises(CdiError, match="does not match its name") as caught:
        node_numbers.check(edits, str(tmp_path / "devices"))
    assert caught.value.category == "host-device-missing"


@pytest.mark.parametrize("text", [None, "", "Character devices:\n  1 mem\n"])
def test_where_the_kernel_names_no_driver_nothing_is_known(
    tmp_path: Path, text: str | None
) -> None:
    """As in a container, or on a host whose driver is not loaded."""
    if text is not None:
        (tmp_path / "devices").write_text(text)
    node_numbers.check(node("/dev/nvidia1", 1, 1), str(tmp_path / "devices"))
