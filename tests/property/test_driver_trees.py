# SPDX-License-Identifier: Apache-2.0
"""Laws of the driver's discovery, on random driver roots."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from driver_roots import ALL, COMPUTE, VERSION, Tree, elf
from effort import tries
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gpuruntime.discover.user_space import DriverRoot, find_driver
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.model import Driver
from gpuruntime.plan import driver_files, gpu_edits
from gpuruntime.request import capabilities
from hooks import update_container

pytestmark = pytest.mark.property

PROFILE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=tries(150),
    suppress_health_check=[HealthCheck.too_slow],
)
DIRECTORIES = (
    *("/usr/lib64", "/usr/lib64/vdpau", "/usr/lib", "/lib", "/usr/lib/x86_64-linux-gnu"),
    *("/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/share/vulkan/icd.d", "/usr/bin"),
    *(f"/lib/firmware/nvidia/{VERSION}", "/etc/OpenCL/vendors", "/usr/lib64/nvidia/xorg"),
    *("/usr/lib64/gbm", "/o d d", "/a,b", "/ne\nw", "/run/nvidia-persistenced", "/tmp", "/etc"),
)
NAMES = (
    *(library.file(VERSION) for library in ALL),
    *(library.soname for library in ALL if library.soname),
    *(f"libnvidia-new.so.{VERSION}", f"lib new.so.{VERSION}", f"lib\n.so.{VERSION}"),
    *("libcuda.so", "libcuda.so.535.1", "libGL.so.1", f"libGL.so.{VERSION}", "nvidia_drv.so"),
    *("nvidia_icd.json", "nvidia\x1b.json", "nvidia.icd", "nvidia-smi", "gsp_x.bin", "socket"),
    *("nvidia-mps", "ld.so.conf", "nvidia-drm_gbm.so", f"libglxserver_nvidia.so.{VERSION}"),
)
TARGETS = (
    *NAMES,
    *DIRECTORIES,
    *("..", ".", "../../../../etc/passwd", "/etc/passwd", "/", "loop", "/usr/lib64/libcuda.so.1"),
)
SONAMES = (
    None,
    "",
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "../x.so.1",
    "a b.so",
    "x::y.so.1",
    "\x07",
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["library", "text", "link", "directory", "fifo", "writable", "remove"]),
        st.sampled_from(DIRECTORIES),
        st.sampled_from(NAMES),
        st.sampled_from(TARGETS),
        st.sampled_from(SONAMES),
        st.sampled_from(["x86-64", "i386", "aarch64", "riscv64"]),
    ),
    max_size=25,
)
Step = tuple[str, str, str, str, str | None, str]


def change(tree: Tree, step: Step) -> None:
    """Change *tree* by one step, unless something is in the way."""
    what, directory, name, target, soname, abi = step
    path = f"{directory}/{name}"
    place = tree.at(path)
    try:
        if what == "remove" or (what != "writable" and not place.is_dir()):
            # Not written through: a FIFO would wait for a reader.
            place.unlink(missing_ok=True)
        if what == "library":
            tree.file(path, elf(soname, ["libcuda.so.1", target], abi))
        elif what == "text":
            tree.file(path, f"{target}\n", 0o755)
        elif what == "link":
            tree.link(path, target)
        elif what == "directory":
            tree.directory(path)
        elif what == "fifo":
            os.mkfifo(place)
        elif what == "writable":
            place.chmod(0o666)
    except OSError:
        pass


def check(tree: Tree, driver: Driver) -> None:
    """Assert the laws for what was found in *tree*."""
    for item in (*driver.libraries, *driver.files):
        # CDI-06: a file of this root that nobody else can change, under its own name.
        assert item.host_path.startswith(f"{tree.path}/")
        assert os.path.realpath(item.host_path) == item.host_path
        status = os.stat(item.host_path)
        if getattr(item, "kind", "") != "ipc":
            assert stat.S_ISREG(status.st_mode)
            assert not status.st_mode & 0o022
        # CDI-03: nothing in its way takes it for more than a path.
        assert re.fullmatch(r"(/[A-Za-z0-9_.+~@-]+)+", item.container_path)
        assert not {".", ".."} & set(item.container_path.split("/"))
    for abi in ("x86-64", "i386"):
        sonames = [
            (lib.soname, "/vdpau/" in lib.host_path) for lib in driver.libraries if lib.abi == abi
        ]
        assert len(sonames) == len(set(sonames))
    paths = [item.container_path for item in (*driver.libraries, *driver.files)]
    assert len(paths) == len(set(paths))
    # The hook takes what the spec tells it.
    edits = gpu_edits.common_edits(driver, (), (), gpu_edits.Style("/usr/bin/gpu-cdi-hook"))
    for hook in edits["hooks"]:
        update_container.plan(update_container.read(hook["args"][2:]))
    for mount in edits["mounts"]:
        assert "ro" in mount["options"] or mount["containerPath"] in (
            "/run/nvidia-persistenced/socket",
            "/tmp/nvidia-mps",
        )


@PROFILE
@given(STEPS, st.sampled_from([None, VERSION, "535.1"]))
def test_what_is_found_can_be_trusted_and_named(steps: list[Step], version: str | None) -> None:
    """Whatever a root holds: an error of ours, or files that can go into a spec as they are."""
    directory = Path(tempfile.mkdtemp())
    try:
        tree = Tree(directory / "root")
        tree.libraries("/usr/lib64", COMPUTE)
        for step in steps:
            change(tree, step)
        try:
            driver = find_driver(
                DriverRoot(str(tree.path)), version, native="x86-64", elsewhere=()
            )
        except GpuRuntimeError as error:
            event(f"refused: {type(error).__name__}")
            assert error.hint  # noqa: PT017 (either way is right)
            return
        event("found, with problems" if driver.problems else "found")
        check(tree, driver)
        for name in capabilities.ALL:
            check(tree, driver_files.select(driver, [name]))
    finally:
        shutil.rmtree(directory)
