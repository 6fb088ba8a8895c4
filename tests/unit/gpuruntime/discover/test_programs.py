# SPDX-License-Identifier: Apache-2.0
"""Where the driver's programs are searched for besides the usual directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driver_roots import COMPUTE, VERSION, Tree, elf

from gpuruntime import probes
from gpuruntime.discover import fingerprint, search_paths
from gpuruntime.discover.user_space import DriverRoot, find_driver
from gpuruntime.model import Driver

SMI = "nvidia-smi"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return the root of a driver that has libraries and nothing else."""
    made = Tree(tmp_path / "root")
    made.libraries("/usr/lib64", COMPUTE)
    return made


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a PATH that the tests of one machine and of another share."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def program(tree: Tree, path: str) -> None:
    """Make a program at *path*."""
    tree.file(path, elf(None), 0o755)


def driver(tree: Tree, *search_path: str, environment: bool = True) -> Driver:
    """Return the driver of *tree*."""
    return find_driver(
        DriverRoot(str(tree.path)),
        VERSION,
        native="x86-64",
        program_search_path=search_path,
        environment=environment,
    )


def programs(tree: Tree, *search_path: str, environment: bool = True) -> dict[str, str]:
    """Return container path → path in the root of the programs."""
    files = driver(tree, *search_path, environment=environment).files
    return {
        file.container_path: file.host_path.removeprefix(str(tree.path))
        for file in files
        if file.kind == "binary"
    }


def test_the_rest_of_path_comes_last(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is resolved below the driver root; relative entries do not count."""
    monkeypatch.setenv("PATH", ":bin:/gone:/srv/../opt/gpu/bin/:/o p:/usr/bin")
    program(tree, "/opt/gpu/bin/nvidia-smi")
    program(tree, "/bin/nvidia-debugdump")
    program(tree, "/opt/gpu/bin/nvidia-debugdump")
    assert programs(tree) == {
        "/usr/bin/nvidia-smi": "/opt/gpu/bin/nvidia-smi",
        "/bin/nvidia-debugdump": "/bin/nvidia-debugdump",
    }


def test_path_counts_for_commands_alone(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have different ones, and a container must get the same from each."""
    monkeypatch.setenv("PATH", "/opt/gpu/bin")
    program(tree, "/opt/gpu/bin/nvidia-smi")
    assert programs(tree, environment=False) == {}
    assert driver(tree, environment=False).missing_program


def test_a_search_path_replaces_all_other_directories(tree: Tree) -> None:
    """It has host paths; what it does not have is missing, and said."""
    program(tree, "/usr/bin/nvidia-smi")
    program(tree, "/srv/one/nvidia-persistenced")
    program(tree, "/srv/two/nvidia-persistenced")
    options = [f"{tree.path}/srv/none", f"{tree.path}/srv/one", f"{tree.path}/srv/two/"]
    assert programs(tree, *options) == {
        "/usr/bin/nvidia-persistenced": "/srv/one/nvidia-persistenced"
    }
    assert SMI in driver(tree, *options).missing_program
    assert driver(tree).missing_program == ""


@pytest.mark.parametrize("by_option", [False, True])
@pytest.mark.parametrize("open_to_others", ["/home/user", "/home/user/bin"])
def test_a_directory_that_others_can_replace_is_not_used(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, open_to_others: str, by_option: bool
) -> None:
    """A user could put another program there, which containers would run as root."""
    program(tree, "/home/user/bin/nvidia-smi")
    os.chmod(tree.at(open_to_others), 0o777)
    option = [f"{tree.path}/home/user/bin"] if by_option else []
    monkeypatch.setenv("PATH", "/home/user/bin")
    assert programs(tree, *option) == {}
    (problem,) = driver(tree, *option).problems
    assert f"{tree.path}{open_to_others}" in problem
    assert "users other than root can change it" in problem


@pytest.mark.parametrize(
    ("libraries", "places"),
    [
        ("/usr/lib/nvidia/tesla", ["/usr/lib/nvidia/tesla/bin", "/usr/libexec/nvidia/tesla/bin"]),
        ("/usr/lib64/nvidia", ["/usr/lib64/nvidia/bin", "/usr/libexec/nvidia/bin"]),
        ("/usr/lib64/vdpau", []),
        ("/usr/lib/x86_64-linux-gnu", []),
        ("/snap/nvidia/1/graphics/lib/x86_64-linux-gnu", ["/snap/nvidia/1/graphics/bin"]),
        ("/nix/store/0a-nvidia-x11-550/lib", ["/nix/store/0a-nvidia-x11-550/bin"]),
    ],
)
def test_directories_beside_the_libraries(libraries: str, places: list[str]) -> None:
    """Those of Bottlerocket, Flatcar, snaps and NixOS."""
    assert search_paths.programs_beside(libraries) == places


NIX_LOADER = "/nix/store/0a1b-glibc-2.39/lib/ld-linux-x86-64.so.2"
# Contents of /usr/bin/nvidia-smi that do not run in a container, and why not.
UNUSABLE = {
    "a script": ('#!/bin/sh\nexec /opt/gpu/bin/nvidia-smi "$@"\n', "not an ELF program"),
    "damaged": (elf(None)[:70], "not an ELF program"),
    "another loader": (elf(None, interpreter=NIX_LOADER), f'its loader "{NIX_LOADER}"'),
    "another machine": (elf(None, abi="aarch64"), "for aarch64, not for x86-64"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_program_that_runs_in_a_container_is_preferred(name: str, tmp_path: Path) -> None:
    """A later directory has it: the first has what runs on this host alone."""
    tree = Tree(tmp_path / "root")
    tree.libraries("/opt/gpu/lib64", COMPUTE)
    tree.file("/etc/ld.so.conf", "/opt/gpu/lib64\n")
    tree.file("/usr/bin/nvidia-smi", UNUSABLE[name][0], 0o755)
    tree.file(
        "/opt/gpu/bin/nvidia-smi", elf(None, interpreter="/lib64/ld-linux-x86-64.so.2"), 0o755
    )
    assert programs(tree) == {"/usr/bin/nvidia-smi": "/opt/gpu/bin/nvidia-smi"}
    assert driver(tree).problems == ()


def test_debians_directory_comes_before_a_script(tmp_path: Path) -> None:
    """No alternative links to the program there, and an administrator has written a script."""
    tree = Tree(tmp_path / "root")
    tree.libraries("/usr/lib/x86_64-linux-gnu/nvidia/current", COMPUTE, flat=True)
    tree.file("/usr/bin/nvidia-smi", UNUSABLE["a script"][0], 0o755)
    program(tree, "/usr/lib/nvidia/current/nvidia-smi")
    assert programs(tree) == {"/usr/bin/nvidia-smi": "/usr/lib/nvidia/current/nvidia-smi"}
    assert driver(tree).problems == ()


@pytest.mark.parametrize("name", UNUSABLE)
def test_the_only_program_is_delivered_with_a_warning(name: str, tree: Tree) -> None:
    """The image may have what it needs."""
    content, reason = UNUSABLE[name]
    paths = [f"/usr/bin/{program}" for program in ("nvidia-debugdump", "nvidia-smi")]
    for path in paths:
        tree.file(path, content, 0o755)
    assert programs(tree) == {path: path for path in paths}
    (problem,) = driver(tree).problems
    named = ", ".join(f'"{tree.path}{path}"' for path in paths)
    assert problem.startswith(f"{named} may not run in a container: {reason}")
    assert driver(tree).missing_program == ""


def test_usr_sbin_that_is_a_link_is_usr_bin(tree: Tree) -> None:
    """Void and newer Fedora have it, and images do not: scripts call /usr/bin/nvidia-smi."""
    program(tree, "/usr/bin/nvidia-smi")
    tree.link("/usr/sbin", "bin")
    assert programs(tree) == {"/usr/bin/nvidia-smi": "/usr/bin/nvidia-smi"}


def test_a_snap_has_its_own_directories(tmp_path: Path) -> None:
    """B099: the libraries and programs of a snap, of which no loader cache knows."""
    tree = Tree(tmp_path / "root")
    snap = "/snap/gpu/7/graphics"
    tree.libraries(f"{snap}/lib/x86_64-linux-gnu", COMPUTE)
    program(tree, f"{snap}/bin/nvidia-smi")
    found = find_driver(
        DriverRoot(str(tree.path)),
        native="x86-64",
        library_search_path=[f"{tree.path}{snap}/lib/x86_64-linux-gnu"],
    )
    assert found.missing_program == ""
    assert f"{snap}/lib/x86_64-linux-gnu/libcuda.so.{VERSION}" in [
        library.container_path for library in found.libraries
    ]


@pytest.mark.parametrize(
    ("by_option", "place"), [(False, "/srv/tools"), (True, "/opt/gpu/bin"), (True, "/usr/bin")]
)
def test_a_program_that_is_installed_later_changes_the_state(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, by_option: bool, place: str
) -> None:
    """It does if the program is searched for there; what PATH is later does not."""
    monkeypatch.setenv("PATH", "/srv/tools")
    option = [f"{tree.path}/opt/gpu/bin"] if by_option else []
    plan = fingerprint.plan(str(tree.path), str(tree.path), program_search_paths=option)
    state = probes.read(plan)
    monkeypatch.setenv("PATH", "/elsewhere")
    assert probes.changed(state) == []
    program(tree, f"{place}/nvidia-smi")
    is_searched = place == "/srv/tools" or "gpu" in place
    assert ("programs" in probes.changed(state)) == is_searched
