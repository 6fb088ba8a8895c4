# SPDX-License-Identifier: Apache-2.0
"""Real containers by runc and crun: what they have, what they may do, and what is left."""

from __future__ import annotations

import pytest
from containers import seen


@pytest.mark.system("runc")
@pytest.mark.parametrize("cgroups", ["v1", "v2"])
@pytest.mark.parametrize("devices", ["1,3", "0"])
def test_a_runc_container_has_the_gpus_it_asked_for_and_no_other(
    cgroups: str, devices: str
) -> None:
    """The one thing that a GPU runtime is for, on both device controllers of the kernel."""
    found = seen.play(f"runc-{cgroups}", devices)
    gpus = {int(index) for index in devices.split(",")}
    seen.assert_gpu_container(found, gpus, proc_driver=True)
    seen.assert_unasked_is_unchanged(found)


@pytest.mark.system("runc")
def test_one_hook_a_step_comes_to_the_same() -> None:
    """As in the incumbent's specs; what it has no hook for here is said and is no error."""
    found = seen.play("separate-hooks", "1,3")
    seen.assert_gpu_container(found, {1, 3}, proc_driver=True)


@pytest.mark.system("runc", "crun")
def test_a_crun_container_has_the_gpus_it_asked_for_and_no_other() -> None:
    """The runtimes differ in how they set devices and when they run hooks."""
    found = seen.play("crun", "1,3")
    seen.assert_gpu_container(found, {1, 3}, proc_driver=True)
    seen.assert_unasked_is_unchanged(found)


@pytest.mark.system("runc")
def test_all_gives_every_gpu() -> None:
    """`all` is what most images ask for."""
    found = seen.play("runc-v1", "all")
    seen.assert_gpu_container(found, set(range(8)), proc_driver=True)


@pytest.mark.system("runc")
def test_none_gives_the_driver_and_no_gpu() -> None:
    """`none` is for containers that need the driver's files and control nodes alone."""
    found = seen.play("runc-v1", "none")
    seen.assert_gpu_container(found, set(), proc_driver=True)


@pytest.mark.system("runc")
def test_a_gpu_is_found_by_its_uuid() -> None:
    """Schedulers ask by UUID, because an index may change at a reboot."""
    found = seen.play("runc-v1", "GPU-5f1e0003-9a3c-4d27-8b60-0c1d2e3f4a03")
    seen.assert_gpu_container(found, {3}, proc_driver=True)


@pytest.mark.system("runc")
@pytest.mark.parametrize("devices", ["void", ""])
def test_void_and_nothing_give_nothing(devices: str) -> None:
    """`void` says that somebody has injected already; empty is what unset is."""
    found = seen.play("runc-v1", devices)
    plain = seen.Seen.parse(found["plain"])
    seen.assert_no_gpu(plain)
    assert seen.Seen.parse(found["asked"]) == plain
