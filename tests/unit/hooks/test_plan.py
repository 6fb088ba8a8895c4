# SPDX-License-Identifier: Apache-2.0
"""The hook's arguments and its state: what is planned, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from gpuruntime import plan as generator
from gpuruntime.errors import BundleError, RequestError
from gpuruntime.ldcache import ABI_FLAGS, Entry
from gpuruntime.model import Driver, Library
from gpuruntime.system.ops import Link, LoaderCache, MaskParams
from hooks import state, update_container

HOOK = Path(__file__).parents[3] / ".venv" / "bin" / "gpu-cdi-hook"
NATIVE = ABI_FLAGS["x86-64"]


def test_operations_come_in_the_order_links_cache_mask() -> None:
    """The cache names the links, so these are made first."""
    operations = update_container.plan(
        ["--mask-params", "--library", "liba.so.1::/d/liba.so.1.2::x86-64",
         "--link", "liba.so.1.2::/d/liba.so.1", "--link=liba.so.1::/d/liba.so"]
    )  # fmt: skip
    assert operations == [
        Link("/d/liba.so.1", "liba.so.1.2"),
        Link("/d/liba.so", "liba.so.1"),
        LoaderCache(
            (
                Entry("liba.so.1", "/d/liba.so.1", NATIVE),
                Entry("liba.so", "/d/liba.so", NATIVE),
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
    operations = update_container.plan(hook["args"][2:])
    assert [type(operation) for operation in operations] == [Link, Link, LoaderCache, MaskParams]


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
    ],
)
def test_an_argument_that_is_not_clean_is_refused(arguments: list[str]) -> None:
    """Nothing but plain names reaches ld.so.conf, a link or the cache."""
    with pytest.raises(RequestError):
        update_container.plan(arguments)


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
    ["", "/", "//", "/..", "..", "../..", "rootfs/..", "/.", "a\0b", "missing", 1, None, []],
)
def test_link_08_a_root_that_is_none_is_refused(tmp_path: Path, path: object) -> None:
    """The host's own root above all."""
    with pytest.raises(BundleError):
        state.open_root(bundle_with_root(tmp_path, path))


def test_link_08_a_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Whoever made the link chooses where we work."""
    bundle = Path(bundle_with_root(tmp_path, "link"))
    (bundle / "link").symlink_to("/")
    with pytest.raises(BundleError):
        state.open_root(str(bundle))


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"bundle": 1}', b'{"bundle": "relative"}', b'{"bundle": "/a/../b"}',
     b'{"bundle": "/"}', b"\xff", b"[" * 100_000, b'{"pid": 1}', b" " * (2 << 20)],
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
    assert time.monotonic() - start < 12
