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
    """An engine of a suite, by the package that it is in."""

    suite: str
    engine: str
    package: str
    # What an older one does not have. cdi.md 13.1: ctr runs CDI devices since 2.0.
    at_least: tuple[int, ...]
    form: str

    def is_version(self, *wanted: int) -> bool:
        """Return whether the engine is of the version *wanted* or newer."""
        return fetch.version(self.suite, self.package) >= wanted


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
    """Return the engine and the form of the specs, if the engine was to be had."""
    wanted: Case = request.param
    reason = fetch.why_not(wanted.suite)
    if reason is None:
        assert wanted.is_version(*wanted.at_least)
        return wanted
    reason = f"tier newer_engines: {wanted.engine} of {wanted.suite}: {reason}"
    if "newer_engines" in os.environ.get("GPURUNTIME_TEST_REQUIRE", "").split(","):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def found(case: Case) -> dict[str, Any]:
    """Return what containers with devices of our specs were; nothing of them may be left."""
    root = fetch.root_of(case.suite)
    return seen.play(
        *(case.engine, str(root), case.form), program=PROGRAM, host=["--separate-root"]
    )


@pytest.fixture(scope="module")
def told(found: dict[str, Any]) -> dict[str, str]:
    """Return what the process of a container with all of the lab's devices told."""
    assert found["seen"]["status"] == 0, found["seen"]["stderr"]
    return labspec.parse(found["seen"]["stdout"])


def test_the_container_has_every_variable_exactly(told: dict[str, str]) -> None:
    """Strings that YAML 1.1 takes for something else arrive as they are."""
    labspec.assert_environment(told)


def test_the_container_has_the_nodes(case: Case, told: dict[str, str]) -> None:
    """Numbers and type are the host's; the mode is, where the engine's library is 1.1.0."""
    # cdi.md 13.1 and 8.2.
    since = {"podman": (6,), "docker": (29, 2), "containerd": (2, 2, 1)}[case.engine]
    labspec.assert_nodes(told, host_modes=case.is_version(*since))


def test_the_container_has_the_mounts(told: dict[str, str]) -> None:
    """A file, a directory of an odd name, and a file system made for the container."""
    labspec.assert_mounts(told)


def test_hooks_of_every_stage_get_their_arguments_and_environment(found: dict[str, Any]) -> None:
    """Nothing else is in a hook's environment, and argv begins with what the spec says."""
    labspec.assert_hooks(found["hooks"], labspec.Lab(Path(found["work"])))


def test_members_of_newer_formats_are_taken(case: Case, found: dict[str, Any]) -> None:
    """A spec claims the version that it needs, here 0.7.0, and is not refused for that."""
    done = found["newer"]
    assert done["status"] == 0, done["stderr"]
    value, groups = done["stdout"].splitlines()
    assert value == "yes"
    # cdi.md 13.3: docker sets the groups of the user afterwards, up to 29.4.
    is_lost = case.engine == "docker" and not case.is_version(29, 5)
    assert ("4321" in groups.split()) is not is_lost


def test_a_container_has_the_gpus_it_asked_for_and_no_other(found: dict[str, Any]) -> None:
    """What we generate works, with our hook, in an engine that is not told of us."""
    seen.assert_gpu_container(found, {1, 3})


def test_a_device_that_nobody_defines_is_refused(found: dict[str, Any]) -> None:
    """The control: it is the engine that reads the specs."""
    done = found["unknown"]
    assert done["status"] != 0
    assert f"unresolvable CDI devices {labspec.KIND}=none" in done["stderr"]
