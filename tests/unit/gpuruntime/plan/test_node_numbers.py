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
 10 misc
195 nvidia
195 nvidia-modeset
195 nvidiactl
196 nvidia-frontend
226 drm
231 infiniband_verbs
233 gdrdrv
234 nvidia-nvswitch
235 nvidia-nvlink
236 nvidia-caps
237 nvidia-caps-imex-channels
238 nvidia-fs
239 hidraw
241 nvidia-next
242 someone
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
        node("/dev/nvidia1", 196, 1),
        node("/dev/nvidiactl", 195, 255),
        node("/dev/nvidia-modeset", 195, 254),
        node("/dev/nvidia-modeset", 196, 254),
        node("/dev/nvidia-uvm", 511, 0),
        node("/dev/nvidia-uvm-tools", 511, 1),
        node("/dev/nvidia-caps/nvidia-cap12", 236, 12),
        node("/dev/nvidia-caps-imex-channels/channel0", 237, 0),
        node("/dev/nvidia-fs3", 238, 3),
        node("/dev/nvidia-nvlink", 235, 0),
        node("/dev/nvidia-nvswitchctl", 234, 255),
        node("/dev/nvidia-nvswitch2", 234, 2),
        node("/dev/dri/card3", 226, 3),
        node("/dev/gdrdrv", 233, 0),
        node("/dev/infiniband/rdma_cm", 10, 58),
        node("/dev/infiniband/uverbs0", 231, 192),
        # Nodes of other names are not judged.
        node("/dev/infiniband/issm0", 1, 3),
        node("/dev/x", 1, 3),
    ],
)
def test_nodes_of_their_drivers_are_accepted(tmp_path: Path, edits: Any) -> None:
    """By the names that the drivers register, those of older drivers too."""
    (tmp_path / "devices").write_text(DEVICES)
    assert node_numbers.check(edits, str(tmp_path / "devices")) == []


@pytest.mark.parametrize(
    "edits",
    [
        node("/dev/nvidia1", 195, 0),
        node("/dev/nvidia1", 1, 1),
        node("/dev/nvidia1", 195, 1, "b"),
        node("/dev/nvidia1", 0, 0, "p"),
        node("/dev/nvidia1", 240, 1),
        node("/dev/nvidia1", 511, 1),
        node("/dev/nvidia1", 239, 1),
        # B047: 509 was nvidia-uvm in the boot before, and nothing has it now.
        node("/dev/nvidia-uvm", 509, 0),
        node("/dev/nvidia-uvm", 236, 0),
        node("/dev/nvidia-caps/nvidia-cap1", 237, 1),
        node("/dev/nvidia-caps-imex-channels/channel0", 236, 0),
        node("/dev/nvidia-fs0", 234, 0),
        node("/dev/nvidia-nvswitch0", 235, 0),
        node("/dev/dri/card3", 195, 3),
        node("/dev/gdrdrv", 1, 1),
        node("/dev/infiniband/rdma_cm", 231, 1),
        node("/dev/infiniband/uverbs0", 10, 1),
    ],
)
def test_a_node_with_the_number_of_another_driver_is_missing(tmp_path: Path, edits: Any) -> None:
    """REQ-09: left from before the module was loaded again, or put there."""
    (tmp_path / "devices").write_text(DEVICES)
    with pytest.raises(CdiError, match="does not match its name") as caught:
        node_numbers.check(edits, str(tmp_path / "devices"))
    assert caught.value.category == "host-device-missing"


@pytest.mark.parametrize(
    ("edits", "driver"),
    [
        (node("/dev/nvidia-fs0", 241, 0), "nvidia-next"),
        (node("/dev/nvidia0", 242, 0), "someone"),
        (node("/dev/gdrdrv", 242, 0), "someone"),
    ],
)
def test_a_driver_with_an_unknown_name_is_a_warning(
    tmp_path: Path, edits: Any, driver: str
) -> None:
    """A newer driver may register under another name: the container starts."""
    (tmp_path / "devices").write_text(DEVICES)
    (warning,) = node_numbers.check(edits, str(tmp_path / "devices"))
    assert f'the driver "{driver}"' in warning
    assert edits["deviceNodes"][0]["path"] in warning


@pytest.mark.parametrize("text", [None, "", "Character devices:\n  1 mem\n"])
def test_where_the_kernel_names_no_driver_nothing_is_known(
    tmp_path: Path, text: str | None
) -> None:
    """As in a container, or on a host whose driver is not loaded."""
    if text is not None:
        (tmp_path / "devices").write_text(text)
    assert node_numbers.check(node("/dev/nvidia1", 1, 1), str(tmp_path / "devices")) == []
