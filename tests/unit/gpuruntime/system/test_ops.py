# SPDX-License-Identifier: Apache-2.0
"""The hook's operations below a root that somebody else filled, by openat2 and by the walk.

LINK-01 to LINK-13 of the attack catalogue without a container; tests/system has them with one.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hostile.canary import digest

from gpuruntime.errors import LdcacheError, MountError
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry
from gpuruntime.system import drop_in, ops
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.ops import DeviceLink, Link, MaskParams
from gpuruntime.system.paths import Root

if TYPE_CHECKING:
    from gpuruntime.system.operation import Operation

DIRECTORY = "/usr/lib/x86_64-linux-gnu"
NATIVE = ABI_FLAGS["x86-64"]
CACHE = LoaderCache((CacheEntry("libx.so.1", f"{DIRECTORY}/libx.so.1", NATIVE),))
IN_DEFAULT = LoaderCache((CacheEntry("libx.so.1", "/usr/lib64/libx.so.1", NATIVE),))
LINK = Link(f"{DIRECTORY}/libx.so.1", "libx.so.1.2")


class Image:
    """A root, the tree of somebody else beside it, and the warnings."""

    def __init__(self, work: Path, *, has_openat2: bool) -> None:
        self.work = work
        self.root = work / "root"
        self.outside = work / "outside"
        for directory in (self.root / "etc", self.outside / "deep"):
            directory.mkdir(parents=True)
        self.victim = self.outside / "victim"
        self.victim.write_text("must stay")
        self.victim.chmod(0o640)
        self.opened = Root(str(self.root))
        self.opened._has_openat2 = has_openat2
        self.warnings: list[str] = []

    def execute(self, operation: Operation) -> None:
        """Carry *operation* out."""
        operation.execute(self.opened, self.warnings.append)

    def path(self, name: str) -> Path:
        """Return the place of *name* on the host, its directories made."""
        place = Path(f"{self.root}{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def others(self) -> dict[str, tuple[object, ...]]:
        """Return what is outside of the root."""
        return digest(self.work, self.root)

    def left_behind(self) -> list[Path]:
        """Return temporary names in the root."""
        return list(self.root.rglob(".gpuruntime.*"))


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Image]:
    """Return an image whose paths are resolved in one of the two ways."""
    made = Image(tmp_path, has_openat2=request.param)
    yield made
    made.opened.close()


def climb(path: Path) -> str:
    """Return a link target that leads to *path* from anywhere, if it may leave."""
    return "../" * 40 + str(path).lstrip("/")


@pytest.mark.parametrize("form", [str, climb], ids=["absolute", "climbing"])
@pytest.mark.parametrize("place", ["/usr", "/usr/lib", DIRECTORY])
def test_link_12_a_parent_that_leads_out_stays_inside(
    image: Image, place: str, form: Callable[[Path], str]
) -> None:
    """The container sees the link where its own names lead, or nothing is made at all."""
    link = image.path(place)
    link.symlink_to(form(image.outside))
    before = image.others()
    try:
        image.execute(LINK)
    except MountError:
        assert not list(image.root.rglob("libx.so.1"))
    else:
        assert [str(found.readlink()) for found in image.root.rglob("libx.so.1")] == [LINK.target]
    assert image.others() == before
    # Control: by its string, the same place is outside.
    Path(f"{image.root}{LINK.path}").parent.mkdir(parents=True, exist_ok=True)
    Path(f"{image.root}{LINK.path}").symlink_to(LINK.target)
    assert image.others() != before


def standing(kind: str, place: Path, image: Image) -> None:
    """Put something of *kind* where the link must be."""
    if kind == "file":
        place.write_text("of the image")
    elif kind == "hard link":
        os.link(image.victim, place)
    elif kind == "link out":
        place.symlink_to(image.victim)
    elif kind == "climbing link":
        place.symlink_to(climb(image.victim))
    elif kind == "dangling link":
        place.symlink_to("/nowhere")
    elif kind == "link to itself":
        place.symlink_to(place.name)
    elif kind == "fifo":
        os.mkfifo(place)


KINDS = [
    *("nothing", "file", "hard link", "link out", "climbing link", "dangling link"),
    *("link to itself", "fifo"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_link_12_what_stands_in_the_place_is_replaced(image: Image, kind: str) -> None:
    """Never written through: only the image's own name goes."""
    place = image.path(LINK.path)
    standing(kind, place, image)
    content = image.victim.read_text(), image.victim.stat().st_mode, image.victim.stat().st_ino
    image.execute(LINK)
    assert str(place.readlink()) == LINK.target
    after = image.victim.read_text(), image.victim.stat().st_mode, image.victim.stat().st_ino
    assert after == content
    assert image.left_behind() == []


def test_link_12_a_directory_in_the_place_is_refused(image: Image) -> None:
    """It may hold files of the image; nothing of it goes, and no temporary name stays."""
    place = image.path(LINK.path)
    place.mkdir()
    (place / "file").write_text("of the image")
    with pytest.raises(MountError, match="Is a directory"):
        image.execute(LINK)
    assert (place / "file").read_text() == "of the image"
    assert image.left_behind() == []


def test_link_12_a_correct_link_is_left_alone(image: Image) -> None:
    """A restarted container writes nothing into its layer again."""
    image.execute(LINK)
    before = digest(image.root)
    image.execute(LINK)
    assert digest(image.root) == before


@pytest.mark.parametrize("parent", ["file", "fifo", "link to a file", "loop"])
def test_link_12_a_parent_that_is_no_directory_is_refused(image: Image, parent: str) -> None:
    """One line says which place it was."""
    place = image.path("/usr/lib")
    if parent == "file":
        place.write_text("")
    elif parent == "fifo":
        os.mkfifo(place)
    elif parent == "loop":
        place.symlink_to("/usr/lib")
    else:
        image.path("/file").write_text("")
        place.symlink_to("/file")
    with pytest.raises(MountError, match=LINK.path):
        image.execute(LINK)


NAMES = ["/etc/ld.so.cache", "/etc/ld.so.cache~", f"/etc/ld.so.conf.d/{drop_in.DRIVER}"]


@pytest.mark.parametrize("kind", ["hard link", "link out", "climbing link", "dangling link"])
@pytest.mark.parametrize("name", NAMES)
def test_link_04_link_09_names_that_we_write_lead_out(image: Image, name: str, kind: str) -> None:
    """The cache and the drop-in are new files, whatever had their names."""
    image.path("/sbin/ldconfig").write_text("")
    standing(kind, image.path(name), image)
    before = image.victim.read_text(), image.victim.stat().st_mode, image.victim.stat().st_ino
    image.execute(CACHE)
    assert (
        image.victim.read_text(), image.victim.stat().st_mode, image.victim.stat().st_ino,
    ) == before  # fmt: skip
    cache = image.root / "etc" / "ld.so.cache"
    assert not cache.is_symlink()
    assert b"libx.so.1\0" in cache.read_bytes()
    assert cache.stat().st_mode & 0o7777 == 0o644
    assert sorted(os.listdir(image.outside)) == ["deep", "victim"]
    assert image.left_behind() == []


@pytest.mark.parametrize("form", [str, climb], ids=["absolute", "climbing"])
@pytest.mark.parametrize("place", ["/etc", "/etc/ld.so.conf.d"])
def test_link_03_directories_that_we_write_into_lead_out(
    image: Image, place: str, form: Callable[[Path], str]
) -> None:
    """Inside, or not at all with one line."""
    image.path("/sbin/ldconfig").write_text("")
    link = image.path(place)
    if link.is_dir():
        link.rmdir()
    link.symlink_to(form(image.outside))
    before = image.others()
    try:
        image.execute(CACHE)
    except LdcacheError as error:
        said = error.message
    else:
        said = ""
    assert "\n" not in said
    assert image.others() == before
    assert image.left_behind() == []


@pytest.mark.parametrize("kind", ["fifo", "directory", "sparse", "garbage"])
def test_link_10_a_cache_that_is_none_fails_closed_at_once(image: Image, kind: str) -> None:
    """It would block, fill the memory or be lost; the loader would not find the library."""
    cache = image.path("/etc/ld.so.cache")
    if kind == "fifo":
        os.mkfifo(cache)
    elif kind == "directory":
        cache.mkdir()
    elif kind == "sparse":
        with cache.open("wb") as stream:
            stream.truncate(1 << 40)
    else:
        cache.write_bytes(os.urandom(5000))
    before = digest(cache) if kind != "sparse" else {}
    if kind == "garbage":
        image.execute(CACHE)
        assert b"libx.so.1\0" in cache.read_bytes()
        return
    with pytest.raises(LdcacheError, match=DIRECTORY):
        image.execute(CACHE)
    assert kind == "sparse" or digest(cache) == before
    # A directory that only some loaders search is none that this image's searches.
    with pytest.raises(LdcacheError, match="would not"):
        image.execute(IN_DEFAULT)
    # Where the loader searches the directory by itself, the container may start.
    image.path("/usr/lib64").mkdir(parents=True, exist_ok=True)
    image.path("/usr/lib64/libc.so.6").write_text("")
    image.execute(IN_DEFAULT)
    assert image.warnings
    assert image.left_behind() == []


def test_the_second_start_changes_nothing(image: Image) -> None:
    """Of cache, drop-in and links; a container's layer does not grow with its restarts."""
    image.path("/sbin/ldconfig").write_text("")
    for operation in (LINK, CACHE):
        image.execute(operation)
    before = digest(image.root)
    for operation in (LINK, CACHE):
        image.execute(operation)
    assert digest(image.root) == before


def test_an_image_without_ldconfig_has_no_drop_in(image: Image) -> None:
    """Nobody would read it."""
    image.execute(CACHE)
    assert os.listdir(image.root / "etc") == ["ld.so.cache"]


def test_an_image_without_etc_becomes_one_with_a_cache(image: Image) -> None:
    """A FROM scratch image has no directory at all."""
    (image.root / "etc").rmdir()
    image.execute(CACHE)
    assert b"libx.so.1\0" in (image.root / "etc" / "ld.so.cache").read_bytes()


def test_params_are_left_where_the_host_has_none(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without the driver's /proc cannot be masked, and need not be."""
    monkeypatch.setattr(ops, "PARAMS", str(image.work / "missing"))
    before = digest(image.root)
    image.execute(MaskParams())
    assert digest(image.root) == before


def test_link_07_an_image_without_the_drivers_proc_needs_no_mask(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its libraries find no params there; with a link there, see tests/system."""
    (image.outside / "params").write_text("ModifyDeviceFiles: 1\n")
    monkeypatch.setattr(ops, "PARAMS", str(image.outside / "params"))
    before = image.others()
    image.execute(MaskParams())
    assert image.others() == before
    assert os.listdir(image.root) == ["etc"]


CODES = sorted(errno.errorcode)


@pytest.mark.parametrize("step", ["host", "container"])
def test_link_13_a_mask_that_cannot_be_mounted_is_refused(
    image: Image, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel answers: the container's libraries would make nodes of other GPUs."""
    code = 0

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if step == "host":
        monkeypatch.setattr(ops, "_masked_params", fail)
    else:
        monkeypatch.setattr(ops, "_masked_params", lambda: b"ModifyDeviceFiles: 0\n")
        monkeypatch.setattr(ops.mounts, "cover", fail)
    for code in CODES:
        with pytest.raises(MountError, match="cannot mask") as caught:
            image.execute(MaskParams())
        assert os.strerror(code) in caught.value.message
    assert image.warnings == []


def test_link_13_a_link_that_cannot_be_made_is_refused(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel answers, but that somebody has mounted what is to be there."""
    code = 0

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(ops, "replace_link", fail)
    for code in CODES:
        if code != errno.EBUSY:
            with pytest.raises(MountError, match="cannot link"):
                image.execute(LINK)
    assert image.warnings == []


PROFILE = f"{ops.PROFILES}/{ops.PROFILE}"


def nodes(image: Image, *minors: int) -> None:
    """Give the container GPUs; without root their nodes cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mknod")
    (image.root / "dev").mkdir(exist_ok=True)
    for minor in minors:
        os.mknod(image.root / "dev" / f"nvidia{minor}", 0o020666, os.makedev(195, minor))


@pytest.mark.parametrize(
    ("minors", "mask"),
    [((0,), "0x1"), ((1, 3), "0xa"), ((63,), f"0x8{'0' * 15}"), ((0, 64), "0x1")],
)
def test_the_profile_lists_the_gpus(image: Image, minors: tuple[int, ...], mask: str) -> None:
    """By the bits of their minor numbers, in the driver's own dialect of JSON."""
    nodes(image, *minors)
    for name in ("nvidia0x", "nvidiactl", "xnvidia1", "nvidia"):
        (image.root / "dev" / name).touch()
    os.mknod(image.root / "dev" / "nvidia9", 0o060666, os.makedev(195, 9))
    (image.root / "dev" / "nvidia8").touch()
    (image.root / "dev" / "nvidia7").symlink_to("nvidia63")
    image.execute(ops.ApplicationProfile())
    place = Path(f"{image.root}{PROFILE}")
    assert place.read_text() == (
        '{"profiles": [{"name": "_container_", "settings": ["EGLVisibleDGPUDevices", '
        + mask
        + ']}], "rules": [{"pattern": [], "profile": "_container_"}]}'
    )
    assert place.stat().st_mode & 0o7777 == 0o444
    assert [d.stat().st_mode & 0o7777 for d in (place.parent, place.parent.parent)] == [0o555] * 2
    assert len(image.warnings) == (1 if 64 in minors else 0)
    before = digest(image.root)
    image.execute(ops.ApplicationProfile())
    assert digest(image.root) == before
    (image.root / "dev" / f"nvidia{minors[0]}").unlink()
    nodes(image, 5)
    image.execute(ops.ApplicationProfile())
    assert digest(image.root) != before


def test_without_gpus_there_is_no_profile(image: Image) -> None:
    """Nor without /dev, nor with GPUs that have no bit."""
    image.execute(ops.ApplicationProfile())
    assert os.listdir(image.root) == ["etc"]
    nodes(image, 64, 255)
    image.execute(ops.ApplicationProfile())
    assert os.listdir(image.root / "etc") == []


@pytest.mark.parametrize("place", ["/etc", "/etc/nvidia", ops.PROFILES, "/dev"])
def test_link_03_link_07_directories_of_the_profile_lead_out(image: Image, place: str) -> None:
    """What is outside has neither our GPUs nor our file; a warning is enough."""
    nodes(image, 0)
    os.mknod(image.outside / "nvidia0", 0o020666, os.makedev(195, 0))
    if place == "/dev":
        (image.root / "dev" / "nvidia0").unlink()
    link = image.path(place)
    if link.is_dir():
        link.rmdir()
    link.symlink_to(climb(image.outside))
    before = image.others()
    image.execute(ops.ApplicationProfile())
    assert image.others() == before
    assert not list(image.root.rglob(ops.PROFILE))
    # Control: by its string, the place is outside.
    assert link.resolve() == image.outside.resolve()


@pytest.mark.parametrize("kind", ["hard link", "link out", "climbing link", "fifo", "file"])
def test_link_09_something_else_has_the_name_of_the_profile(image: Image, kind: str) -> None:
    """Replaced, never written through."""
    nodes(image, 0)
    standing(kind, image.path(PROFILE), image)
    image.execute(ops.ApplicationProfile())
    assert image.victim.read_text() == "must stay"
    assert image.path(PROFILE).read_text().startswith('{"profiles"')
    assert image.warnings == image.left_behind() == []


def test_link_10_a_directory_has_the_name_of_the_profile(image: Image) -> None:
    """It stays, with a warning: without the profile a container works."""
    nodes(image, 0)
    image.path(f"{PROFILE}/file").touch()
    image.execute(ops.ApplicationProfile())
    assert "Is a directory" in image.warnings[0]
    assert image.left_behind() == []


def test_a_mode_is_changed_in_the_root(image: Image) -> None:
    """Links are followed there; what is not there, or has the mode, is left."""
    place = image.path("/dev/dri")
    place.mkdir(mode=0o700)
    image.path("/link").symlink_to("/dev")
    image.execute(ops.Chmod("/link/dri", 0o755))
    assert place.stat().st_mode & 0o7777 == 0o755
    before = place.stat().st_ctime_ns
    image.execute(ops.Chmod("/dev/dri", 0o755))
    assert place.stat().st_ctime_ns == before
    image.execute(ops.Chmod("/dev/dri", 0o1755))
    assert place.stat().st_mode & 0o7777 == 0o1755
    image.execute(ops.Chmod("/missing/file", 0o755))
    assert image.warnings == []
    assert "1755" in ops.Chmod("/dev/dri", 0o1755).describe()


@pytest.mark.parametrize("kind", ["hard link", "link out", "climbing link", "dangling link"])
def test_link_01_link_09_modes_outside_stay(image: Image, kind: str) -> None:
    """The incumbent joins the path, and the link is followed to the host."""
    place = image.path("/dev/dri")
    standing(kind, place, image)
    before = image.victim.stat().st_mode
    image.execute(ops.Chmod("/dev/dri", 0o777))
    assert image.victim.stat().st_mode == before
    if kind != "dangling link":
        # Control: by its string, it is the file of somebody else.
        place.chmod(0o777)
        assert image.victim.stat().st_mode != before


def test_b076_a_mode_that_cannot_be_changed_is_a_warning(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind-mounted /dev in a user namespace must not keep the container from starting."""
    image.path("/dev/loop").symlink_to("loop")
    image.execute(ops.Chmod("/dev/loop", 0o755))
    assert "/dev/loop" in image.warnings.pop()
    place = image.path("/dev/dri")
    place.mkdir(mode=0o700)
    chattr = subprocess.run(["chattr", "+i", place], check=False, capture_output=True)
    if os.geteuid() != 0 or chattr.returncode:
        pytest.skip("needs root, and a file system with the immutable flag")
    try:
        image.execute(ops.Chmod("/dev/dri", 0o755))
    finally:
        subprocess.run(["chattr", "-i", place], check=True)
    assert "not permitted" in image.warnings.pop()
    assert place.stat().st_mode & 0o7777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: chattr")
@pytest.mark.parametrize("flag", ["a", "i"])
def test_link_13_a_directory_that_does_not_change_is_refused(image: Image, flag: str) -> None:
    """Closed, and no temporary name stays in it."""
    place = image.path(LINK.path).parent
    place.joinpath("libx.so.1").write_text("of the image")
    if subprocess.run(["chattr", f"+{flag}", place], check=False, capture_output=True).returncode:
        pytest.skip("the file system has no such flag")
    try:
        with pytest.raises(MountError, match="not permitted"):
            image.execute(LINK)
        assert os.listdir(place) == ["libx.so.1"]
    finally:
        subprocess.run(["chattr", f"-{flag}", place], check=True)


@pytest.mark.parametrize("target", ["../card1", "/dev/dri/card1"])
def test_a_link_to_a_node_is_made_with_its_directory(image: Image, target: str) -> None:
    """The directory is in no container: it is made for the links, of which there are several."""
    image.path("/dev/dri/card1").touch()
    for name in ("pci-0000:1a:00.0-card", "pci-0000:1a:00.0-render"):
        image.execute(DeviceLink(f"/dev/dri/by-path/{name}", target))
        assert os.readlink(image.path(f"/dev/dri/by-path/{name}")) == target
    assert image.warnings == []


def test_a_link_to_a_node_of_another_container_is_not_made(image: Image) -> None:
    """The common edits of a spec have the links of all its GPUs."""
    image.path("/dev/dri/card1").touch()
    image.execute(DeviceLink("/dev/dri/by-path/pci-0000:1b:00.0-card", "../card2"))
    assert os.listdir(image.path("/dev/dri/card1").parent) == ["card1"]


def test_a_link_to_a_node_that_cannot_be_made_is_left_out(image: Image) -> None:
    """The container has the node all the same."""
    image.path("/dev/dri/card1").touch()
    image.path("/dev/dri/by-path").touch()
    image.execute(DeviceLink("/dev/dri/by-path/pci-0000:1a:00.0-card", "../card1"))
    (warning,) = image.warnings
    assert warning.startswith('left out: cannot link "/dev/dri/by-path/pci-0000:1a:00.0-card"')
