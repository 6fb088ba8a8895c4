# SPDX-License-Identifier: Apache-2.0
"""The table of distributions: recognised by os-release, documented, and tried with a root each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_roots import LAYOUTS, Tree, build

from gpuruntime.discover import search_paths
from gpuruntime.discover.distributions import DISTRIBUTIONS, of_host
from gpuruntime.discover.root import DriverRoot

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "platforms.md"
OSTREE = "/run/ostree-booted"
LIB = "/usr/lib/os-release"
MUSL_PATH = "/etc/ld-musl-x86_64.path"


def test_each_row_has_a_miniature_root_and_is_documented() -> None:
    """The row of the document has the same words."""
    assert {row.layout for row in DISTRIBUTIONS} == set(LAYOUTS) - {"aarch64"}
    section = DOCUMENT.read_text().partition("## Distributions\n")[2].partition("\n## ")[0]
    documented = re.findall(r"(?m)^\| ([^|]+) \| ([^|]*) \| ([^|]+) \| ([^|]+) \|$", section)
    rows = [tuple(cell.replace("`", '"').strip() for cell in row) for row in documented[1:]]
    assert rows == [
        (row.name, ", ".join(f'"{name}"' for name in row.ids), row.libraries, row.programs)
        for row in DISTRIBUTIONS
    ]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"/etc/os-release": "NAME=x\nID=nixos\n"}, "NixOS"),
        ({LIB: 'ID="talos"\n'}, "Talos"),
        ({"/etc/os-release": "ID=linuxmint\nID_LIKE='ubuntu debian'\n"}, "Ubuntu"),
        ({"/etc/os-release": "ID=opensuse-leap\nID_LIKE='suse opensuse'"}, "SUSE"),
        ({"/etc/os-release": "ID=fedora\nVARIANT_ID=workstation"}, "RHEL and Fedora"),
        ({"/etc/os-release": "ID=fedora\nVARIANT_ID=silverblue"}, "ostree systems"),
        ({"/etc/os-release": "ID=rhel\n", OSTREE: ""}, "ostree systems"),
        ({"/etc/os-release": "ID=unheard-of"}, None),
        ({"/etc/os-release": "ID\n=\n\x00" + "x" * 5000}, None),
        ({"/etc/os-release": ""}, None),
        ({}, None),
    ],
)
def test_a_distribution_is_recognised(files: dict[str, str], name: str | None) -> None:
    """By its own id first, then by those that it is like."""
    row = of_host(files.get, files.__contains__)
    assert (row.name if row else None) == name


def fifo(tree: Tree) -> None:
    """Put a FIFO in place of the file."""
    tree.at(MUSL_PATH).unlink()
    os.mkfifo(tree.at(MUSL_PATH))


def loop(tree: Tree) -> None:
    """Put a symlink to itself in place of the file."""
    tree.at(MUSL_PATH).unlink()
    tree.link(MUSL_PATH, "ld-musl-x86_64.path")


@pytest.mark.parametrize(
    "fault",
    [
        fifo,
        loop,
        lambda tree: tree.file(MUSL_PATH),
        lambda tree: tree.file(MUSL_PATH, b"\xff\0:relative:../x:/\n" * 100),
        lambda tree: os.truncate(tree.at(MUSL_PATH), 100 << 20),
        lambda tree: tree.at(MUSL_PATH).unlink(),
    ],
)
def test_a_broken_search_path_of_musl_is_no_failure(
    tmp_path: Path, fault: Callable[[Tree], object]
) -> None:
    """The other directories are searched all the same; no relative one is."""
    tree = build(tmp_path / "root", "alpine")
    fault(tree)
    candidates = search_paths.library_candidates(DriverRoot(str(tree.path)), "x86-64")
    assert "/usr/lib64" in candidates
    assert "/usr/glibc-compat/lib" not in candidates
    assert all(path.startswith("/") for path in candidates)
