# SPDX-License-Identifier: Apache-2.0
"""podman reads our CDI spec itself: `--device nvidia.com/gpu=…`; of ours only the hook runs."""

from __future__ import annotations

import pytest
from containers import seen

pytestmark = pytest.mark.engine("podman", "conmon", "crun")


@pytest.mark.parametrize("form", ["json", "yaml"])
@pytest.mark.parametrize("devices", ["0", "1,3"])
def test_a_podman_container_has_the_gpus_it_asked_for_and_no_other(
    form: str, devices: str
) -> None:
    """Another reader of the specification takes what we generate, in both forms."""
    found = seen.play(f"podman-{form}", devices)
    gpus = {int(index) for index in devices.split(",")}
    seen.assert_gpu_container(found, gpus, proc_driver=True)
