# SPDX-License-Identifier: Apache-2.0
"""All steps of the hook on real runc, in one hook and one by one, with places that are special.

Each container is started twice; the second start must find everything done.
"""

from __future__ import annotations

from typing import Any

import pytest
from scenarios.machine import SCENARIOS, run_on_host

pytestmark = pytest.mark.system("runc")
KINDS = ["combined", "separate"]
HOST = "load /usr/lib/x86_64-linux-gnu/libcuda.so.1"
COMPAT = "load /usr/local/cuda-12/compat/libcuda.so.1"
DROP_IN = "/etc/ld.so.conf.d/00-compat-gpuruntime.conf: /usr/local/cuda-12/compat"
PROFILE = '"settings": ["EGLVisibleDGPUDevices", 0x3]'
READ_ONLY = {"etc_is_read_only", "compat_in_a_read_only_etc"}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what every case came to, on one simulated host."""
    return run_on_host(SCENARIOS / "steps.py")


@pytest.mark.parametrize(
    ("case", "loaded", "kind"),
    [
        ("image_without_cuda", HOST, "combined"),
        ("compat_is_newer", COMPAT, "combined"),
        ("compat_is_for_others", HOST, "combined"),
        ("compat_is_older", HOST, "combined"),
        ("etc_is_a_volume", HOST, "combined"),
        ("etc_is_read_only", HOST, "combined"),
        ("etc_is_missing", HOST, "combined"),
        ("libraries_are_a_volume", HOST, "combined"),
        ("root_is_read_only", HOST, "combined"),
        ("image_without_cuda", HOST, "separate"),
        ("compat_is_newer", COMPAT, "separate"),
        ("etc_is_a_volume", HOST, "separate"),
    ],
)
def test_the_steps_are_done(results: dict[str, Any], case: str, loaded: str, kind: str) -> None:
    """Libraries found, parameters masked, GPUs listed; nothing changes at the second start."""
    seen = results[case][kind]
    assert seen["status"] == 0, seen["output"]
    assert loaded in seen["output"].splitlines()
    assert "ModifyDeviceFiles: 0" in seen["output"]
    assert (DROP_IN in seen["output"]) is (loaded == COMPAT)
    # What cannot be written there is said; it protects nothing.
    assert (PROFILE in seen["output"]) is (case not in READ_ONLY)
    assert seen["kept"]


@pytest.mark.parametrize(("kind", "loaded"), [("combined", COMPAT), ("separate", HOST)])
def test_compat_where_no_drop_in_can_be_written(
    results: dict[str, Any], kind: str, loaded: str
) -> None:
    """One hook knows what it found; of two, the first cannot leave word for the second."""
    seen = results["compat_in_a_read_only_etc"][kind]
    assert seen["status"] == 0, seen["output"]
    assert loaded in seen["output"].splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_link_13_without_a_place_for_the_cache_the_loader_searches_by_itself(
    results: dict[str, Any], kind: str
) -> None:
    """Then there is nothing to refuse."""
    seen = results["etc_is_read_only_without_a_cache"][kind]
    assert seen["status"] == 0, seen["output"]
    assert HOST in seen["output"].splitlines()
