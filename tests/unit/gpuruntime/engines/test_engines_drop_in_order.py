# SPDX-License-Identifier: Apache-2.0
"""CRI-O's and podman's drop-ins are read in the order, and merged in the way, of these engines."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gpuruntime.engines import file_sets
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.runtime_entry import RuntimeEntry

ENTRY = RuntimeEntry("gpuruntime", "/usr/bin/gpu-container-runtime")
RUNC = '[crio.runtime.runtimes.runc]\nruntime_root = "{}"\n'


def crio_root(directory: Path) -> str:
    """Return the "runtime_root" that a drop-in 99-x.toml in *directory* copies from runc."""
    place = EngineConfig("crio", "crio", str(directory / "none"), str(directory / "99-x.toml"), "")
    (drop_in,) = file_sets.to_configure(place, ENTRY).files
    document = tomllib.loads(str(drop_in.configure(None)))
    return str(document["crio"]["runtime"]["runtimes"]["gpuruntime"].get("runtime_root"))


@pytest.mark.parametrize(
    ("names", "last"),
    [
        (("10", "20.toml"), "20.toml"),
        (("10", ".hidden"), "10"),
        ((".hidden",), ".hidden"),
        (("10", "20/sub"), "20/sub"),
        # The directory's name decides, not the whole path.
        (("20/zz", "20.toml"), "20.toml"),
        (("10", "zz"), "10"),
    ],
)
def test_crio_reads_every_file_before_ours(
    tmp_path: Path, names: tuple[str, ...], last: str
) -> None:
    """Hidden ones and those of subdirectories too; a later one wins."""
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(RUNC.format(name))
    assert crio_root(tmp_path) == last


def test_crio_takes_a_runtime_from_the_last_file_as_a_whole(tmp_path: Path) -> None:
    """A later table of the same name does not add to the earlier one, it replaces it."""
    (tmp_path / "10").write_text(RUNC.format("/earlier"))
    (tmp_path / "20").write_text('[crio.runtime.runtimes.runc]\nruntime_path = "/usr/bin/runc"\n')
    assert crio_root(tmp_path) == "None"


@pytest.mark.parametrize(
    ("name", "is_read"),
    [("10.conf", True), (".10.conf", True), ("10.toml", False), ("sub/10.conf", False)],
)
def test_podman_reads_the_conf_files_before_ours(
    tmp_path: Path, name: str, *, is_read: bool
) -> None:
    """A list of one of them is the one that ours must repeat."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('[engine]\nruntime_supports_json = ["earlier"]\n')
    place = EngineConfig(
        "podman", "podman", str(tmp_path / "none"), str(tmp_path / "99-x.conf"), ""
    )
    (drop_in,) = file_sets.to_configure(place, ENTRY).files
    assert ("earlier" in str(drop_in.configure(None))) == is_read
