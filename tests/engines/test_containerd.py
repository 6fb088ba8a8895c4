# SPDX-License-Identifier: Apache-2.0
"""A real containerd: `ctr run --runc-binary` on an imported image."""

from __future__ import annotations

from typing import Any

import pytest
from containers import seen
from containers.ways import FEW, WAYS

pytestmark = pytest.mark.engine("containerd", "ctr", "runc")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the results of the containers."""
    return seen.play("containerd")


@pytest.mark.parametrize("name", FEW)
def test_a_containerd_container_has_the_gpus_it_asked_for_and_no_other(
    results: dict[str, Any], name: str
) -> None:
    """In Kubernetes too, containerd and its shim start our runtime."""
    seen.assert_way(results, name, WAYS[name])


def test_ctr_s_own_option_fails_with_the_command_that_works(results: dict[str, Any]) -> None:
    """`--gpus` of containerd 1 calls nvidia-container-cli; the command in its hint works."""
    case = results["gpus"]
    assert case["status"] != 0
    assert case["stdout"] == ""
    errors = case["stderr"].replace("\\n", "\n").replace("\\", "")
    assert (
        '"nvidia-container-cli configure", which "ctr run --gpus" calls, is not supported'
        in errors
    )
    assert errors.count("hint: ") == 1
    seen.assert_granted(seen.Seen.parse(case["as told"]), {1}, results["host"])
    seen.assert_driver(seen.Seen.parse(case["as told"]))
