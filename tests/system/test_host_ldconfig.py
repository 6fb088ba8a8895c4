# SPDX-License-Identifier: Apache-2.0
"""The host's ldconfig in its sandbox, on roots that an attacker wrote.

NS-03, EXE-03, EXEC-01 to EXEC-04, FD-01, LINK-04, LINK-07, LINK-09 and TIME-01 of the attack
catalogue.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import cases
from hostile.canary import digest

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry
from gpuruntime.system import drop_in
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.paths import Root

pytestmark = pytest.mark.system("gcc", "ldconfig")
HOSTILE = Path(__file__).parents[1] / "hostile"
TINY = Path(__file__).parents[1] / "data" / "elf" / "libtiny-x86-64.so"
LDCONFIG = "/sbin/ldconfig"
FOUND = "libtiny.so.1 /usr/lib/libtiny.so.1"
OURS = CacheEntry("libx.so.1", "/opt/driver/libx.so.1", ABI_FLAGS["x86-64"])
ALL_SEALS = 0xF
# What the kernel calls them → soft and hard.
LIMITS = {
    "cpu time": 5,
    "file size": 64 << 20,
    "core file size": 0,
    "processes": 1,
    "open files": 64,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with one library that ldconfig finds, beside a victim."""
    made = tmp_path / "root"
    for name in ("etc/ld.so.conf.d", "proc", "usr/lib", "lib"):
        (made / name).mkdir(parents=True)
    shutil.copy(TINY, made / "usr/lib/libtiny.so.1")
    (made / "etc/ld.so.conf").write_bytes(drop_in.INCLUDE)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("must stay")
    return made


@pytest.fixture(scope="module")
def pretender(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a program that says what it may do in ldconfig's place."""
    return cases.build_pretender(tmp_path_factory.mktemp("program"))


def command_of(root: Path, program: str, deadline: float) -> list[str]:
    """Return the command that runs *program* in its sandbox."""
    return [sys.executable, str(HOSTILE / "sandboxed.py"), str(root), program, str(deadline)]


def run(root: Path, program: str = LDCONFIG, deadline: float = 5) -> dict[str, Any]:
    """Run *program*, and see that nothing but its result has changed; return that."""
    before = digest(root.parent)
    done = subprocess.run(
        command_of(root, program, deadline), capture_output=True, text=True, check=False,
        timeout=30, env={"MARK": "1", "LD_PRELOAD": ""}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert digest(root.parent) == before
    assert str(root.parent) not in Path("/proc/self/mountinfo").read_text()
    assert sandboxes() == []
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def sandboxes() -> list[int]:
    """Return the processes that run a sealed copy of a program of ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/exe"):
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith("/memfd:ldconfig"):
                found.append(int(path.parent.name))
    return found


def test_it_makes_the_cache_and_nothing_else(root: Path) -> None:
    """Of the directories that ldconfig searches and those that the image lists."""
    (root / "opt").mkdir()
    shutil.copy(TINY, root / "opt" / "libtiny.so.1")
    assert run(root)["names"] == [FOUND]
    (root / "etc/ld.so.conf.d/a.conf").write_text("/opt\n")
    assert run(root)["names"] == ["libtiny.so.1 /opt/libtiny.so.1", FOUND]


def test_ns_03_fd_01_what_it_may_do(root: Path, pretender: str) -> None:
    """Without variables, descriptors or anything that can be written."""
    seen = run(root, pretender)
    assert seen["refused"] == ""
    assert seen["text"] == "seen environ=0 fds=3 write=EROFS mkdir=EROFS self=ENOENT call=none"


CALLS = {"mount": "m", "chroot": "c", "sethostname": "h", "mknod": "k", "setuid": "u"}


@pytest.mark.parametrize("name", [*CALLS, "socket"])
def test_ns_03_what_ends_it(root: Path, pretender: str, name: str) -> None:
    """A call that no ldconfig makes, by the kernel."""
    (root / "asks").write_text({**CALLS, "socket": "s"}[name])
    assert f"status {256 - signal.SIGSYS}" in run(root, pretender)["refused"]


@pytest.mark.parametrize("name", CALLS)
def test_ns_03_control_the_same_program_without_a_sandbox(
    root: Path, pretender: str, name: str
) -> None:
    """It could do it all."""
    (root / "asks").write_text(CALLS[name])
    shutil.copy(pretender, root / "ldconfig")
    chroot = ["/usr/sbin/chroot", root, "/ldconfig", "/output"]
    subprocess.run(
        ["/usr/bin/unshare", "--mount", "--uts", "--", *chroot], check=True, env={"MARK": "1"}
    )
    text = (root / "output").read_text()
    assert "environ=1" in text
    for word in ("write", "mkdir", "call"):
        assert f" {word}=done" in text


@pytest.fixture
def waiting(root: Path, pretender: str) -> Iterator[int]:
    """Run the program until it waits; return its process number."""
    (root / "asks").write_text("w")
    with subprocess.Popen(command_of(root, pretender, 20), stdout=subprocess.DEVNULL) as runner:
        try:
            end = time.monotonic() + 60
            found: list[int] = []
            while not found and time.monotonic() < end:
                time.sleep(0.02)
                found = sandboxes()
            (pid,) = found
            time.sleep(0.2)
            yield pid
        finally:
            runner.kill()
    end = time.monotonic() + 30
    while sandboxes() and time.monotonic() < end:
        time.sleep(0.02)
    # It ends with whoever started it.
    assert sandboxes() == []


def test_ns_03_exe_03_seen_from_outside(waiting: int) -> None:
    """Other namespaces, no capability, no new ones, a sealed copy that nobody may read."""
    process = Path(f"/proc/{waiting}")
    for name in ("mnt", "pid", "net", "ipc", "uts"):
        ours = Path(f"/proc/self/ns/{name}").readlink()
        assert (process / "ns" / name).readlink() != ours
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert sorted(os.listdir(process / "fd")) == ["0", "1", "2"]
    assert {os.readlink(process / "fd" / fd) for fd in "012"} == {"/dev/null"}
    assert (process / "exe").stat().st_mode & 0o777 == 0o111
    limits = (process / "limits").read_text()
    for name, limit in LIMITS.items():
        assert re.search(rf"^Max {name} +{limit} +{limit} ", limits, re.MULTILINE), name
    # Not dumpable: its files in /proc are root's of the host, whoever it runs as.
    copy = os.open(process / "exe", os.O_RDONLY)
    try:
        assert fcntl.fcntl(copy, fcntl.F_GET_SEALS) == ALL_SEALS
    finally:
        os.close(copy)
    with pytest.raises(OSError, match=r"busy|not permitted"):
        os.open(process / "exe", os.O_WRONLY)


def test_time_01_it_is_ended_at_the_deadline(root: Path, pretender: str) -> None:
    """With all that it started."""
    (root / "asks").write_text("w")
    seen = run(root, pretender, 0.5)
    assert "was not done in 0.5 s" in seen["refused"]
    assert seen["seconds"] < 15


def test_time_01_a_fifo_among_the_conf_files(root: Path) -> None:
    """Ldconfig itself waits for a writer for ever."""
    os.mkfifo(root / "etc/ld.so.conf.d/a.conf")
    assert "was not done in 1 s" in run(root, deadline=1)["refused"]
    # Control: without a deadline, it does.
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([LDCONFIG, "-X", "-r", root, "-C", "/c"], check=False, timeout=1)


def test_a_failure_is_told(root: Path, pretender: str) -> None:
    """With its status."""
    (root / "asks").write_text("f")
    assert "status 7" in run(root, pretender)["refused"]


def test_link_04_link_09_names_that_ldconfig_writes(root: Path) -> None:
    """A hard link in the place of its temporary name is the file of somebody else."""
    victim = root.parent / "outside" / "victim"
    os.link(victim, root / "etc/ld.so.cache~")
    (root / "etc/ld.so.cache").symlink_to("../" * 40 + str(victim).lstrip("/"))
    assert run(root)["names"] == [FOUND]
    # Control: ldconfig as it is.
    subprocess.run([LDCONFIG, "-X", "-r", root], check=True)
    assert victim.read_bytes() != b"must stay"


@pytest.mark.parametrize("kind", ["file", "link out", "loop"])
def test_link_07_the_place_of_its_output_is_something_else(root: Path, kind: str) -> None:
    """Another place is taken, or none."""
    place = root / "proc"
    place.rmdir()
    if kind == "file":
        place.touch()
    else:
        place.symlink_to("../" * 40 + str(root.parent / "outside").lstrip("/"))
    seen = run(root)
    assert seen["names"] == []
    assert "none of /proc" in seen["refused"]
    (root / "tmp").mkdir()
    assert run(root)["names"] == [FOUND]


def test_exec_01_nothing_of_the_image_runs(root: Path) -> None:
    """Neither its ldconfig nor what a loader would load."""
    for name in ("sbin/ldconfig", "sbin/ldconfig.real", "lib64/ld-linux-x86-64.so.2", "bin/sh"):
        place = root / name
        place.parent.mkdir(exist_ok=True)
        place.write_text("#!/bin/busybox sh\n: > /mark\n")
        place.chmod(0o755)
    (root / "etc/ld.so.preload").write_text("/evil.so\n")
    assert run(root)["names"] == [FOUND]


@pytest.mark.parametrize(
    "kind",
    ["relative", "missing", "directory", "script", "dynamic", "setuid", "writable", "fifo",
     "empty", "of others", "text"],
)  # fmt: skip
def test_exec_02_what_is_no_ldconfig_of_the_host_is_refused(
    root: Path, tmp_path: Path, kind: str
) -> None:
    """It would run as root: whoever can change it, or what it loads, could be anybody."""
    program = tmp_path / "ldconfig"
    if kind == "relative":
        assert "absolute" in run(root, "sbin/ldconfig")["refused"]
        return
    if kind == "directory":
        program.mkdir()
    elif kind == "script":
        program.write_text(f"#!/bin/sh\n: > {tmp_path}/mark\n")
    elif kind == "text":
        program.write_bytes(b"\x7fELF" + b"x" * 100)
    elif kind == "dynamic":
        shutil.copy("/bin/ls", program)
    elif kind == "fifo":
        os.mkfifo(program)
    elif kind == "empty":
        program.touch()
    elif kind != "missing":
        shutil.copy(LDCONFIG, program)
    if kind not in ("missing", "fifo"):
        program.chmod({"setuid": 0o4755, "writable": 0o757}.get(kind, 0o755))
    if kind == "of others":
        os.chown(program, 1234, 0)
    seen = run(root, str(program))
    assert "cannot use" in seen["refused"]
    assert not (tmp_path / "mark").exists()


def test_only_where_the_cache_cannot_be_merged_with(root: Path) -> None:
    """Then what ldconfig made is merged with, and the next start finds it."""
    warnings: list[str] = []
    cache = root / "etc/ld.so.cache"
    opened = Root(str(root))

    def names(*, ldconfig: str) -> list[str]:
        LoaderCache((OURS,), ldconfig=ldconfig).execute(opened, warnings.append)
        return [row[0] for row in ldcache_merge.parse(cache.read_bytes())]

    # A cache that can be merged with, and none at all: nothing is run.
    assert names(ldconfig="/nothing/to/run") == ["libx.so.1"]
    cache.unlink()
    (root / "etc/ld.so.conf.d" / drop_in.DRIVER).unlink()
    assert names(ldconfig="/nothing/to/run") == ["libx.so.1"]
    # Too large.
    with cache.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(LdcacheError, match="would not find"):
        names(ldconfig="")
    with pytest.raises(LdcacheError, match="cannot use"):
        names(ldconfig="/nothing/to/run")
    assert names(ldconfig=LDCONFIG) == ["libx.so.1", "libtiny.so.1"]
    before = digest(root)
    assert names(ldconfig=LDCONFIG) == ["libx.so.1", "libtiny.so.1"]
    assert digest(root) == before
    # Damaged, where an earlier start of ours may have done it.
    cache.write_bytes(b"damaged")
    assert names(ldconfig=LDCONFIG) == ["libx.so.1", "libtiny.so.1"]
    cache.write_bytes(b"damaged")
    (root / "etc/ld.so.conf.d" / drop_in.DRIVER).unlink()
    assert names(ldconfig=LDCONFIG) == ["libx.so.1"]
    assert warnings == []
