# SPDX-License-Identifier: Apache-2.0
"""podman, rootful and rootless: it reads our CDI spec itself, or uses our runtime.

`--device nvidia.com/gpu=…`: only our hook runs. `--runtime`: containers set the variable.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from containers import seen
from containers.ways import FEW, WAYS

pytestmark = pytest.mark.engine("podman", "conmon", "crun")
without_root = pytest.mark.engine("podman", "conmon", "crun", "newuidmap", "setpriv", "unshare")


@pytest.mark.parametrize("form", ["json", "yaml"])
@pytest.mark.parametrize("devices", ["0", "1,3"])
def test_a_podman_container_has_the_gpus_it_asked_for_and_no_other(
    form: str, devices: str
) -> None:
    """Another implementation reads the specs that we generate, in both formats."""
    results = seen.play(f"podman-{form}", devices)
    gpus = {int(index) for index in devices.split(",")}
    seen.assert_gpu_container(results, gpus, proc_driver=True)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the results of the containers of a podman with our runtime."""
    return seen.play("podman-runtime")


@pytest.mark.parametrize("name", FEW)
def test_podman_with_our_runtime_gives_the_gpus_asked_for_and_no_other(
    results: dict[str, Any], name: str
) -> None:
    """`--runtime`, as with docker."""
    seen.assert_way(results, name, WAYS[name], proc_driver=True)


@pytest.fixture(scope="module")
def user() -> None:
    """Skip where only root may create user namespaces."""
    words = ("setpriv", "--reuid=2000", "--regid=2000", "--clear-groups", "unshare", "-Ur", "true")
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode != 0:
        pytest.skip(f"rootless podman: no user namespace without root: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def rootless(user: None) -> dict[str, Any]:
    """Return the results of the containers of a rootless podman with our runtime."""
    return seen.play("podman-rootless-runtime")


@without_root
def test_a_rootless_podman_container_has_the_gpus_it_asked_for_and_no_other(user: None) -> None:
    """Our hook has no privileges on the host."""
    results = seen.play("podman-rootless")
    seen.assert_gpu_container(results, {1, 3}, mapped=True)


@without_root
@pytest.mark.parametrize("name", FEW)
def test_rootless_podman_with_our_runtime_gives_the_gpus_asked_for_and_no_other(
    rootless: dict[str, Any], name: str
) -> None:
    """Our runtime cannot write to its directory on the host."""
    seen.assert_way(rootless, name, WAYS[name], mapped=True)
