# SPDX-License-Identifier: Apache-2.0
"""A real containerd: `ctr run --runc-binary` on an imported image."""

from __future__ import annotations

import pytest
from containers import seen

pytestmark = pytest.mark.engine("containerd", "ctr", "runc")


@pytest.mark.parametrize("devices", ["1,3", "0"])
def test_a_containerd_container_has_the_gpus_it_asked_for_and_no_other(devices: str) -> None:
    """Under Kubernetes too, containerd and its shim are what stands in front of us."""
    found = seen.play("containerd", devices)
    seen.assert_gpu_container(found, {int(index) for index in devices.split(",")})
    seen.assert_unasked_is_unchanged(found)
