# SPDX-License-Identifier: Apache-2.0
"""The debug log of the prestart hook: which files it is written to."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from hooks.debug_log import DebugLog


def test_a_line_has_time_message_and_bundle(tmp_path: Path) -> None:
    """Containers share the file; what an image names forges no line."""
    path = tmp_path / "log"
    log = DebugLog(str(path), "/run/b")
    assert log.problem == ""
    log.record('link "a\nb"')
    DebugLog(str(path), "/run/c").record("done")
    first, second = path.read_text().splitlines()
    assert re.fullmatch(
        r'time="\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ" level=debug '
        r'msg="link \\"a\\\\x0ab\\"" bundle="/run/b"',
        first,
    )
    assert second.endswith(' msg="done" bundle="/run/c"')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("target"))
    path.with_name("target").touch()


def _hard_link(path: Path) -> None:
    path.with_name("target").touch()
    path.hardlink_to(path.with_name("target"))


def _writable(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def _owned(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, 12345)


BAD = {
    "link": (_link, "Too many levels of symbolic links"),
    "hard link": (_hard_link, "the file has another hard link"),
    "FIFO": (os.mkfifo, "No such device or address"),
    "directory": (Path.mkdir, "Is a directory"),
    "others may write": (_writable, "others than root may write the file"),
    "of another user": (_owned, "others than root may write the file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_a_log_of_ours_is_not_written(tmp_path: Path, name: str) -> None:
    """A configured path must not make root write to a file of somebody else."""
    prepare, why = BAD[name]
    if name == "of another user" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    path = tmp_path / "log"
    prepare(path)
    log = DebugLog(str(path), "/run/b")
    log.record("text")
    assert log.problem == f'cannot write the log "{path}": {why}'
    files = [item for item in tmp_path.iterdir() if item.is_file()]
    assert all(item.stat().st_size == 0 for item in files)


@pytest.mark.parametrize(
    ("path", "why"), [("log", "not an absolute path"), ("/nowhere/log", "No such file")]
)
def test_a_path_without_a_place_is_a_problem(path: str, why: str) -> None:
    """No directory is created."""
    assert why in DebugLog(path, "/run/b").problem
    assert not Path("/nowhere").exists()


def test_a_full_disk_is_ignored(tmp_path: Path) -> None:
    """The control of the tests above: a device is refused, so the limit stands for the disk."""
    path = tmp_path / "log"
    log = DebugLog(str(path), "/run/b")
    pid = os.fork()
    if pid == 0:
        import resource  # noqa: PLC0415 (the child alone)
        import signal  # noqa: PLC0415

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            log.record("text")
        except BaseException:  # noqa: BLE001 (what it raises is the result)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert path.read_text() == ""
