# SPDX-License-Identifier: Apache-2.0
"""A real containerd: `ctr run --runc-binary` on an imported image."""

from __future__ import annotations

from typing import Any

import pytest
from containers import seen
from containers.ways import FEW, WAYS

pytestmark = pytest.mark.engine("containerd", "ctr", "runc")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what the containers were."""
    return seen.play("containerd")


@pytest.mark.parametrize("name", FEW)
def test_a_containerd_container_has_the_gpus_it_asked_for_and_no_other(
    found: dict[str, Any], name: str
) -> None:
    """Under Kubernetes too, containerd and its shim are what stands in front of us."""
    seen.assert_way(found, name, WAYS[name])


def test_ctr_s_own_option_fails_with_the_command_that_works(found: dict[str, Any]) -> None:
    """`--gpus` of containerd 1 calls nvidia-container-cli; what its error says is run as it is."""
    case = found["gpus"]
    assert case["status"] != 0
    assert case["stdout"] == ""
    said = case["stderr"].replace("\\n", "\n").replace("\\", "")
    assert (
        '"nvidia-container-cli configure", which "ctr run --gpus" calls, is not supported' in said
    )
    assert said.count("hint: ") == 1
    seen.assert_granted(seen.Seen.parse(case["as told"]), {1}, found["host"])
    seen.assert_driver(seen.Seen.parse(case["as told"]))
