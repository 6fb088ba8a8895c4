# SPDX-License-Identifier: Apache-2.0
"""Newer podman, docker and containerd read CDI specs that our producer wrote, JSON and YAML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from containers import labspec, seen
from newer_engines import fetch

pytestmark = pytest.mark.newer_engines

PROGRAM = Path(__file__).with_name("host.py")


class Case(NamedTuple):
    """An engine of a suite, and the package that contains it."""

    suite: str
    engine: str
    package: str
    # The first version with CDI devices. cdi.md 13.1: ctr supports them since 2.0.
    at_least: tuple[int, ...]
    form: str

    def is_version(self, *minimum: int) -> bool:
        """Return whether the engine is at least of the version *minimum*."""
        return fetch.version(self.suite, self.package) >= minimum


ENGINES = (
    ("trixie", "podman", "podman", (5, 4)),
    ("trixie", "docker", "docker.io", (26, 1)),
    ("sid", "podman", "podman", (5, 5)),
    ("sid", "docker", "docker.io", (28,)),
    ("sid", "containerd", "containerd", (2,)),
)
CASES = [Case(*engine, form) for engine in ENGINES for form in ("json", "yaml")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join((*case[:2], case.form)))
def case(request: pytest.FixtureRequest) -> Case:
    """Return the engine and the form of the specs; skip without the engine."""
    selected: Case = request.param
    reason = fetch.why_not(selected.suite)
    if reason is None:
        assert selected.is_version(*selected.at_least)
        return selected
    reason = f"tier newer_engines: {selected.engine} of {selected.suite}: {reason}"
    if "newer_engines" in os.environ.get("GPURUNTIME_TEST_REQUIRE", "").split(","):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def results(case: Case) -> dict[str, Any]:
    """Return the results of containers with devices of our specs; assert that nothing is left."""
    root = fetch.root_of(case.suite)
    return seen.play(
        *(case.engine, str(root), case.form), program=PROGRAM, host=["--separate-root"]
    )


@pytest.fixture(scope="module")
def container_view(results: dict[str, Any]) -> dict[str, str]:
    """Return the output of the process of a container with all devices of the lab."""
    assert results["seen"]["status"] == 0, results["seen"]["stderr"]
    return labspec.parse(results["seen"]["stdout"])


def test_the_container_has_every_variable_exactly(container_view: dict[str, str]) -> None:
    """Strings that YAML 1.1 reads as another type arrive unchanged."""
    labspec.assert_environment(container_view)


def test_the_container_has_the_nodes(case: Case, container_view: dict[str, str]) -> None:
    """Numbers and type are those of the host; the mode too, with a library since 1.1.0."""
    # cdi.md 13.1 and 8.2.
    since = {"podman": (6,), "docker": (29, 2), "containerd": (2, 2, 1)}[case.engine]
    labspec.assert_nodes(container_view, host_modes=case.is_version(*since))


def test_the_container_has_the_mounts(container_view: dict[str, str]) -> None:
    """A file, a directory of an odd name, and a file system made for the container."""
    labspec.assert_mounts(container_view)


def test_hooks_of_every_stage_get_their_arguments_and_environment(results: dict[str, Any]) -> None:
    """The environment of a hook and its argv are exactly those of the spec."""
    labspec.assert_hooks(results["hooks"], labspec.Lab(Path(results["work"])))


def test_members_of_newer_formats_are_taken(case: Case, results: dict[str, Any]) -> None:
    """A spec has the version that it needs, here 0.7.0, and the engine accepts it."""
    done = results["newer"]
    assert done["status"] == 0, done["stderr"]
    value, groups = done["stdout"].splitlines()
    assert value == "yes"
    # cdi.md 13.3: docker sets the groups of the user afterwards, up to 29.4.
    is_lost = case.engine == "docker" and not case.is_version(29, 5)
    assert ("4321" in groups.split()) is not is_lost


def test_a_container_has_the_gpus_it_asked_for_and_no_other(results: dict[str, Any]) -> None:
    """A generated spec works, with our hook, in an engine without our configuration."""
    seen.assert_gpu_container(results, {1, 3})


def test_a_device_that_nobody_defines_is_refused(results: dict[str, Any]) -> None:
    """The control: the engine itself reads the specs."""
    done = results["unknown"]
    assert done["status"] != 0
    assert f"unresolvable CDI devices {labspec.KIND}=none" in done["stderr"]
