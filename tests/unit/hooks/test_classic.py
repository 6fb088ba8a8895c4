# SPDX-License-Identifier: Apache-2.0
"""The incumbent's hooks by their own names and arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuruntime.errors import RequestError
from gpuruntime.system.ops import Link, MaskParams
from gpuruntime.system.paths import Root
from hooks import classic, entry


def test_arguments_become_operations() -> None:
    """What the incumbent's generator writes."""
    words = ["--link", "libcuda.so.1::/usr/lib/libcuda.so", "--link=../card0::/dev/dri/by-path/x"]
    assert classic.plan("create-symlinks", words) == [
        Link("/usr/lib/libcuda.so", "libcuda.so.1"),
        Link("/dev/dri/by-path/x", "../card0"),
    ]
    words = [
        "--ldconfig-path",
        "/sbin/ldconfig",
        "--folder",
        "/a",
        "--folder=/b",
        "--folder",
        "/a",
    ]
    assert classic.plan("update-ldcache", words) == [classic.MountedLibraries(("/a", "/b"))]
    assert classic.plan("disable-device-node-modification", []) == [MaskParams()]


@pytest.mark.parametrize("name", entry.CLASSIC)
def test_an_option_that_there_is_not_is_refused(name: str) -> None:
    """A step that is half understood is not half done."""
    with pytest.raises(RequestError):
        classic.plan(name, ["--no-such-option", "x"])


def test_libraries_of_the_image_are_not_touched(tmp_path: Path) -> None:
    """Its own cache has them in the order that it wants; only mounts are the driver's."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libown.so.1").write_bytes(b"\x7fELF")
    (tmp_path / "lib/libown.so").symlink_to("libown.so.1")
    root = Root(str(tmp_path))
    operation = classic.MountedLibraries(("/lib", "/missing"))
    operation.execute(root, pytest.fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lib"]
    assert "/lib, /missing" in operation.describe()


@pytest.mark.parametrize("folder", ["lib", "/a/../b", "/a\ninclude /x", "/a b", ""])
def test_a_folder_that_is_no_clean_path_is_refused(tmp_path: Path, folder: str) -> None:
    """It would be written to ld.so.conf.d."""
    with pytest.raises(RequestError):
        classic.MountedLibraries((folder,)).execute(Root(str(tmp_path)), lambda _: None)
