# SPDX-License-Identifier: Apache-2.0
"""Links of an image that lead onto mounts: volumes, /proc and /sys are not the image's to name.

The real hook, with its filter, on a root with mounts, in a mount namespace of its own.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hostile.canary import digest
from scenarios.machine import TREE

pytestmark = pytest.mark.system("unshare", "mount")
HOOK = TREE / ".venv/bin/gpu-cdi-hook"
DIRECTORY = "/usr/lib/x86_64-linux-gnu"
LIBRARY = ("--library", f"libx.so.1::{DIRECTORY}/libx.so.1::x86-64")
LINK = ("--link", f"libx.so.1.2::{DIRECTORY}/libx.so.1")
MUSL = "ld-musl-x86_64"
SECRET = "SECRET of a file that only root may read\n"
SYSFS = Path("/sys/kernel/uevent_seqnum")
START = 'cd "$1"; shift; mount --bind rootfs rootfs; '
CALL = '; "$@" < state; echo "status $?"'


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a directory with a bundle, and a host's directory that is a volume."""
    for name in ("data", "rootfs/data", "rootfs/proc", "rootfs/sys", "rootfs/dev", "rootfs/usr"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data/ld.so.cache").write_text("the host's own")
    secret = tmp_path / "data/secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    (tmp_path / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    (tmp_path / "state").write_text(json.dumps({"bundle": str(tmp_path)}))
    return tmp_path


def play(
    work: Path, mounts: str, *arguments: str, wrapper: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run the hook with *arguments* after the commands *mounts*; return its status and words."""
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--propagation", "private", "--",
         "sh", "-e", "-c", START + mounts + CALL.replace(";", "; set +e;", 1), "sh", str(work),
         *wrapper, str(HOOK), "update-container", *arguments],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return int(done.stdout.rpartition(" ")[2]), done.stderr


@pytest.mark.catalogue("LINK-11", "LINK-03")
@pytest.mark.parametrize("image", ["etc", "etc/ld.so.conf.d", DIRECTORY[1:], "usr/lib"])
def test_link_11_a_link_onto_a_volume_is_not_written_through(work: Path, image: str) -> None:
    """As root the hook may write where the container's user may not."""
    place = work / "rootfs" / image
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to("/data")
    if image == "etc/ld.so.conf.d":
        # Somebody has to read it.
        (work / "rootfs/etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    before = digest(work / "data")
    status, said = play(work, "mount --bind data rootfs/data", *LINK, *LIBRARY)
    assert status == 1
    assert "another mount" in said or "leads to a volume" in said
    assert digest(work / "data") == before


@pytest.mark.catalogue("LINK-11")
@pytest.mark.parametrize("volume", ["etc", "usr", "usr/lib", DIRECTORY[1:]])
def test_link_11_a_volume_where_the_path_is_is_written_to(work: Path, volume: str) -> None:
    """That is for whoever mounts it to decide; also where links in it stay in it."""
    (work / "rootfs" / volume).mkdir(parents=True, exist_ok=True)
    inside = {"usr": "lib", "usr/lib": DIRECTORY.rpartition("/")[2]}.get(volume)
    if inside:
        (work / "data/real").mkdir()
        (work / "data" / inside).symlink_to("real")
    status, said = play(work, f"mount --bind data rootfs/{volume}", *LINK, *LIBRARY)
    assert (status, said) == (0, "")
    root = {"etc": work / "rootfs"}.get(volume, work / "data")
    assert "libx.so.1" in [path.name for path in root.rglob("*")]


@pytest.mark.parametrize(
    ("link", "target", "volume", "directory"),
    [
        ("lib", "usr/lib", "usr", "/lib/x86_64-linux-gnu"),
        ("lib", "usr/lib", "usr/lib", "/lib/x86_64-linux-gnu"),
        ("usr/lib64", "lib", "usr/lib", "/usr/lib64"),
        ("lib64", "usr/lib64", "usr/lib64", "/lib64/gpu"),
        ("var/run", "../run", "run", "/var/run/gpu"),
    ],
)
def test_a_volume_where_distributions_have_links(
    work: Path, link: str, target: str, volume: str, directory: str
) -> None:
    """Images with a merged /usr are most of them."""
    root = work / "rootfs"
    for path in (root / link, root / volume):
        path.parent.mkdir(parents=True, exist_ok=True)
    (root / volume).mkdir(exist_ok=True)
    (root / link).symlink_to(target)
    (work / "data/lib").mkdir()
    words = ("--link", f"libx.so.1.2::{directory}/libx.so.1")
    assert play(work, f"mount --bind data rootfs/{volume}", *words) == (0, "")
    assert "libx.so.1" in [path.name for path in (work / "data").rglob("*")]


@pytest.mark.catalogue("LINK-10")
@pytest.mark.parametrize("target", ["/data/secret", "/proc/keys", "/proc/self/status", "/own"])
def test_link_10_what_is_behind_musl_s_list_is_not_copied(work: Path, target: str) -> None:
    """The new list can be read by everybody in the container."""
    root = work / "rootfs"
    for name in ("etc", "lib"):
        (root / name).mkdir()
    (root / f"lib/{MUSL}.so.1").touch()
    (root / "own").write_text(SECRET)
    (root / "own").chmod(0o600)
    (root / f"etc/{MUSL}.path").symlink_to(target)
    mounts = "mount --bind data rootfs/data; mount -t proc proc rootfs/proc"
    play(work, mounts, *LIBRARY)
    found = root / f"etc/{MUSL}.path"
    assert found.is_symlink() or "SECRET" not in found.read_text()
    assert found.is_symlink() or ":" not in found.read_text()


@pytest.mark.catalogue("LINK-10")
@pytest.mark.system("strace")
def test_link_10_a_file_of_the_kernel_s_is_not_read(work: Path) -> None:
    """To read it may do something: /proc/kmsg loses what was read."""
    (work / "rootfs/etc").mkdir()
    (work / "rootfs/etc/ld.so.cache").symlink_to("/proc/keys")
    trace = work / "trace"
    wrapper = ("strace", "-f", "-y", "-e", "trace=openat,read,pread64,statx", "-o", str(trace))
    mounts = "mount -t proc proc rootfs/proc"
    assert play(work, mounts, *LIBRARY, wrapper=wrapper)[0] == 0
    text = trace.read_text()
    # The control: it is the process that works in the root.
    assert "statx(" in text
    assert "/proc/keys>" not in text
    assert b"libx.so.1" in (work / "rootfs/etc/ld.so.cache").read_bytes()


@pytest.mark.catalogue("LINK-12")
def test_link_12_the_mode_of_what_is_on_the_container_s_own_mount(work: Path) -> None:
    """As /dev is; the hook's filter has every call for it."""
    mounts = "mount -t tmpfs x rootfs/dev; mkdir -m 700 rootfs/dev/dri"
    after = '; stat -c "mode %a" rootfs/dev/dri >&2'
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c",
         START + mounts + CALL + after, "sh", str(work), str(HOOK), "update-container",
         "--chmod", "755::/dev/dri"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("status 0\n", "mode 755\n")


@pytest.mark.catalogue("LINK-12")
@pytest.mark.parametrize("mode", ["none", "host"])
def test_link_12_the_mode_of_what_is_in_sys_stays(work: Path, mode: str) -> None:
    """A network namespace has a /sys of its own, whose files are the host's all the same."""
    (work / "rootfs/opt").symlink_to("/sys/kernel")
    before = stat.S_IMODE(SYSFS.stat().st_mode)
    try:
        status, said = play(
            work, "mount -t sysfs sysfs rootfs/sys",
            "--ldconfig-mode", mode, *LIBRARY, "--chmod", "440::/opt/uevent_seqnum",
        )  # fmt: skip
        assert status == 0
        assert "keeps its mode" in said
        assert stat.S_IMODE(SYSFS.stat().st_mode) == before
    finally:
        os.chmod(SYSFS, before)


COVER = """
from gpuruntime.system import mounts
from gpuruntime.system.paths import Root
print(mounts.cover(Root("rootfs"), "/dev/params", b"x", 0o444))
"""


@pytest.mark.catalogue("NS-01")
@pytest.mark.parametrize("propagation", ["private", "shared"])
def test_ns_01_no_mount_of_the_host_s_stops_sharing(work: Path, propagation: str) -> None:
    """Where the root is a directory like any other, what it is in is not the container's."""
    (work / "rootfs/dev/params").touch()
    script = 'cd "$1"; shift; ("$@" 2>&1) | tail -n 1; grep " / / " /proc/self/mountinfo'
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", propagation, "--", "sh", "-c", script, "sh",
         str(work), sys.executable, "-c", COVER],
        capture_output=True, text=True, check=True, timeout=60, env={"PYTHONPATH": str(TREE)},
    )  # fmt: skip
    said, mount = done.stdout.splitlines()
    assert (" shared:" in mount) is (propagation == "shared")
    assert (said == "True") is (propagation == "private")


BIND = """
import sys
from gpuruntime.system.bind import BindMount
from gpuruntime.system.paths import Root
BindMount("/etc/os-release", "/opt/made", ("ro",)).execute(Root("rootfs"), print)
"""


@pytest.mark.catalogue("LINK-06", "LINK-11")
@pytest.mark.parametrize(
    ("opt", "target", "is_mounted"),
    [("../data", None, False), (None, "/data/missing", False), (None, "/data/deep/made", False),
     # Nothing is made, and a mount is the container's own affair.
     (None, "/data/secret", True), (None, "/usr/new", True), (None, None, True)],
)  # fmt: skip
def test_link_11_what_the_prestart_hook_mounts_on_is_made_on_no_volume(
    work: Path, opt: str | None, target: str | None, *, is_mounted: bool
) -> None:
    """Whichever name of it is a link."""
    root = work / "rootfs"
    if opt:
        (root / "opt").symlink_to(opt)
    else:
        (root / "opt").mkdir()
    if target:
        (root / "opt/made").symlink_to(target)
    (root / "usr/new").touch()
    (work / "data/deep").mkdir()
    before = digest(work / "data")
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", "sh", "-e", "-c",
         START + 'mount --bind data rootfs/data; exec "$@"', "sh", str(work),
         sys.executable, "-c", BIND],
        capture_output=True, text=True, check=False, timeout=60, env={"PYTHONPATH": str(TREE)},
    )  # fmt: skip
    assert (done.returncode == 0) is is_mounted, done.stderr
    assert digest(work / "data") == before
