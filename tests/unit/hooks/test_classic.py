# SPDX-License-Identifier: Apache-2.0
"""The incumbent's hooks by their own names and arguments."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuruntime.errors import LdcacheError, RequestError
from gpuruntime.system import drop_in
from gpuruntime.system.compat import CompatInUse, CudaCompat
from gpuruntime.system.ops import ApplicationProfile, Chmod, Link, MaskParams
from gpuruntime.system.paths import Root
from gpuruntime.system.syscalls import SyscallError
from hooks import classic, entry, report

if TYPE_CHECKING:
    from gpuruntime.system.operation import Operation

HOOK = Path(__file__).parents[3] / ".venv" / "bin" / "gpu-cdi-hook"
TINY = Path(__file__).parents[2] / "data" / "elf" / "libtiny-x86-64.so"


def plan(name: str, arguments: list[str]) -> list[Operation]:
    """Return the operations of a command line."""
    return classic.plan(name, classic.read(name, arguments))


def test_arguments_become_operations() -> None:
    """What the incumbent's generator writes."""
    words = ["--link", "libcuda.so.1::/usr/lib/libcuda.so", "--link=../card0::/dev/dri/by-path/x"]
    assert plan("create-symlinks", words) == [
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
    assert plan("update-ldcache", words) == [classic.MountedLibraries(("/a", "/b"))]
    assert plan("disable-device-node-modification", []) == [MaskParams()]
    assert plan("update-application-profile", []) == [ApplicationProfile()]
    assert plan("noop", []) == []
    words = ["--mode", "755", "--path", "/dev/dri", "--path=/dev/nvidia-caps"]
    assert plan("chmod", words) == [Chmod("/dev/dri", 0o755), Chmod("/dev/nvidia-caps", 0o755)]
    assert plan("enable-cuda-compat", ["--host-driver-version=550.54"]) == [CudaCompat("550.54")]
    words = ["--host-cuda-version", "12.4", "--cuda-compat-container-root=/usr/local/cuda/orin"]
    assert plan("enable-cuda-compat", words) == [CudaCompat("", "12.4", "/usr/local/cuda/orin")]
    assert plan("enable-cuda-compat", []) == []
    assert plan("enable-cuda-compat", ["--host-driver-version="]) == []


def test_forms_of_options() -> None:
    """One dash or two, `=` or not, commas in lists, the options of every hook."""
    same = Link("/b", "a"), Link("/d", "c")
    for words in (
        ["--link", "a::/b", "--link", "c::/d"],
        ["-link=a::/b,c::/d"],
        ["--debug", "--link", "a::/b", "--quiet=false", "-link", "c::/d"],
        ["--container-spec", "-", "--link", "a::/b,c::/d", "-d", "--link", "a::/b"],
    ):
        assert plan("create-symlinks", words) == [*same]


@pytest.mark.parametrize("target", ["/etc/alternatives/x", "../../../../x", "a/../b", "a:b"])
def test_link_12_the_text_of_a_target_is_kept(target: str) -> None:
    """It is text for the container: nobody here looks up where it leads."""
    assert plan("create-symlinks", ["--link", f"{target}::usr/lib/x"]) == [
        Link("/usr/lib/x", target)
    ]


@pytest.mark.parametrize(
    "value",
    ["", "a", "a:/b", "a::/b::c", "::/b", "a::", "a::/", "a::/b/", "a::/b/..", "a::/b/.",
     "a::..", "a\n::/b", "a::/b\0", "a b::/c", "a::/b c", f"a::/{'b' * (128 << 10)}"],
)  # fmt: skip
def test_link_12_a_link_that_is_none_is_refused(value: str) -> None:
    """A name like `..` would be the directory above."""
    with pytest.raises(RequestError):
        plan("create-symlinks", ["--link", value])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chmod", ["--path", "/a"]),
        ("chmod", ["--mode", "755"]),
        ("chmod", ["--mode", "rwx", "--path", "/a"]),
        ("chmod", ["--mode", "755", "--path", "/a/../b"]),
        ("update-ldcache", ["--ldconfig-path=", "--folder", "/a"]),
        ("enable-cuda-compat", ["--host-driver-version=1", "--cuda-compat-container-root=a"]),
        ("enable-cuda-compat", ["--host-driver-version=55\n1"]),
        ("enable-cuda-compat", ["--host-cuda-version", "12/4"]),
        ("enable-cuda-compat", ["--host-driver-version=550", f"--host-cuda-version={'1' * 256}"]),
        ("noop", ["word"]),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(name: str, words: list[str]) -> None:
    """As the incumbent does."""
    with pytest.raises(RequestError):
        plan(name, words)


@pytest.mark.parametrize("name", entry.CLASSIC)
def test_an_option_that_there_is_not_is_refused(name: str) -> None:
    """A step that is half understood is not half done."""
    with pytest.raises(RequestError):
        plan(name, ["--no-such-option", "x"])


def test_the_entry_knows_the_hooks() -> None:
    """It does not load the module that has the list."""
    assert sorted(entry.CLASSIC) == sorted(classic.OPTIONS)


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


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ELOOP, errno.EAGAIN])
def test_a_folder_that_cannot_be_looked_into_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A container without its libraries does not start; one without the folder has none."""

    def refuse(self: Root, path: str) -> int:
        raise SyscallError(code, f'openat2("{path}")')

    operation = classic.MountedLibraries(("/missing",))
    operation.execute(Root(str(tmp_path)), pytest.fail)
    monkeypatch.setattr(Root, "open_path", refuse)
    with pytest.raises(LdcacheError, match="/missing"):
        operation.execute(Root(str(tmp_path)), pytest.fail)


def test_a_library_without_a_link_is_found_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The incumbent's specs leave the links of SONAMEs to the image's ldconfig."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtiny.so.1.2.3").write_bytes(TINY.read_bytes())
    monkeypatch.setattr(classic, "mount_id", lambda fd: fd)
    operation = classic.MountedLibraries(("/lib",))
    operation.execute(Root(str(tmp_path)), pytest.fail)
    cache = (tmp_path / "etc" / "ld.so.cache").read_bytes()
    assert b"libtiny.so.1\0" in cache
    assert b"/lib/libtiny.so.1.2.3\0" in cache
    assert b"/lib/libtiny.so.1\0" not in cache


def test_a_mounted_library_that_cannot_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a user namespace, where it belongs to somebody else."""

    def refuse(fd: int, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtiny.so.1").write_bytes(TINY.read_bytes())
    # Each is a mount of its own.
    monkeypatch.setattr(classic, "mount_id", lambda fd: fd)
    operation = classic.MountedLibraries(("/lib",))
    operation.execute(Root(str(tmp_path)), pytest.fail)
    cache = tmp_path / "etc" / "ld.so.cache"
    assert b"/lib/libtiny.so.1\0" in cache.read_bytes()
    cache.unlink()
    monkeypatch.setattr(classic, "reopen", refuse)
    operation.execute(Root(str(tmp_path)), pytest.fail)
    assert not cache.exists()


def test_what_enable_cuda_compat_found_is_in_the_cache(tmp_path: Path) -> None:
    """Two hooks of a spec are two processes: the first leaves word in the drop-in."""
    conf = tmp_path / "etc" / "ld.so.conf.d" / drop_in.COMPAT
    conf.parent.mkdir(parents=True)
    (tmp_path / "compat").mkdir()
    (tmp_path / "compat" / "libtiny.so.1").write_bytes(TINY.read_bytes())
    conf.write_bytes(drop_in.HEADS[drop_in.COMPAT] + b"/compat\n")
    root = Root(str(tmp_path))
    classic.MountedLibraries(("/lib",)).execute(root, pytest.fail)
    assert b"/compat/libtiny.so.1\0" in (tmp_path / "etc" / "ld.so.cache").read_bytes()
    assert conf.exists()
    assert drop_in.COMPAT in CompatInUse().describe()


def compat_hook(*words: object) -> dict[str, object]:
    """Return the hooks of a container that has one with *words*."""
    return {"createContainer": [{"path": "/h"}, {"path": "/h", "args": ["h", *words]}]}


@pytest.mark.parametrize(
    ("hooks", "first"),
    [
        (compat_hook("enable-cuda-compat", "--host-driver-version=550.1"), True),
        (compat_hook("hook", "--debug", "enable-cuda-compat"), True),
        (compat_hook("update-container", "--cuda-compat", "550.1"), True),
        ({"prestart": compat_hook("enable-cuda-compat")["createContainer"]}, True),
        (compat_hook("update-ldcache", "--folder", "/lib"), False),
        (compat_hook(), False),
        (None, False),
        # What no engine writes is no such hook.
        ({"createContainer": [{"args": "enable-cuda-compat"}]}, False),
        ({"ofLaterRuntimes": {"args": ["enable-cuda-compat"]}}, False),
        ({"ofLaterRuntimes": ["enable-cuda-compat"]}, False),
        (compat_hook({}, 1, None), False),
    ],
)
def test_a_drop_in_of_an_earlier_start_does_not_count(
    tmp_path: Path, hooks: object, first: bool
) -> None:
    """With update-ldcache alone nobody has looked whether it is right for today's driver."""
    bundle = json.loads(make_bundle(tmp_path))["bundle"]
    root = tmp_path / "rootfs"
    conf = root / "etc" / "ld.so.conf.d" / drop_in.COMPAT
    conf.parent.mkdir(parents=True)
    (root / "compat").mkdir()
    (root / "compat" / "libtiny.so.1").write_bytes(TINY.read_bytes())
    conf.write_bytes(drop_in.HEADS[drop_in.COMPAT] + b"/compat\n")
    # As that start left it.
    classic.MountedLibraries(("/lib",)).execute(Root(str(root)), pytest.fail)
    cache = root / "etc" / "ld.so.cache"
    assert b"/compat/libtiny.so.1\0" in cache.read_bytes()
    config = {"root": {"path": "rootfs"}, "hooks": hooks}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = hook("update-ldcache", "--folder", "/lib", state=json.dumps({"bundle": bundle}))
    assert (done.returncode, done.stderr) == (0, "")
    assert (b"/compat/libtiny.so.1\0" in cache.read_bytes()) is first
    assert conf.exists() is first


def test_time_01_a_folder_of_too_many_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the libraries would be worse than none."""
    monkeypatch.setattr(classic, "MAX_NAMES", 3)
    for number in range(4):
        (tmp_path / f"lib{number}.so").touch()
    with pytest.raises(LdcacheError, match="over 3 names"):
        classic.MountedLibraries(("/.",)).execute(Root(str(tmp_path)), pytest.fail)


@pytest.mark.parametrize("folder", ["lib", "/a/../b", "/a\ninclude /x", "/a b", ""])
def test_a_folder_that_is_no_clean_path_is_refused(folder: str) -> None:
    """It would be written to ld.so.conf.d."""
    with pytest.raises(RequestError):
        plan("update-ldcache", [f"--folder={folder}"])


def hook(*arguments: object, state: str = "") -> subprocess.CompletedProcess[str]:
    """Run the hook with *state* on its standard input."""
    return subprocess.run(
        [HOOK, *map(str, arguments)], input=state, capture_output=True, text=True, check=False
    )


def make_bundle(work: Path) -> str:
    """Make a bundle with an empty root; return its state."""
    (work / "rootfs").mkdir()
    (work / "config.json").write_text('{"root": {"path": "rootfs"}}')
    return json.dumps({"ociVersion": "1.0.2", "bundle": str(work)})


def test_the_state_may_be_in_a_file(tmp_path: Path) -> None:
    """`--container-spec FILE`, `-` for standard input."""
    (tmp_path / "state").write_text(make_bundle(tmp_path))
    done = hook("create-symlinks", "--container-spec", tmp_path / "state", "--link", "a::/b")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "rootfs" / "b").is_symlink()
    done = hook(
        "--debug", "create-symlinks", "--container-spec=-", "--link=a::/c",
        state=(tmp_path / "state").read_text(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "gpu-cdi-hook: link /c -> a\n")
    assert (tmp_path / "rootfs" / "c").is_symlink()


@pytest.mark.parametrize("path", ["state", "/", "/a/../b", "/missing", "/dev/zero", "{}/fifo"])
def test_link_10_a_state_in_no_regular_file_is_refused(tmp_path: Path, path: str) -> None:
    """A FIFO would hold the container."""
    subprocess.run(["mkfifo", tmp_path / "fifo"], check=True)
    done = hook("disable-device-node-modification", "--container-spec", path.format(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-cdi-hook: bundle: cannot read the state in ")


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDONLY])
def test_json_07_a_standard_input_that_cannot_be_read_is_no_bug(flags: int) -> None:
    """Its other end may be anything: nothing to be read, or no memory at address 0."""
    fd = os.open("/dev/null" if flags == os.O_WRONLY else "/proc/self/mem", flags)
    try:
        done = subprocess.run(
            [HOOK, "update-application-profile"],
            stdin=fd, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(fd)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-cdi-hook: bundle: cannot read the state on standard input:")


def test_cg_01_no_descriptor_is_left_for_the_work() -> None:
    """What is to be given more of is named."""
    hint = report.not_started(errno.EMFILE).hint
    assert hint == "allow the runtime 64 open files or more"


@pytest.mark.parametrize("words", [["noop"], ["enable-cuda-compat"], ["update-container"]])
def test_what_has_nothing_to_do_reads_no_state(words: list[str]) -> None:
    """The incumbent does not either."""
    done = hook(*words, state="no JSON")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [[], ["--debug"], ["--quiet", "later", "--unknown=1"]])
def test_no_hook_or_an_unknown_one_is_a_warning(words: list[str]) -> None:
    """Whatever its options are."""
    done = hook(*words)
    assert done.returncode == 0
    assert done.stderr.startswith("gpu-cdi-hook: warning: ")


def test_warnings_can_be_switched_off(tmp_path: Path) -> None:
    """And debugging with them."""
    state = make_bundle(tmp_path)
    (tmp_path / "rootfs" / "loop").symlink_to("loop")
    words = ["chmod", "--mode", "700", "--path", "/loop"]
    assert 'warning: "/loop" in the container is a link' in hook(*words, state=state).stderr
    assert hook("--quiet", "--debug", *words, state=state).stderr == ""
    assert hook(*words, "--quiet", state=state).stderr == ""
