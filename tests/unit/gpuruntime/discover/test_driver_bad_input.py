# SPDX-License-Identifier: Apache-2.0
"""Driver roots with what does not belong there: refused by name, or left out with a sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_roots import COMPUTE, VERSION, Tree, elf

from gpuruntime.discover.user_space import DriverRoot, find_driver, find_nvml
from gpuruntime.errors import DiscoveryError, GpuRuntimeError
from gpuruntime.model import Driver

PLACE = "/usr/lib64"
REQUIRED = ("libcuda", "libnvidia-ml")
OPTIONAL = "libnvidia-ptxjitcompiler"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return the root of a driver for computing."""
    made = Tree(tmp_path / "root")
    made.libraries(PLACE, COMPUTE)
    return made


def found(tree: Tree) -> Driver:
    """Return the driver in *tree*."""
    return find_driver(DriverRoot(str(tree.path)), VERSION, native="x86-64", elsewhere=())


def _directory(file: Path) -> None:
    file.mkdir()


def _fifo(file: Path) -> None:
    os.mkfifo(file)


def _empty(file: Path) -> None:
    file.touch()


def _truncated(file: Path) -> None:
    file.write_bytes(elf("libcuda.so.1")[:100])


def _text(file: Path) -> None:
    file.write_text("GROUP ( libcuda.so.1 )\n")


def _outside(file: Path) -> None:
    (file.parents[3] / "outside.so").write_bytes(elf("libcuda.so.1"))
    file.symlink_to("../../../outside.so")


def _absolute_outside(file: Path) -> None:
    file.symlink_to(file.parents[3] / "outside.so")


def _loop(file: Path) -> None:
    file.symlink_to(file.name)


def _group_writable(file: Path) -> None:
    file.write_bytes(elf("libcuda.so.1"))
    file.chmod(0o664)


def _other_writable(file: Path) -> None:
    file.write_bytes(elf("libcuda.so.1"))
    file.chmod(0o646)


def _odd_target(file: Path) -> None:
    target = file.with_name("od d,na\nme::x")
    target.write_bytes(elf("libcuda.so.1"))
    file.symlink_to(target.name)


def _other_soname(file: Path) -> None:
    file.write_bytes(elf("../../etc/passwd\n"))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "directory": (_directory, "is a directory, not a regular file"),
    "fifo": (_fifo, "is a FIFO, not a regular file"),
    "empty": (_empty, "is not a usable library"),
    "truncated": (_truncated, "is not a usable library"),
    "text": (_text, "is not a usable library"),
    "link out of the root": (_outside, "target does not exist in this root"),
    "absolute link out of the root": (_absolute_outside, "target does not exist in this root"),
    "loop": (_loop, "cannot be opened"),
    "writable by its group": (_group_writable, "mode 0664: users other than root can change it"),
    "writable by others": (_other_writable, "mode 0646: users other than root can change it"),
    "odd name": (_odd_target, "which cannot be named in a spec"),
    "odd SONAME": (_other_soname, "has the SONAME"),
}


@pytest.mark.parametrize("stem", REQUIRED)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_required_library_is_refused_by_name(wrong: str, stem: str, tree: Tree) -> None:
    """CDI-06: no container starts with half a driver, or with what anybody could put there."""
    make, reason = WRONG[wrong]
    file = tree.at(f"{PLACE}/{stem}.so.{VERSION}")
    file.unlink()
    make(file)
    with pytest.raises(GpuRuntimeError) as caught:
        found(tree)
    assert str(file) in caught.value.message
    assert reason in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.lines().replace("\nhint: ", "")


@pytest.mark.parametrize("wrong", WRONG)
def test_an_optional_library_is_left_out_and_told(wrong: str, tree: Tree) -> None:
    """The others go on working."""
    make, reason = WRONG[wrong]
    whole = found(tree)
    file = tree.at(f"{PLACE}/{OPTIONAL}.so.{VERSION}")
    file.unlink()
    make(file)
    driver = found(tree)
    assert [lib.soname for lib in driver.libraries] == [
        lib.soname for lib in whole.libraries if lib.soname != f"{OPTIONAL}.so.1"
    ]
    # And that libcuda opens it, for which it has no name in its ELF header.
    problem, needed = driver.problems
    assert str(file) in problem
    assert reason in problem
    assert f'"{OPTIONAL}.so.1" is missing' in needed


@pytest.mark.parametrize("wrong", [name for name in WRONG if name != "odd SONAME"])
def test_nvml_is_never_opened_if_it_is_wrong(wrong: str, tree: Tree) -> None:
    """It runs in a process of ours."""
    make, reason = WRONG[wrong]
    file = tree.at(f"{PLACE}/libnvidia-ml.so.{VERSION}")
    file.unlink()
    make(file)
    with pytest.raises(DiscoveryError, match=re.escape(reason)):
        find_nvml(DriverRoot(str(tree.path)), native="x86-64", elsewhere=())


def test_a_library_in_a_directory_that_others_can_change_is_refused(tree: Tree) -> None:
    """They could replace it."""
    tree.at(PLACE).chmod(0o777)
    with pytest.raises(DiscoveryError, match=rf'{PLACE}" belongs to uid .* mode 0777') as caught:
        found(tree)
    # Its mode is not ours to change: it may be one of the system's, such as /usr/local/lib.
    assert caught.value.hint == "install the driver where only root can write"


def test_a_sticky_directory_will_do(tree: Tree) -> None:
    """Others can add files to it, and replace none of root's."""
    whole = found(tree)
    tree.at(PLACE).chmod(0o1777)
    assert found(tree) == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("path", ["", "/usr/lib64", f"/usr/lib64/libcuda.so.{VERSION}"])
def test_what_another_user_owns_is_refused(path: str, tree: Tree) -> None:
    """CDI-06: the root itself, a directory, a file."""
    os.chown(tree.at(path), 1000, 1000)
    with pytest.raises(DiscoveryError, match="belongs to uid 1000"):
        found(tree)


def test_libraries_for_another_machine_are_told(tmp_path: Path) -> None:
    """A root that was unpacked for a board."""
    tree = Tree(tmp_path / "root")
    tree.libraries(PLACE, COMPUTE, abi="aarch64")
    with pytest.raises(DiscoveryError, match=r'libcuda\.so\.[0-9.]+" is for aarch64'):
        found(tree)
    with pytest.raises(DiscoveryError, match="is for aarch64, not for x86-64"):
        find_nvml(DriverRoot(str(tree.path)), native="x86-64", elsewhere=())


def test_a_library_is_what_its_soname_says(tree: Tree) -> None:
    """The loader does not look at file names."""
    tree.file(f"{PLACE}/libnvidia-x.so.{VERSION}", elf("libnvcuvid.so.1"))
    tree.file(f"{PLACE}/libnvidia-y.so.{VERSION}", elf("libGL.so.1"))
    tree.file(f"{PLACE}/libnvidia-z.so.{VERSION}", elf("libnvidia-new.so.1"))
    capabilities = {lib.soname: lib.capability for lib in found(tree).libraries}
    assert capabilities["libnvcuvid.so.1"] == "video"
    assert capabilities["libnvidia-new.so.1"] == ""
    assert "libGL.so.1" not in capabilities


@pytest.mark.parametrize(
    "name",
    [
        *("libGL.so.1.7.0", "libEGL.so.1.1.0", "libGLX.so.0.0.0", "libGLdispatch.so.0.0.0"),
        *("libOpenGL.so.0", "libGLESv1_CM.so.1.2.0", "libGLESv2.so.2.1.0", "libOpenCL.so.1.0.0"),
        *(f"libGL.so.{VERSION}", f"libEGL.so.{VERSION}", f"libOpenCL.so.{VERSION}"),
    ],
)
def test_vendor_neutral_libraries_stay_out(name: str, tree: Tree) -> None:
    """The image has its own, for its own programs."""
    tree.file(f"{PLACE}/{name}", elf(name))
    driver = found(tree)
    assert len(driver.libraries) == len(COMPUTE)
    assert driver.problems == ()


def test_a_library_that_nobody_knows_is_for_every_capability(tree: Tree) -> None:
    """A new driver works on its first day; what is not of it stays out."""
    tree.file(f"{PLACE}/libnvidia-tomorrow.so.{VERSION}", elf("libnvidia-tomorrow.so.1"))
    tree.file(f"{PLACE}/libnvidia-tomorrow2.so.2.3.4", elf("libnvidia-tomorrow2.so.2"))
    tree.file(f"{PLACE}/notalib.so.{VERSION}", elf(None))
    tree.file(f"{PLACE}/libnvidia-tomorrow.so.{VERSION}.bak", elf(None))
    others = {lib.soname: lib.capability for lib in found(tree).libraries}
    assert others.pop("libnvidia-tomorrow.so.1") == ""
    assert len(others) == len(COMPUTE)


@pytest.mark.parametrize(
    "names",
    [
        ["/usr/share/vulkan/icd.d/nvidia\nicd.json"],
        ["/usr/share/vulkan/icd.d/nvidia,icd.json"],
        ["/usr/share/vulkan/icd.d/nvidia icd.json", "/usr/share/vulkan/icd.d/nvidia_icd.json"],
    ],
)
def test_files_with_odd_names_are_left_out_and_told(names: list[str], tree: Tree) -> None:
    """CDI-03: a name must not be read as more than a name."""
    for name in names:
        tree.file(name, "{}")
    driver = found(tree)
    assert [file.host_path for file in driver.files] == [
        str(tree.at(name)) for name in names if re.fullmatch(r"[\w/.]+", name)
    ]
    assert len(driver.problems) == 1


@pytest.mark.parametrize("make", [_directory, _fifo, _outside, _loop, _other_writable])
@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/nvidia-smi",
        "/etc/OpenCL/vendors/nvidia.icd",
        f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
    ],
)
def test_other_files_are_left_out_and_told(
    make: Callable[[Path], None], path: str, tree: Tree
) -> None:
    """CDI-06 for what is no library."""
    tree.directory(os.path.dirname(path))
    file = tree.at(path)
    if make is _outside:
        file.symlink_to(tree.path.parent / "outside")
    else:
        make(file)
    driver = found(tree)
    assert driver.files == ()
    assert len(driver.problems) == 1
    assert str(file) in driver.problems[0]


def test_a_root_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """Not there, a file, and what no path is."""
    file = tmp_path / "file"
    file.touch()
    for path in (str(tmp_path / "gone"), str(file), f"{tmp_path}\0x", f"{tmp_path}/a\nb"):
        with pytest.raises(DiscoveryError) as caught:
            DriverRoot(path)
        assert "--driver-root" in str(caught.value.hint)


def test_the_loader_s_files_can_be_anything(tree: Tree) -> None:
    """They are hints, of a root that is not ours."""
    whole = found(tree)
    tree.file(
        "/etc/ld.so.conf", b"\xff\xfe\0/etc\ninclude\ninclude /*/*/*\n/dev/../\n" + b"/a" * 9
    )
    assert found(tree) == whole
    tree.at("/etc/ld.so.conf").unlink()
    os.mkfifo(tree.at("/etc/ld.so.conf"))
    os.mkfifo(tree.at("/etc/ld.so.cache"))
    assert found(tree) == whole
