# SPDX-License-Identifier: Apache-2.0
"""podman reads CDI specs that our producer wrote, with the same result as our library."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers import labspec, seen

pytestmark = pytest.mark.engine("podman", "conmon", "crun")

PROGRAM = seen.HERE / "lab.py"
FORMS = ("json", "yaml")
Config = dict[str, Any]


@pytest.fixture(scope="module", params=FORMS)
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the results of containers with all devices of the lab, for each spec format."""
    return seen.play(f"values-{request.param}", program=PROGRAM)


@pytest.fixture(scope="module")
def folders() -> dict[str, Any]:
    """Return the results of podman and of our library for directories with several files."""
    return seen.play("folders", program=PROGRAM)


@pytest.fixture(scope="module")
def container_view(results: dict[str, Any]) -> dict[str, str]:
    """Return the output of the process of the container."""
    assert results["seen"]["status"] == 0, results["seen"]["stderr"]
    return labspec.parse(results["seen"]["stdout"])


def test_a_podman_container_has_every_variable_exactly(container_view: dict[str, str]) -> None:
    """A value that changes on its way to a job is worse than a spec that is refused."""
    labspec.assert_environment(container_view)


def test_a_podman_container_has_the_nodes_of_the_host_and_the_given_one(
    container_view: dict[str, str],
) -> None:
    """Numbers and type are the host's, owner and mode as before 1.1.0 (cdi.md 8.2)."""
    labspec.assert_nodes(container_view)


def test_a_podman_container_has_the_mounts(container_view: dict[str, str]) -> None:
    """A file, a directory of an odd name, and a file system made for the container."""
    labspec.assert_mounts(container_view)


def test_hooks_of_every_stage_get_their_arguments_and_environment(results: dict[str, Any]) -> None:
    """The environment of a hook and its argv are exactly those of the spec."""
    labspec.assert_hooks(results["seen"]["hooks"], labspec.Lab(Path(results["work"])))


@pytest.mark.parametrize("user", ["root", "user", "own"])
def test_podman_s_config_is_what_our_library_makes_of_the_one_without_devices(
    user: str, results: dict[str, Any]
) -> None:
    """The whole config.json is compared: what we leave out or add shows as well."""
    case = results["users"][user]
    for done in (case["without"], case["its"]):
        assert done["status"] == 0, done["stderr"]
    without, its, ours = case["without"]["config"], case["its"]["config"], case["ours"]
    # The control: the compared configs are not empty.
    assert len(its["linux"]["devices"]) >= len(labspec.NODES)
    assert set(its["hooks"]) == set(labspec.STAGES)
    its_env, ours_env = its["process"].pop("env"), ours["process"].pop("env")
    for config in (its, ours):
        for change in CHANGES:
            change(config)
    for device in ours["linux"]["devices"]:
        without_host_mode(device)
    assert its == ours
    # cdi.md 8.1: up to 1.1.0 what CDI sets is appended, whatever the config has by then. podman
    # puts its own variables in an order that differs from container to container.
    split = len(its_env) - len(case["appended"])
    assert its_env[split:] == case["appended"]
    assert sorted(its_env[:split]) == sorted(without["process"]["env"])
    # In effect it is the same: of a repeated name, the process sees the last (cdi.md 13.2).
    assert dict(map(split_entry, its_env)) == dict(map(split_entry, ours_env))


def without_identity(config: Config) -> None:
    """Remove the values that differ between any two containers."""
    del config["root"]["path"]
    del config["annotations"]["io.kubernetes.cri-o.Created"]


def sort_mounts(config: Config) -> None:
    """Sort mounts as podman does, and libraries up to 0.8.1 did (cdi.md 8.4): ties by text."""

    def key(mount: Config) -> tuple[int, str]:
        path = posixpath.normpath(mount["destination"])
        return path.count("/"), path

    config["mounts"].sort(key=key)


def with_numbers(config: Config) -> None:
    """Add the numbers 0:0 to the pipe: the OCI types of Go always write them."""
    for device in config["linux"]["devices"]:
        device.setdefault("major", 0)
        device.setdefault("minor", 0)


CHANGES: tuple[Callable[[Config], None], ...] = (without_identity, sort_mounts, with_numbers)


def without_host_mode(device: Config) -> None:
    """Remove a mode that is not in the spec: before 1.1.0 it was absent (cdi.md 8.2)."""
    if device["path"] in labspec.NODES and device["path"] != labspec.GIVEN:
        del device["fileMode"]


@pytest.mark.parametrize(
    ("device", "value"),
    [
        pytest.param("both", "/var/run/cdi", id="the-higher-directory-wins"),
        pytest.param("low", "low", id="a-broken-file-above-leaves-the-definition-below"),
        pytest.param("same", "same", id="what-else-is-in-a-conflicting-file-stays"),
        pytest.param("high", "high", id="a-broken-file-beside-it-hides-nothing"),
        pytest.param("twice", None, id="a-conflict-below-is-not-undone-above"),
        pytest.param("none", None, id="unknown"),
        pytest.param("low:rwm", None, id="permissions-are-no-part-of-a-name"),
    ],
)
def test_podman_and_our_library_take_the_same_definition(
    device: str, value: str | None, folders: dict[str, Any]
) -> None:
    """The definition that counts must not depend on the reader (cdi.md 7.2)."""
    status, output, errors = folders["podman"][device]
    if value is None:
        assert (status, output) == (126, "")
        assert f"unresolvable CDI devices {labspec.KIND}={device}" in errors
        assert folders["library"][device] == "unresolvable"
    else:
        assert (status, output) == (0, value), errors
        assert folders["library"][device] == f"LAB={value}"


def test_our_library_says_why_where_podman_is_silent(folders: dict[str, Any]) -> None:
    """The control: those files exist, broken or in conflict."""
    assert folders["errors"] == [
        *("/etc/cdi/broken.yaml", "/etc/cdi/low.yaml", "/etc/cdi/same.json"),
        "/var/run/cdi/broken.json",
    ]


def split_entry(entry: str) -> tuple[str, str]:
    """Return the name and the value of a variable."""
    name, _, value = entry.partition("=")
    return name, value
