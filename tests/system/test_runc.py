# SPDX-License-Identifier: Apache-2.0
"""Real containers by runc and crun: what they have, what they may do, and what is left."""

from __future__ import annotations

from typing import Any

import pytest
from containers import seen
from containers.ways import CRUN, FEW, WAYS


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what the containers of all ways were, on cgroup version 2."""
    return seen.play("runc-v2")


@pytest.fixture(scope="module")
def found_on_v1() -> dict[str, Any]:
    """Return what the containers of some ways were, on the older device controller."""
    return seen.play("runc-v1")


@pytest.fixture(scope="module")
def found_by_crun() -> dict[str, Any]:
    """Return what the containers of some ways were with crun."""
    return seen.play("crun")


@pytest.mark.system("runc")
@pytest.mark.parametrize("name", WAYS)
def test_a_runc_container_has_the_gpus_it_asked_for_and_no_other(
    found: dict[str, Any], name: str
) -> None:
    """The one thing that a GPU runtime is for, in every mode, by every kind of name."""
    seen.assert_way(found, name, WAYS[name], proc_driver=True)


@pytest.mark.system("runc")
@pytest.mark.parametrize("name", FEW)
def test_a_runc_container_on_cgroup_v1_has_the_gpus_it_asked_for_and_no_other(
    found_on_v1: dict[str, Any], name: str
) -> None:
    """Its rules are a list that runc writes, and not a program."""
    seen.assert_way(found_on_v1, name, WAYS[name], proc_driver=True)


@pytest.mark.system("runc", "crun")
@pytest.mark.parametrize("name", CRUN)
def test_a_crun_container_has_the_gpus_it_asked_for_and_no_other(
    found_by_crun: dict[str, Any], name: str
) -> None:
    """The runtimes differ in how they set devices and when they run hooks."""
    seen.assert_way(found_by_crun, name, WAYS[name], proc_driver=True)


@pytest.mark.system("runc")
@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        ("auto", {"compute", "utility"}),
        ("jit-cdi", {"compute", "utility"}),
        ("auto, every capability", set(seen.LIBRARY_OF)),
        # Who wrote the spec decided.
        ("cdi", set(seen.LIBRARY_OF)),
    ],
)
def test_a_container_has_the_libraries_of_its_driver_capabilities(
    found: dict[str, Any], name: str, capabilities: set[str]
) -> None:
    """Libraries that nobody asked for are what an image's own can clash with."""
    assert seen.files_for(seen.Seen.parse(found["ways"][name])) == capabilities
