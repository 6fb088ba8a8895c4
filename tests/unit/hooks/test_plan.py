# SPDX-License-Identifier: Apache-2.0
"""The hook's arguments and its state: what is planned, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuruntime.errors import BundleError, RequestError
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry
from gpuruntime.model import Driver, Library
from gpuruntime.plan import gpu_edits as generator
from gpuruntime.system.compat import CudaCompat
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.ops import (
    ApplicationProfile,
    Chmod,
    DeviceLink,
    Link,
    MaskParams,
    RootIsMount,
)
from hooks import state, update_container

if TYPE_CHECKING:
    from gpuruntime.system.operation import Operation

HOOK = Path(__file__).parents[3] / ".venv" / "bin" / "gpu-cdi-hook"
NATIVE = ABI_FLAGS["x86-64"]


def plan(arguments: list[str]) -> list[Operation]:
    """Return the operations of a command line."""
    return update_container.plan(update_container.read(arguments))


def test_operations_come_in_the_order_links_cache_mask() -> None:
    """The cache names the links, so these are made first."""
    operations = plan(
        ["--mask-params", "--library", "liba.so.1::/d/liba.so.1.2::x86-64",
         "--link", "liba.so.1.2::/d/liba.so.1", "--link=liba.so.1::/d/liba.so"]
    )  # fmt: skip
    assert operations == [
        Link("/d/liba.so.1", "liba.so.1.2"),
        Link("/d/liba.so", "liba.so.1"),
        LoaderCache(
            (
                CacheEntry("liba.so.1", "/d/liba.so.1", NATIVE),
                CacheEntry("liba.so", "/d/liba.so", NATIVE),
            )
        ),
        MaskParams(),
    ]
    assert all(operation.describe() for operation in operations)


def test_the_hook_reads_what_the_generator_writes() -> None:
    """Generator and hook are two programs of one version, or of two."""
    library = Library(
        host_path="/r/d/liba.so.1.2", container_path="/d/liba.so.1.2", soname="liba.so.1",
        abi="x86-64", dev_link="liba.so",
    )  # fmt: skip
    driver = Driver(version="1.2", libraries=(library,), files=())
    (hook,) = generator.common_edits(driver, (), (), generator.Style("/bin/gpu-cdi-hook"))["hooks"]
    assert hook["args"][:2] == ["gpu-cdi-hook", update_container.NAME]
    operations = plan(hook["args"][2:])
    assert [type(operation) for operation in operations] == [
        *(Link, Link, LoaderCache, MaskParams, ApplicationProfile)
    ]
    assert operations[2] == LoaderCache(operations[2].entries, CudaCompat("1.2"))  # type: ignore[attr-defined]  # of that type


def test_every_step_in_its_order() -> None:
    """Whatever the order of the arguments; `--chmod` only where somebody asks for it."""
    operations = plan(
        ["--chmod", "755::/dev/dri", "--application-profile", "--mask-params=true",
         "--library=liba.so.1::/d/liba.so.1.2::x86-64", "--cuda-compat", "550.54",
         "--device-link", "../card0::/dev/dri/by-path/x:y", "--link", "liba.so.1.2::/d/liba.so.1"]
    )  # fmt: skip
    assert operations == [
        Link("/d/liba.so.1", "liba.so.1.2"),
        DeviceLink("/dev/dri/by-path/x:y", "../card0"),
        LoaderCache((CacheEntry("liba.so.1", "/d/liba.so.1", NATIVE),), CudaCompat("550.54")),
        MaskParams(),
        ApplicationProfile(),
        Chmod("/dev/dri", 0o755),
    ]
    assert plan(["--cuda-compat=550.54"]) == [CudaCompat("550.54")]
    tegra = ["--cuda-compat-cuda", "12.6", "--cuda-compat-root", "/usr/local/cuda/compat_orin"]
    assert plan(tegra) == [CudaCompat("", "12.6", "/usr/local/cuda/compat_orin")]
    assert plan(tegra[:2]) == [CudaCompat("", "12.6")]
    assert plan(["--cuda-compat="]) == plan([]) == plan(["--mask-params=false"]) == []


def test_each_device_link_is_an_operation_of_its_own() -> None:
    """A container has one for each of its DRM nodes."""
    links = [f"../card{number}::/dev/dri/by-path/{number}" for number in (0, 1)]
    assert plan([word for link in links for word in ("--device-link", link)]) == [
        DeviceLink("/dev/dri/by-path/0", "../card0"),
        DeviceLink("/dev/dri/by-path/1", "../card1"),
    ]
    assert DeviceLink("/dev/dri/by-path/0", "../card0") != DeviceLink("/x", "../card0")


def test_ahead_of_the_container_s_mounts_only_its_own_files_are_written() -> None:
    """What is on a mount is not there yet; and nothing is mounted on the host."""
    entry = CacheEntry("liba.so.1", "/d/liba.so.1", NATIVE)
    assert plan(
        ["--ahead", "--chmod", "755::/dev/dri", "--application-profile", "--mask-params",
         "--library=liba.so.1::/d/liba.so.1.2::x86-64", "--cuda-compat", "550.54",
         "--device-link", "../card0::/dev/dri/by-path/x:y", "--link", "liba.so.1.2::/d/liba.so.1"]
    ) == [
        RootIsMount(),
        Link("/d/liba.so.1", "liba.so.1.2"),
        LoaderCache((entry,), CudaCompat("550.54"), may_cover=False),
    ]  # fmt: skip
    assert plan(["--ahead", "--ldconfig-mode=none"]) == [RootIsMount()]


def test_the_loader_s_files_are_left_alone_on_demand() -> None:
    """Neither the cache nor a drop-in."""
    words = ["--cuda-compat", "1", "--library", "liba.so.1::/d/liba.so.1.2::x86-64"]
    assert plan(["--ldconfig-mode", "none", *words]) == []
    assert plan(["--ldconfig-mode", "merge", "--ldconfig-path", "/x", *words]) == plan(words)
    for path in ("/sbin/ldconfig", "/x"):
        more = ["--ldconfig-mode", "host", *(["--ldconfig-path", path] if path == "/x" else [])]
        (operation,) = plan([*more, *words])
        assert isinstance(operation, LoaderCache)
        assert operation.ldconfig == path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--link"],
        ["--link", "no separator"],
        ["--link", "a::b"],
        ["--link", "a::/b/../c"],
        ["--link", "a::/b/./c"],
        ["--link", "a::/b//c"],
        ["--link", "a/../b::/b"],
        ["--link", "/../a::/b"],
        ["--device-link", "a/../b::/c"],
        ["--library", "a::/c:d/e::x86-64"],
        ["--link", "/etc/passwd::/b"],
        ["--link", "a::/b\ninclude /x"],
        ["--link", "a::/b\0"],
        ["--link", "a::/"],
        ["--library", "a::/b"],
        ["--library", "a::/b::vax"],
        ["--library", "a/b::/c::x86-64"],
        ["--library", "a::/c d::x86-64"],
        ["--library", "::/c::x86-64"],
        ["--unknown"],
        ["word"],
        ["--mask-params=yes"],
        ["--link", "a::/b::/c"],
        ["--link", f"a::/{'b' * (128 << 10)}"],
        ["--link", "--mask-params"],
        ["---link", "a::/b"],
        ["-"],
        ["--"],
        ["--library", f"{'a' * (128 << 10)}::/b/c::x86-64"],
        ["--cuda-compat", "550;x"],
        ["--cuda-compat", "--link"],
        ["--cuda-compat-cuda", "12;x"],
        ["--cuda-compat-cuda", "12.6", "--cuda-compat-root", "/a/../b"],
        ["--chmod", "755"],
        ["--chmod", "888::/dev/dri"],
        ["--chmod", "07777::/dev/dri"],
        ["--chmod", "755::/dev/../etc"],
        ["--ldconfig-mode", "magic"],
    ],
)
def test_an_argument_that_is_not_clean_is_refused(arguments: list[str]) -> None:
    """Nothing but plain names reaches ld.so.conf, a link or the cache."""
    with pytest.raises(RequestError):
        plan(arguments)


def bundle_with_root(directory: Path, path: object) -> str:
    """Make a bundle whose root.path is *path*."""
    bundle = directory / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps({"root": {"path": path}}))
    return str(bundle)


@pytest.mark.parametrize("form", ["rootfs", "./rootfs", "{bundle}/rootfs", "{bundle}/rootfs/"])
def test_root_path_may_be_relative_or_absolute(tmp_path: Path, form: str) -> None:
    """The engines differ: docker writes an absolute path, ctr a relative one."""
    bundle = bundle_with_root(tmp_path, form.format(bundle=f"{tmp_path}/bundle"))
    root = state.open_root(bundle)
    assert os.fstat(root.fd).st_ino == (tmp_path / "bundle" / "rootfs").stat().st_ino
    root.close()


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "//",
        "/..",
        "..",
        "../..",
        "rootfs/..",
        "/.",
        "a\0b",
        "a\ud800",
        "missing",
        1,
        None,
        [],
    ],
)
def test_link_08_a_root_that_is_none_is_refused(tmp_path: Path, path: object) -> None:
    """The host's own root above all."""
    with pytest.raises(BundleError):
        state.open_root(bundle_with_root(tmp_path, path))


@pytest.mark.parametrize("path", ["link", "link/", "./link//", "link/."])
def test_link_08_a_root_that_is_a_link_is_refused(tmp_path: Path, path: str) -> None:
    """Whoever made the link chooses where we work, however the path ends."""
    bundle = Path(bundle_with_root(tmp_path, path))
    (tmp_path / "other").mkdir()
    (bundle / "link").symlink_to(tmp_path / "other")
    with pytest.raises(BundleError):
        state.open_root(str(bundle))


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"bundle": 1}', b'{"bundle": "relative"}', b'{"bundle": "/a/../b"}',
     b'{"bundle": "/"}', b'{"bundle": "/\\ud800"}', b"\xff", b"[" * 100_000,
     b'{"pid": 1}', b" " * (2 << 20)],
)  # fmt: skip
def test_json_07_a_state_that_cannot_be_is_refused(text: bytes) -> None:
    """Runtimes write the state; whatever else is on standard input is not obeyed."""
    done = subprocess.run(
        [HOOK, "update-container", "--mask-params"], input=text, capture_output=True, check=False
    )
    assert done.returncode == 1
    lines = done.stderr.decode("ascii").splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("gpu-cdi-hook: bundle: ")
    assert lines[1].startswith("hint: ")


def test_an_unknown_hook_is_a_warning() -> None:
    """A spec written by another version must not keep containers from starting."""
    done = subprocess.run(
        [HOOK, "from-the-future\x1b[2J", "--what"], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr.startswith(b"gpu-cdi-hook: warning: ")
    assert b"\x1b" not in done.stderr


@pytest.mark.slow
def test_time_01_the_hook_ends_itself() -> None:
    """A runtime that never closes the state must not hold the container for ever."""
    start = time.monotonic()
    with subprocess.Popen(
        [HOOK, "update-container", "--mask-params"],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    ) as hook:  # fmt: skip
        assert hook.stderr is not None
        text = hook.stderr.read()
        assert hook.wait() == 1
    assert b"was not done in 10 s" in text
    assert time.monotonic() - start < 60
