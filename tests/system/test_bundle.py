# SPDX-License-Identifier: Apache-2.0
"""`make bundle`: what is in the tree, and its work in a root that has no Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import releases
from containers.machine import differences, of_machine

from gpuruntime.formats import elf

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
SCENARIO = TREE / "tests" / "scenarios" / "bundled.py"
RECORDER = TREE / "tests" / "fakes" / "runtime" / "recorder.c"
LIBRARY = "lib/gpuruntime"
HOME = f"{LIBRARY}/python"
# What the kernel gives to every process.
KERNELS = "linux-vdso.so.1"
OURS = ["gpu-cdi-hook", "gpu-container-runtime", "gpu-container-runtime-hook", "gpuruntime"]
FILES = "".join(f"file: {name}\n" for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so"))
pytestmark = pytest.mark.system("make", "gcc", "readelf", "runc")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive."""
    (path,) = releases.of_run(tmp_path_factory).glob("gpuruntime-*-linux-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def tree(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what is in the archive."""
    place = tmp_path_factory.mktemp("tree")
    subprocess.run(["tar", "-C", place, "-xf", archive], check=True)
    (top,) = place.iterdir()
    return top


@pytest.fixture(scope="module")
def seen(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what was seen of its use in a root without Python, on a simulated host."""
    recorder = tmp_path_factory.mktemp("recorder") / "recorder"
    subprocess.run(["gcc", "-static", "-O1", "-o", recorder, RECORDER], check=True)
    before = of_machine()
    done = subprocess.run(
        [*(sys.executable, SIMHOST, "run", "--separate-root", "--"),
         *(sys.executable, SCENARIO, archive, recorder)],
        env={**os.environ, "PYTHONPATH": str(SCENARIO.parent)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert differences(before, of_machine) == []
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def binaries(top: Path) -> dict[str, elf.Elf]:
    """Return path → what it says of itself, of each program and library below *top*."""
    found = {}
    for path in top.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as stream:
                if stream.read(4) == b"\x7fELF":
                    found[str(path.relative_to(top))] = elf.read(stream)
    return found


def missing(found: dict[str, elf.Elf]) -> set[str]:
    """Return the libraries that some of *found* need and that are not in the bundle's place."""
    needed = {name for item in found.values() for name in item.needed} - {KERNELS}
    return {name for name in needed if f"{HOME}/lib/{name}" not in found}


def test_every_library_that_is_needed_is_there(tree: Path) -> None:
    """A host's own would be of another C library than the loader, or not there at all."""
    found = binaries(tree)
    assert missing(found) == set()
    assert len(found) > 40
    # Those that a driver's libraries of any age ask for by name.
    for name in ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"):
        assert f"{HOME}/lib/{name}" in found
    # The control: without one that is needed.
    del found[f"{HOME}/lib/libc.so.6"]
    assert missing(found) == {"libc.so.6"}


def test_perm_01_modes_links_and_owners(archive: Path) -> None:
    """All of it runs as root; a link that leaves the tree is broken elsewhere."""
    with tarfile.open(archive) as stream:
        members = stream.getmembers()
    top = members[0].name
    assert len(members) > 1500
    for member in members:
        assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
        assert member.name.split("/")[0] == top
        if member.issym():
            target = os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
            assert target.startswith(f"{top}/"), member.name
            assert not os.path.isabs(member.linkname)
        else:
            assert member.isfile() or member.isdir()
            assert stat.S_IMODE(member.mode) in ({0o755} if member.isdir() else {0o644, 0o755})


def test_nothing_names_the_place_where_it_was_made(tree: Path) -> None:
    """Neither a path of this machine's user nor one that only an installation has."""
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            assert os.fsencode(TREE) not in data, path
    for name in ("bin/gpuruntime", f"{LIBRARY}/launcher.interpreter", f"{HOME}/bin/python3"):
        assert "/opt/gpuruntime" not in (tree / name).read_text()
    assert sorted(os.listdir(tree / "bin")) == OURS


def test_every_module_has_bytecode_that_is_never_checked(tree: Path) -> None:
    """Also the standard library: the archive's times say nothing, and nobody may write there."""
    modules = list(tree.rglob("*.py"))
    assert len(modules) > 600
    for module in modules:
        (compiled,) = (module.parent / "__pycache__").glob(f"{module.stem}.cpython-*.pyc")
        assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 1


def test_whose_files_they_are_is_said(tree: Path) -> None:
    """Others' programs are passed on with it, under their licences."""
    documents = tree / "share/doc/gpuruntime"
    licenses = {path.name: path.read_text() for path in (documents / "licenses").iterdir()}
    assert {"attrs", "click", "jsonschema", "pyyaml", "tomlkit"} <= licenses.keys()
    assert "pyelftools" in licenses
    assert licenses["nvidia_ml_py"].startswith("Copyright")
    assert not licenses["nvidia_ml_py"].endswith("#\n")
    assert all(licenses.values())
    packages = (documents / "bundled-packages").read_text().splitlines()
    if shutil.which("dpkg-query"):
        assert {"glibc", "zlib"} <= {line.split()[0] for line in packages}
    assert {line.split()[2].partition(":")[0] for line in packages} <= licenses.keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["CC=/none/gcc"], 'the compiler "/none/gcc" is not installed'),
        (
            ["CC=aarch64-linux-gnu-gcc"],
            '"aarch64-linux-gnu-gcc" compiles for another architecture',
        ),
        (["START_PYTHON=/bin/busybox", "PYTHON="], "no Python 3.11 or newer was found"),
        (["START_PYTHON=/bin/busybox", "PYTHON=/bin/busybox"], "no Python 3.11 or newer"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], said: str) -> None:
    """The interpreter is that of this machine, and new enough for the command line."""
    done = releases.make("bundle", *options)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith(f"bundle: {said}")
    assert "\nhint: " in done.stderr


def test_a_machine_without_binutils_gets_a_hint(tmp_path: Path) -> None:
    """As a clean Debian root; the interpreter must not be blamed for it."""
    for name in ("make", "sh", "sed", "find", "nproc", "cc"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    done = releases.make("bundle", f"START_PYTHON={sys.executable}", PATH=str(tmp_path))
    first, second, *_ = done.stderr.splitlines()
    assert (first, second) == ('bundle: "readelf" is not installed', "hint: install binutils")


def test_the_command_line_works_where_there_is_nothing_else(seen: dict[str, Any]) -> None:
    """Neither an interpreter nor a library, nor a loader."""
    assert seen["python of the root"] == seen["libraries of the root"] == []
    status, told = seen["info"]
    assert (status, re.findall(r"(?m)^launcher: .*", told)) == (0, ["launcher: native"])
    # The driver was asked, by a child with the same interpreter.
    assert "inventory.gpus[7].gpu.uuid: GPU-" in told
    assert seen["by a link"] == [0, "gpuruntime, version 0.1.0\n"]
    assert seen["generate"][0] == 0
    assert "8 GPUs" in seen["generate"][1]
    assert seen["validate"] == [0, "1 file: 0 errors, 0 warnings\n"]
    assert '"path": "/opt/gpuruntime/bin/gpu-container-runtime"' in seen["configure"][1]
    assert seen["hook version"] == [0, "gpu-cdi-hook version 0.1.0\n"]


@pytest.mark.parametrize(
    ("how", "gpus", "programs"),
    [
        ("container", "nvidia0 nvidia3", "/opt/gpuruntime/bin"),
        ("by a spec", "nvidia3", "/opt/gpuruntime/bin"),
        ("moved", "nvidia0 nvidia3", "/usr/local/else where/bin"),
    ],
)
def test_a_container_starts_without_python(
    how: str, gpus: str, programs: str, seen: dict[str, Any]
) -> None:
    """With its nodes, the driver's files, what the hook makes in its root; also after a move."""
    came = seen[how]
    assert came["status"] == 0, came["output"]
    nodes = f"nodes: nvidia-modeset nvidia-uvm nvidia-uvm-tools {gpus} nvidiactl\n"
    assert came["output"] == f"{nodes}ModifyDeviceFiles: 0\n{FILES}cached\n"
    assert came["hooks"] == [f"{programs}/gpu-cdi-hook"]


def test_without_the_bundle_no_container_starts(seen: dict[str, Any]) -> None:
    """The control: nothing else in that root can do it."""
    assert seen["without it"]["status"] == 127
    assert "nodes:" not in seen["without it"]["output"]
    assert seen["moved command"] == [0, "gpuruntime, version 0.1.0\n"]


def test_the_callers_environment_is_passed_on_and_not_used(seen: dict[str, Any]) -> None:
    """Its library path has broken libraries; the low-level runtime gets it as it was."""
    assert seen["passed on"]["came"] == [0, ""]
    assert seen["passed on"]["environment"] == seen["passed on"]["given"]
    status, said = seen["passed on"]["control"]
    assert status == 127
    assert "/broken/libc.so.6" in said
