# SPDX-License-Identifier: Apache-2.0
"""Saving a spec: all of the new file or all of the old one, and never through what is planted."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi import document, generate, store, yamlio
from cdi.errors import CdiError
from gpuruntime.trusted_files import may_trust

SPEC: Any = {
    "cdiVersion": "0.3.0",
    "kind": "vendor.test/class",
    "devices": [{"name": "d", "containerEdits": {"env": ["A=b"]}}],
}
OLD, NEW = "old\n" * 1000, "new\n" * 2000


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Run with a umask that would take what consumers need."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a spec directory that is trusted."""
    found = tmp_path / "cdi"
    found.mkdir()
    found.chmod(0o755)
    return found


def save(path: Path, text: str, *, replace: bool = True) -> bool:
    """Save as the CLI does."""
    return store.save(str(path), text, may_trust=may_trust, replace=replace)


def save_spec(spec: object, name: str, *folders: Path, replace: bool = True) -> str:
    """Save as the CLI does."""
    directories = [str(folder) for folder in folders]
    return store.save_spec(spec, name, directories, may_trust=may_trust, replace=replace)


def category(function: Any, *arguments: Any) -> str:
    """Return the category for which a call is refused."""
    with pytest.raises(CdiError) as error:
        function(*arguments)
    return error.value.category


def mode(path: Path) -> int:
    """Return the permissions of *path* itself."""
    return stat.S_IMODE(path.lstat().st_mode)


def names(folder: Path) -> list[str]:
    """Return what is in *folder*."""
    return sorted(path.name for path in folder.iterdir())


def test_the_last_directory_is_made_and_anybody_may_read(tmp_path: Path) -> None:
    """Rootless engines read specs, too, whatever the umask of who writes them."""
    path = Path(save_spec(SPEC, "a", tmp_path / "0", tmp_path / "1" / "2"))
    assert path == tmp_path / "1" / "2" / "a.yaml"
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o644, 0o755, 0o755)
    assert names(tmp_path) == ["1"]
    assert path.read_text() == generate.encode(SPEC, "yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", "a.yaml"),
        ("a.yaml", "a.yaml"),
        ("a.json", "a.json"),
        ("a.yml", "a.yml.yaml"),
        ("a.b_c", "a.b_c.yaml"),
        ("a.JSON", "a.JSON.yaml"),
        ("-", "-.yaml"),
    ],
)
def test_the_ending_decides_on_the_format(folder: Path, name: str, expected: str) -> None:
    """A name without one of the two that scanners look for gets it."""
    path = Path(save_spec(SPEC, name, folder))
    assert names(folder) == [expected] == [path.name]
    text = path.read_text()
    assert text == generate.encode(SPEC, "json" if name.endswith(".json") else "yaml")
    assert generate.canonical(document.check(yamlio.decode(text))) == document.check(SPEC)
    assert store.remove(name, [str(folder)], may_trust=may_trust)
    assert names(folder) == []
    assert not store.remove(name, [str(folder)], may_trust=may_trust)
    assert not store.remove(name, [str(folder / "missing")], may_trust=may_trust)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "...",
        ".yaml",
        "..json",
        "a/b",
        "/a",
        "../a",
        "a\0b",
        "\ud800",
        "a/../b.json",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    """As that of a kind with two slashes."""
    assert category(save_spec, SPEC, name, folder) == "file-name"
    with pytest.raises(CdiError) as error:
        store.remove(name, [str(folder)], may_trust=may_trust)
    assert error.value.category == "file-name"
    assert names(folder) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({**SPEC, "kind": "class"}, "vendor"),
        ({**SPEC, "devices": []}, "no-devices"),
        ({**SPEC, "annotations": {"a": "b"}}, "version-too-low"),
        ({**SPEC, "cdiVersion": "0.9.0"}, "version-unknown"),
        ({**SPEC, "more": 1}, "unknown-field"),
        ({**SPEC, "annotations": {"a": "\ud800"}, "cdiVersion": "0.6.0"}, "syntax"),
        ({**SPEC, "annotations": {"a": "x" * (4 << 20)}, "cdiVersion": "0.6.0"}, "syntax"),
        (None, "no-data"),
        ([], "wrong-type"),
    ],
)
def test_what_would_not_load_is_not_written(tmp_path: Path, spec: Any, expected: str) -> None:
    """Nor is a directory made for it."""
    for name in ("a.yaml", "a.json"):
        assert category(save_spec, spec, name, tmp_path / "cdi") == expected
    assert names(tmp_path) == []


def test_what_readers_would_not_find_again_is_not_written(folder: Path) -> None:
    """In JSON read as YAML, a member's name ends after a thousand characters."""
    spec = {**SPEC, "cdiVersion": "0.6.0", "annotations": {"k" * 2000: "v"}}
    assert category(save_spec, spec, "a.json", folder) == "syntax"
    assert names(folder) == []


def test_a_file_that_is_there_is_kept_if_asked_for(folder: Path) -> None:
    """The variant for those who are not to replace what an operator wrote."""
    for name in ("a.json", "a.yaml"):
        save_spec(SPEC, name, folder, replace=False)
        path = folder / name
        assert (mode(path), path.stat().st_nlink) == (0o644, 1)
        before = path.read_text()
        with pytest.raises(FileExistsError):
            save_spec({**SPEC, "kind": "vendor.test/other"}, name, folder, replace=False)
        assert path.read_text() == before
    assert names(folder) == ["a.json", "a.yaml"]


def test_the_same_again_touches_nothing(folder: Path) -> None:
    """Consumers that watch the directory are not woken."""
    path = folder / "a.yaml"
    assert save(path, NEW)
    inode = path.stat().st_ino
    assert not save(path, NEW)
    assert path.stat().st_ino == inode
    path.chmod(0o600)
    assert save(path, NEW)
    assert mode(path) == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_same_file_of_another_user_is_replaced(folder: Path) -> None:
    """CDI-02: no consumer uses it, and whoever has it may change it."""
    path = folder / "a.yaml"
    save(path, NEW)
    os.chown(path, 1234, 0)
    before = path.stat().st_ino
    assert save(path, NEW)
    assert (path.stat().st_uid, path.stat().st_ino != before) == (0, True)
    assert (path.read_text(), mode(path)) == (NEW, 0o644)


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
@pytest.mark.parametrize("replace", [True, False])
def test_what_is_planted_as_the_target_is_never_written_to(
    folder: Path, tmp_path: Path, kind: str, *, replace: bool
) -> None:
    """CDI-04: what it leads to stays as it is, and the spec is a file of its own."""
    canary, path = tmp_path / "canary", folder / "a.yaml"
    canary.write_text(NEW)
    canary.chmod(0o644)
    before = canary.stat().st_ino
    if kind == "link":
        path.symlink_to(canary)
    elif kind == "hard link":
        path.hardlink_to(canary)
    else:
        os.mkfifo(path)
    if replace:
        assert save(path, NEW)
        assert path.is_file()
        assert not path.is_symlink()
        assert (path.stat().st_nlink, mode(path)) == (1, 0o644)
        assert path.stat().st_ino != before
    else:
        with pytest.raises(FileExistsError):
            save(path, NEW, replace=False)
    assert canary.read_text() == NEW
    assert names(folder) == ["a.yaml"]


def test_a_directory_in_the_way_is_an_error(folder: Path) -> None:
    """And leaves nothing behind."""
    (folder / "a.yaml").mkdir()
    with pytest.raises(OSError, match="directory"):
        save(folder / "a.yaml", NEW)
    assert names(folder) == ["a.yaml"]


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o757, 0o2775, 0o2777])
def test_a_directory_in_which_others_can_replace_the_file_is_refused(
    folder: Path, bits: int
) -> None:
    """CDI-01: they could replace the spec, and so give out what they like."""
    save(folder / "a.yaml", OLD)
    folder.chmod(bits)
    assert category(save, folder / "a.yaml", NEW) == "untrusted"
    with pytest.raises(CdiError) as error:
        store.remove("a", [str(folder)], may_trust=may_trust)
    assert error.value.category == "untrusted"
    assert names(folder) == ["a.yaml"]
    assert (folder / "a.yaml").read_text() == OLD


@pytest.mark.parametrize("bits", [0o1777, 0o1775, 0o3775, 0o2755])
def test_a_directory_in_which_others_can_only_add_files_will_do(folder: Path, bits: int) -> None:
    """A sticky directory, such as /tmp, and one that only passes on its group."""
    folder.chmod(bits)
    assert save(folder / "a.yaml", NEW)
    assert (folder / "a.yaml").read_text() == NEW
    assert mode(folder) == bits
    assert store.remove("a", [str(folder)], may_trust=may_trust)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("bits", [0o755, 0o1777])
def test_the_directory_of_a_user_is_refused(folder: Path, bits: int) -> None:
    """CDI-01: whoever owns it can change its mode, and replace files in it though it is sticky."""
    os.chown(folder, 12345, 12345)
    folder.chmod(bits)
    assert category(save, folder / "a.yaml", NEW) == "untrusted"


def test_a_missing_directory_is_made_only_if_asked_for(folder: Path) -> None:
    """The library's caller decides: a typing error must not make directories."""
    path = folder / "missing" / "a.yaml"
    with pytest.raises(FileNotFoundError):
        store.save(str(path), NEW, may_trust=may_trust, make_directory=False)
    assert names(folder) == []
    assert store.save(str(path), NEW, may_trust=may_trust)


def test_a_directory_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    """CDI-01: a link may lead elsewhere tomorrow; a FIFO must not hang us."""
    (tmp_path / "link").symlink_to(folder)
    assert category(save, tmp_path / "link" / "a.yaml", NEW) == "untrusted"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert category(save, tmp_path / "dangling" / "a.yaml", NEW) == "untrusted"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("")
    for name in ("fifo", "file"):
        with pytest.raises(NotADirectoryError):
            save(tmp_path / name / "a.yaml", NEW)
    assert names(tmp_path) == ["cdi", "dangling", "fifo", "file", "link"]
    assert names(folder) == []


def test_what_dead_writers_left_is_removed(folder: Path, tmp_path: Path) -> None:
    """Nothing else: not what is a living writer's, another program's, or behind a link."""
    canary = tmp_path / "canary"
    canary.write_text("canary")
    kept = {
        "spec.1234567890.tmp": "the reference's",
        "spec.0123456789abcdef.tmp.yaml": "a spec",
        "spec.0123456789ABCDEF.tmp": "no name of ours",
        "other.tmp": "anybody's",
    }
    for name, text in kept.items():
        (folder / name).write_text(text)
    (folder / "spec.0000000000000000.tmp").write_text("left behind")
    (folder / "spec.1111111111111111.tmp").hardlink_to(canary)
    (folder / "spec.2222222222222222.tmp").symlink_to(canary)
    (folder / "spec.3333333333333333.tmp").mkdir()
    os.mkfifo(folder / "spec.4444444444444444.tmp")
    with open(folder / "spec.5555555555555555.tmp", "w") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        save(folder / "a.yaml", NEW)
    odd = [f"spec.{str(digit) * 16}.tmp" for digit in (2, 3, 4, 5)]
    assert names(folder) == sorted([*kept, *odd, "a.yaml"])
    assert canary.read_text() == "canary"
    save(folder / "a.yaml", NEW)
    assert "spec.5555555555555555.tmp" not in names(folder)


def test_writers_do_not_harm_each_other(folder: Path) -> None:
    """Each sweeps what dead writers left, while the others are at work."""
    writers, rounds = 4, 60
    children = []
    for writer in range(writers):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for number in range(rounds):
                    save(folder / f"{number % 2}.yaml", f"{writer} {number}\n" * 1000)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * writers
    assert names(folder) == ["0.yaml", "1.yaml"]
    for path in folder.iterdir():
        assert len(set(path.read_text().splitlines())) == 1


SYSCALLS = {
    *("open", "close", "read", "write", "fstat", "fchmod", "fsync", "mkdir", "listdir"),
    *("rename", "link", "unlink", "urandom", "flock"),
}
Around = Callable[[str, Callable[[], Any], tuple[Any, ...]], Any]


class _Calls:
    """A module whose system calls go through *around*: name, the call itself, its arguments."""

    def __init__(self, module: Any, around: Around) -> None:
        self._module = module
        self._around = around

    def __getattr__(self, name: str) -> Any:
        """Return what the module has, wrapped if it is a system call's function."""
        found = getattr(self._module, name)
        if name not in SYSCALLS:
            return found
        return lambda *args, **kwargs: self._around(name, lambda: found(*args, **kwargs), args)


def test_every_call_of_the_module_is_known() -> None:
    """A call that is added there is to fail and be killed here, too."""
    text = Path(store.__file__).read_text()
    used = set(re.findall(r"\b(?:os|fcntl)\.([a-z]+)\(", text))
    assert used - {"geteuid", "fsencode"} == SYSCALLS


class InjectedError(OSError):
    """The failure of a call that a test wanted."""


class Scene:
    """Saving over an old spec, beside what a dead writer left; or, not to replace, in a new place.

    `run` goes through *around*; False if it fails.
    """

    def __init__(self, folder: Path, *, replace: bool) -> None:
        self.path = folder / "a.yaml" if replace else folder / "new" / "a.yaml"
        self.replace = replace
        shutil.rmtree(folder)
        folder.mkdir()
        folder.chmod(0o755)
        if replace:
            self.path.write_text(OLD)
            self.path.chmod(0o644)
            (folder / LEFT).write_text("left behind")

    def run(self, around: Around) -> bool:
        """Save, and return whether that was said to be done."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "os", _Calls(os, around))
            patch.setattr(store, "fcntl", _Calls(fcntl, around))
            try:
                save(self.path, NEW, replace=self.replace)
            except InjectedError:
                return False
            return True

    def is_new(self) -> bool:
        """Return whether the new spec is there; else it is the old one, or none where none was."""
        if not self.replace and not self.path.exists():
            return False
        text = self.path.read_text()
        assert mode(self.path) == 0o644
        assert text in ((OLD, NEW) if self.replace else (NEW,))
        return text == NEW

    def temporaries(self) -> list[str]:
        """Return the temporary files that are there."""
        return sorted(path.name for path in self.path.parent.glob("*.tmp"))

    def check_next_run(self) -> None:
        """Save once more, undisturbed."""
        if self.replace or not self.is_new():
            assert self.run(lambda _, call, __: call())
        else:
            save(self.path.with_name("b.yaml"), NEW)
        assert self.is_new()
        assert self.temporaries() == []
        assert self.path.stat().st_nlink == 1


LEFT = "spec.0123456789abcdef.tmp"
# What comes after the new spec has got its name.
LATE = {"close", "fsync", "unlink"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("replace", [True, False])
def test_a_call_that_fails_leaves_the_old_spec(folder: Path, code: int, *, replace: bool) -> None:
    """CDI-08: whichever it is, and no temporary file of this run."""
    for number in itertools.count():
        scene = Scene(folder, replace=replace)
        names_: list[str] = []

        def around(
            name: str,
            call: Callable[[], Any],
            _: object,
            number: int = number,
            seen: list[str] = names_,
        ) -> Any:
            seen.append(name)
            if len(seen) != number + 1:
                return call()
            if name == "close":
                # As the kernel does: the descriptor is gone even then.
                call()
            raise InjectedError(code, os.strerror(code))

        is_done = scene.run(around)
        if len(names_) <= number:
            break
        is_new = scene.is_new()
        assert is_new or not is_done
        assert not is_new or is_done or names_[number] in LATE
        assert set(scene.temporaries()) <= {LEFT}
        scene.check_next_run()
    assert is_done
    assert number >= 20 if replace else number >= 15


@pytest.mark.parametrize("replace", [True, False])
def test_the_text_is_on_the_disk_before_the_name_is(folder: Path, *, replace: bool) -> None:
    """CDI-08: after a power cut the name has all of one spec, and what was said to be done is."""
    scene = Scene(folder, replace=replace)
    done: list[str] = []

    def around(name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name in ("write", "fchmod", "fsync"):
            status = os.fstat(arguments[0])
            what = "directory" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes"
            # A write is of what is there before it; fchmod is also for directories that are made.
            done.append(f"{name} {what}")
        elif name in ("rename", "link"):
            done.append(name)
        return call()

    assert scene.run(around)
    name = "rename" if replace else "link"
    synced = f"fsync {len(NEW)} bytes"
    expected = ["write 0 bytes", f"fchmod {len(NEW)} bytes", synced, name, "fsync directory"]
    assert [call for call in done if call != "fchmod directory"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("replace", [True, False])
def test_a_writer_that_is_killed_leaves_the_old_spec(
    folder: Path, *, is_late: bool, replace: bool
) -> None:
    """CDI-08: before or after any call, and amid writing; the next writer cleans up."""
    outcomes = set()
    for number in itertools.count():
        scene = Scene(folder, replace=replace)
        child = os.fork()
        if child == 0:
            calls = itertools.count()

            def around(
                name: str,
                call: Callable[[], Any],
                arguments: tuple[Any, ...],
                number: int = number,
                calls: Iterator[int] = calls,
            ) -> Any:
                if next(calls) != number:
                    return call()
                if is_late and name == "write":
                    os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                elif is_late:
                    call()
                os.kill(os.getpid(), signal.SIGKILL)
                return None

            try:
                scene.run(around)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        outcomes.add((scene.is_new(), len(scene.temporaries())))
        scene.check_next_run()
    assert scene.is_new()
    # It was killed at all stages: before there is a temporary file, with one, and after.
    assert {is_new for is_new, _ in outcomes} == {False, True}
    assert {count for _, count in outcomes} >= {0, 1}


def test_a_file_that_is_taken_for_left_behind_is_made_again(folder: Path) -> None:
    """Between making it and locking it, another writer may come along."""
    scene = Scene(folder, replace=False)
    others: list[str] = []

    def around(name: str, call: Callable[[], Any], _: object) -> Any:
        if name == "flock" and not others:
            others.extend(scene.temporaries())
            assert save(scene.path.with_name("b.yaml"), NEW)
            assert scene.temporaries() == []
        return call()

    assert scene.run(around)
    assert len(others) == 1
    assert scene.is_new()
    assert scene.temporaries() == []


def test_a_file_system_without_locks_will_do(folder: Path) -> None:
    """Nobody can take a file for abandoned there, so what is left behind stays."""
    scene = Scene(folder, replace=True)

    def around(name: str, call: Callable[[], Any], _: object) -> Any:
        if name == "flock":
            raise InjectedError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return call()

    assert scene.run(around)
    assert scene.is_new()
    assert scene.temporaries() == [LEFT]


def test_reading_a_file(tmp_path: Path) -> None:
    """From a path or a descriptor, whatever the ending; what is no text is refused at once."""
    path = tmp_path / "spec"
    path.write_text("\ufeff" + json.dumps(SPEC))
    assert json.loads(store.read(str(path))) == SPEC
    with path.open("rb") as stream:
        assert json.loads(store.read(stream.fileno())) == SPEC
    for data in (b"\xff", b"#" * ((4 << 20) + 1)):
        path.write_bytes(data)
        assert category(store.read, str(path)) == "syntax"
    os.truncate(path, 1 << 40)
    assert category(store.read, str(path)) == "syntax"
    assert category(store.read, "/dev/zero") == "syntax"
    os.mkfifo(tmp_path / "fifo")
    assert category(store.read, str(tmp_path / "fifo")) == "syntax"
    assert category(store.read, str(tmp_path)) == "syntax"
    with pytest.raises(FileNotFoundError):
        store.read(str(tmp_path / "missing"))
