# SPDX-License-Identifier: Apache-2.0
"""What the container's loader is told: musl's lists, conf files of the image.

LINK-10 and TIME-01 of the attack catalogue; cache and drop-in are in test_ops.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile.canary import digest
from hostile.cover import image_cache

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry
from gpuruntime.system import drop_in, loader
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.paths import Root

DIRECTORY = "/usr/lib/x86_64-linux-gnu"
NATIVE = ABI_FLAGS["x86-64"]
CACHE = LoaderCache((CacheEntry("libx.so.1", f"{DIRECTORY}/libx.so.1", NATIVE),))
MUSL = "/lib/ld-musl-x86_64.so.1"
LIST = "/etc/ld-musl-x86_64.path"
DEFAULTS = "/lib\n/usr/local/lib\n/usr/lib\n"


class Image:
    """A root, and the warnings."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened = Root(str(root))
        self.warnings: list[str] = []

    def path(self, name: str, content: str | None = None) -> Path:
        """Return the place of *name* on the host, its directories made; with *content*, a file."""
        place = Path(f"{self.root}{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            place.write_text(content)
        return place

    def execute(self, operation: LoaderCache = CACHE) -> None:
        """Carry *operation* out."""
        operation.execute(self.opened, self.warnings.append)

    def first(self, name: str) -> str:
        """Return what the loader finds by *name*."""
        rows = ldcache_merge.parse((self.root / "etc" / "ld.so.cache").read_bytes())
        return next(row[1] for row in rows if row[0] == name)


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Image]:
    """Return an image whose paths are resolved in one of the two ways."""
    (tmp_path / "root").mkdir()
    made = Image(tmp_path / "root")
    made.opened._has_openat2 = request.param
    yield made
    made.opened.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, f"{DEFAULTS}{DIRECTORY}\n"),
        ("/lib:/opt/lib", f"/lib\n/opt/lib\n{DIRECTORY}\n"),
        ("/lib\n/usr/lib\n", f"/lib\n/usr/lib\n{DIRECTORY}\n"),
        (f"/lib\n{DIRECTORY}", f"/lib\n{DIRECTORY}"),
        (f"/lib:{DIRECTORY}x", f"/lib\n{DIRECTORY}x\n{DIRECTORY}\n"),
        ("", ""),
        ("\n", "\n"),
        ("/a\x0cb\x85\r:/lib\n", f"/a\x0cb\x85\r\n/lib\n{DIRECTORY}\n"),
    ],
)
def test_musl_s_list_has_the_directory(image: Image, before: str | None, after: str) -> None:
    """The list is in place of the defaults, so it has these as well; an empty one is left."""
    image.path(MUSL, "")
    place = image.path(LIST, before)
    image.execute()
    assert place.read_bytes() == after.encode()
    assert place.stat().st_mode & 0o7777 == 0o644
    seen = digest(image.root)
    image.execute()
    assert digest(image.root) == seen
    assert image.warnings == []


def test_an_image_without_musl_has_no_list(image: Image) -> None:
    """And libraries of another architecture are not for its loader."""
    image.execute()
    image.path("/lib/ld-musl-aarch64.so.1", "")
    image.execute()
    assert os.listdir(image.root / "etc") == ["ld.so.cache"]


def test_directories_that_musl_searches_need_no_list(image: Image) -> None:
    """With none, its defaults are searched."""
    image.path(MUSL, "")
    image.execute(LoaderCache((CacheEntry("libx.so.1", "/usr/lib/libx.so.1", NATIVE),)))
    assert not os.path.lexists(f"{image.root}{LIST}")


@pytest.mark.parametrize("kind", ["fifo", "directory", "large", "link out", "hard link", "loop"])
def test_link_10_something_else_has_the_name_of_musl_s_list(image: Image, kind: str) -> None:
    """Replaced, or refused; never read to the end of time, never written through."""
    image.path(MUSL, "")
    victim = image.root.parent / "victim"
    victim.write_text("/must/stay")
    place = image.path(LIST)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "large":
        with place.open("wb") as stream:
            stream.truncate(1 << 40)
    elif kind == "link out":
        place.symlink_to("../" * 40 + str(victim).lstrip("/"))
    elif kind == "hard link":
        os.link(victim, place)
    else:
        place.symlink_to(place.name)
    if kind in ("fifo", "directory", "large"):
        with pytest.raises(LdcacheError, match="would not find"):
            image.execute()
    else:
        image.execute()
        assert not place.is_symlink()
        assert place.read_text().endswith(f"\n{DIRECTORY}\n")
    assert victim.read_text() == "/must/stay"
    assert not list(image.root.rglob(".gpuruntime.*"))


@pytest.mark.parametrize("name", ["ld.so.cache", "ld-musl-x86_64.path"])
@pytest.mark.parametrize("target", ["x" * 300, "/" + "y/" * 3000])
def test_link_06_a_link_to_what_no_path_can_be(image: Image, name: str, target: str) -> None:
    """It leads nowhere, and is replaced."""
    image.path(MUSL, "")
    place = image.path(f"/etc/{name}")
    place.symlink_to(target[:4000])
    image.execute()
    assert not place.is_symlink()
    assert image.warnings == []


@pytest.mark.parametrize("name", ["ld.so.cache", "ld-musl-x86_64.path"])
def test_ns_04_a_link_into_a_process_of_others(
    image: Image, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user namespace, /proc/1/root does not say where it leads, but refuses."""
    image.path(MUSL, "")
    place = image.path(f"/etc/{name}")
    place.symlink_to("/proc/1/root/etc/passwd")
    real = Root.open_path

    def refuse(root: Root, path: str) -> int:
        if path == f"/etc/{name}" and place.is_symlink():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(root, path)

    monkeypatch.setattr(Root, "open_path", refuse)
    image.execute()
    assert not place.is_symlink()
    assert image.warnings == []


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EFBIG, "remove"),
        (errno.ENOTDIR, "plain files"),
    ],
)
def test_link_13_what_to_do_is_about_what_went_wrong(
    image: Image, code: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody mounts a file system in place of making room on one."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(loader, "replace_file", fail)
    with pytest.raises(LdcacheError) as caught:
        image.execute()
    assert hint in str(caught.value.hint)


def test_a_main_file_that_leads_nowhere_is_replaced(image: Image) -> None:
    """Its ldconfig reads ours then; what the link names is not made."""
    image.path("/sbin/ldconfig", "")
    image.path("/etc/ld.so.conf").symlink_to("/nowhere")
    image.execute()
    assert (image.root / "etc/ld.so.conf").read_bytes() == drop_in.INCLUDE
    assert not os.path.lexists(image.root / "nowhere")


def _large(place: Path) -> None:
    place.write_bytes(b"#" * (drop_in.MAX_CONF_BYTES + 1))


def _sparse(place: Path) -> None:
    place.touch()
    os.truncate(place, 1 << 40)


def _loop(place: Path) -> None:
    place.symlink_to(place.name)


@pytest.mark.parametrize("spoil", [_large, _sparse, os.mkfifo, Path.mkdir, _loop])
def test_a_main_file_that_cannot_be_read_is_a_warning_that_names_it(
    image: Image, spoil: Callable[[Path], object]
) -> None:
    """The container starts: its loader has the cache. The drop-in is there for its ldconfig."""
    image.path("/sbin/ldconfig", "")
    spoil(image.path("/etc/ld.so.conf"))
    image.execute()
    (warning,) = image.warnings
    assert warning.startswith('"/etc/ld.so.conf" in the container cannot be read (')
    assert warning.endswith("after its own ldconfig has run, the driver may not be found")
    assert image.first("libx.so.1") == f"{DIRECTORY}/libx.so.1"
    assert (image.root / drop_in.DIRECTORY[1:] / drop_in.DRIVER).exists()


@pytest.mark.parametrize(
    ("line", "has_ours"),
    [
        *(("include /etc/ld.so.conf.d/*.conf", True), ("include ld.so.conf.d/*.conf", True)),
        *(
            ("include /a /etc//ld.so.conf.d/*", True),
            ("\tinclude\t/etc/ld.so.conf.d/0*u*.conf", True),
        ),
        *(("include /etc/ld.so.conf.d/x*.conf", False), ("include /etc/ld.so.conf.d/*x", False)),
        *(("# include /etc/ld.so.conf.d/*.conf", False), ("/etc/ld.so.conf.d", False)),
        *(("include /etc/ld.so.conf.d/*/*.conf", False), ("include /etc/ld.so.conf.d", False)),
        # They may have it. But that a warning comes too often is better than never.
        *(("include /etc/*/*.conf", False), ("include /etc/ld.so.conf.d/[0-9]*.conf", False)),
        ("included /etc/ld.so.conf.d/*.conf", False),
    ],
)
def test_a_main_file_without_our_directory_is_a_warning(
    image: Image, line: str, *, has_ours: bool
) -> None:
    """The container's own ldconfig would not find the driver."""
    image.path("/etc/ld.so.conf", f"{line}\n")
    image.execute()
    assert [warning.split(" in the container ")[1][:33] for warning in image.warnings] == (
        [] if has_ours else ['does not include "/etc/ld.so.conf']
    )


@pytest.mark.parametrize("content", [b"", b"\0" * 4096])
def test_a_cache_that_a_power_cut_has_emptied_is_a_warning(image: Image, content: bytes) -> None:
    """The hook does not wait for the disk. On the first start an empty one is the image's."""
    cache = image.path("/etc/ld.so.cache")
    cache.write_bytes(content)
    image.path("/sbin/ldconfig", "")
    image.execute()
    assert image.warnings == []
    cache.write_bytes(content)
    image.execute()
    (warning,) = image.warnings
    assert "is empty, as after a power cut" in warning
    assert image.first("libx.so.1") == f"{DIRECTORY}/libx.so.1"


def test_race_04_another_hook_removes_the_drop_in_first(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is gone, as it should be: two containers may start on one root at once."""
    place = image.path(f"{drop_in.DIRECTORY}/{drop_in.COMPAT}")
    place.write_bytes(drop_in.HEADS[drop_in.COMPAT])
    neighbour = image.path(f"{drop_in.DIRECTORY}/other.conf", "/opt\n")
    real = drop_in.file_content
    seen = []

    def look(dirfd: int, name: str, max_bytes: int) -> bytes | None:
        content = real(dirfd, name, max_bytes)
        place.unlink()
        seen.append(content)
        return content

    monkeypatch.setattr(drop_in, "file_content", look)
    drop_in.remove(image.opened, drop_in.COMPAT)
    assert seen == [drop_in.HEADS[drop_in.COMPAT]]
    assert list(place.parent.iterdir()) == [neighbour]
    # The control: where nobody else was, it goes as well.
    monkeypatch.undo()
    place.write_bytes(drop_in.HEADS[drop_in.COMPAT])
    drop_in.remove(image.opened, drop_in.COMPAT)
    assert list(place.parent.iterdir()) == [neighbour]


def own_cuda(image: Image, conf: str) -> bytes:
    """Give the image a library of the same name, which *conf* lists."""
    image.path(f"/etc/ld.so.conf.d/{conf}", "# of the image\n/opt/cuda\n")
    return image_cache(CacheEntry("libx.so.1", "/opt/cuda/libx.so.1", NATIVE))


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("00-cuda-compat.conf", "/opt/cuda/libx.so.1"),
        ("zz-other.conf", f"{DIRECTORY}/libx.so.1"),
        ("00-cuda-compat.conf.bak", f"{DIRECTORY}/libx.so.1"),
    ],
)
def test_what_the_image_lists_before_us_stays_first(
    image: Image, conf: str, expected: str
) -> None:
    """Its next ldconfig would come to the same."""
    cache = own_cuda(image, conf)
    image.path("/etc/ld.so.cache").write_bytes(cache)
    image.execute()
    assert image.first("libx.so.1") == expected


@pytest.mark.parametrize("kind", ["fifo", "link out", "directory", "many", "garbage"])
def test_time_01_conf_files_of_the_image_hold_nobody(
    image: Image, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is one opened that is no file, nor is everything read."""
    place = image.path("/etc/ld.so.conf.d/00-a.conf")
    outside = image.root.parent / "conf"
    outside.write_text("/opt/cuda\n")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "link out":
        place.symlink_to("../" * 40 + str(outside).lstrip("/"))
        # Control: by its string, it is the file outside.
        assert place.read_text() == "/opt/cuda\n"
    elif kind == "many":
        monkeypatch.setattr(drop_in, "_MAX_FILES", 3)
        for number in range(4):
            image.path(f"/etc/ld.so.conf.d/00-{number}.conf", "/opt/cuda\n")
    else:
        place.write_bytes(b"/opt/\xff\n/a b\n/a:/b\ninclude *.conf\n/a/../b\n\0\n")
    assert drop_in.listed_before(image.opened) == []
    image.execute()
    assert image.first("libx.so.1") == f"{DIRECTORY}/libx.so.1"


def test_names_of_conf_files_are_read_before_ours(image: Image) -> None:
    """Several, comments apart, and not the one that we write ourselves."""
    image.path("/etc/ld.so.conf.d/00-a.conf", "/opt/a\n # x\n /opt/b \n")
    image.path("/etc/ld.so.conf.d/00-b.conf", "/opt/c")
    image.path(f"/etc/ld.so.conf.d/{drop_in.COMPAT}", "/opt/d\n")
    assert drop_in.listed_before(image.opened) == ["/opt/a", "/opt/b", "/opt/c"]


def test_time_01_no_more_conf_files_are_read_than_images_have(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have 64 KiB; those that its ldconfig scans first count."""
    for number in range(40):
        image.path(f"/etc/ld.so.conf.d/00-{number:02}.conf", f"/opt/{number}\n")
    real = drop_in.file_content
    read = []

    def look(dirfd: int, name: str, max_bytes: int) -> bytes | None:
        read.append(name)
        assert max_bytes <= 64 << 10
        return real(dirfd, name, max_bytes)

    monkeypatch.setattr(drop_in, "file_content", look)
    assert drop_in.listed_before(image.opened) == [f"/opt/{number}" for number in range(16)]
    assert read == [f"00-{number:02}.conf" for number in range(16)]


@pytest.mark.parametrize(("bytes_more", "expected"), [(0, ["/opt/a"]), (1, [])])
def test_time_01_a_conf_file_that_is_too_large_lists_nothing(
    image: Image, bytes_more: int, expected: list[str]
) -> None:
    """It is not read to its end."""
    text = "/opt/a\n".ljust((64 << 10) + bytes_more, "\n")
    image.path("/etc/ld.so.conf.d/00-a.conf", text)
    assert drop_in.listed_before(image.opened) == expected


@pytest.mark.parametrize("maker", ["hook", "ldconfig"])
def test_an_image_of_a_gpu_container_has_no_empty_libraries(image: Image, maker: str) -> None:
    """The first had video as well, and its mount targets are in the image: "file too short"."""
    names = ("libcuda.so.1", "libnvidia-encode.so.1", "libnvidia-ml.so.1", "libother.so.1")
    entries = {name: CacheEntry(name, f"{DIRECTORY}/{name}", NATIVE) for name in names}
    for name in names:
        image.path(f"{DIRECTORY}/{name}").symlink_to(f"{name}.550.54")
        image.path(f"{DIRECTORY}/{name}.550.54", "of the image" if "-ml" in name else "")
    if maker == "hook":
        image.execute(LoaderCache(tuple(entries.values())))
    else:
        image.path("/etc/ld.so.cache").write_bytes(image_cache(*entries.values()))
    image.execute(LoaderCache((entries["libcuda.so.1"],)))
    # What it has now, what is no empty file, and what is not the driver's.
    left = {name for name in names if os.path.lexists(f"{image.root}{DIRECTORY}/{name}")}
    assert left == {*names} - {"libnvidia-encode.so.1"}
    assert image.first("libcuda.so.1") == entries["libcuda.so.1"].path
    assert image.warnings == []


def test_before_the_mounts_empty_files_are_targets(image: Image) -> None:
    """Ahead of the low-level runtime nobody knows what will be mounted on them."""
    entry = CacheEntry("libnvidia-encode.so.1", f"{DIRECTORY}/libnvidia-encode.so.1", NATIVE)
    place = image.path(entry.path, "")
    image.execute(LoaderCache((entry,)))
    image.execute(LoaderCache(CACHE.entries, may_cover=False))
    assert place.exists()
