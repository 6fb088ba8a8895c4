# SPDX-License-Identifier: Apache-2.0
"""The log of what hooks say: bounded, root's alone, and never a reason for a hook to fail."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpuruntime.snapshots import hook_log

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the log is root's")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory that is ours alone."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    return directory


def said(place: Path) -> list[tuple[str, str]]:
    """Return word and text of the lines in the log."""
    path = place / hook_log.NAME
    text = path.read_text() if path.exists() else ""
    return [(word, line) for _, word, line in hook_log.parse(text)]


@needs_root
def test_failures_and_warnings_are_kept(place: Path) -> None:
    """All that a hook says that fails; of others the warnings, not each step."""
    hook_log.record("hook: request: bad\nhint: mend it", 1, str(place))
    hook_log.record("hook: link a\nhook: warning: no b\nhook: link c", 0, str(place))
    hook_log.record("", 0, str(place))
    assert said(place) == [
        ("failed", "hook: request: bad"),
        ("failed", "hint: mend it"),
        ("warned", "hook: warning: no b"),
    ]
    assert stat.S_IMODE((place / hook_log.NAME).stat().st_mode) == 0o600


@needs_root
def test_no_text_forges_a_line(place: Path) -> None:
    """What came from an image is escaped, whatever line ends it has."""
    hook_log.record("hook: \x1b[31m\u2028 \x85x failed \xff", 1, str(place))
    text = (place / hook_log.NAME).read_text()
    assert text.isascii()
    assert all(line.startswith("20") for line in text.splitlines())
    assert "\x1b" not in text


@needs_root
def test_it_is_bounded(place: Path) -> None:
    """Containers that fail for ever fill nothing, and the last failure is there."""
    for number in range(1500):
        hook_log.record(f"hook: {'x' * 500} {number}", 1, str(place))
    sizes = {path.name: path.stat().st_size for path in place.iterdir()}
    assert sorted(sizes) == [hook_log.NAME, hook_log.OLD]
    assert all(size <= hook_log.MAX_BYTES for size in sizes.values())
    assert said(place)[-1][1].endswith(" 1499")
    hook_log.record("\n".join(["x" * 10_000] * 100), 1, str(place))
    assert len(said(place)) <= hook_log.MAX_BYTES // 500 + hook_log.MAX_LINES


@needs_root
@pytest.mark.parametrize(
    "kind", ["missing", "others may write", "not ours", "link", "linked file", "fifo", "hard link"]
)
def test_it_is_written_nowhere_else(place: Path, tmp_path: Path, kind: str) -> None:
    """Nothing is made, followed or waited for, and nothing is raised."""
    target = tmp_path / "target"
    target.write_text("theirs")
    log = place / hook_log.NAME
    directory = place
    if kind == "missing":
        directory = tmp_path / "none"
    elif kind == "others may write":
        place.chmod(0o777)
    elif kind == "not ours":
        os.chown(place, 65534, 65534)
    elif kind == "link":
        directory = tmp_path / "link"
        directory.symlink_to(place)
    elif kind == "linked file":
        log.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(log)
    else:
        os.link(target, log)
    before = sorted(os.listdir(tmp_path)), sorted(os.listdir(place))
    hook_log.record("hook: request: bad", 1, str(directory))
    assert (sorted(os.listdir(tmp_path)), sorted(os.listdir(place))) == before
    assert target.read_text() == "theirs"


@needs_root
def test_writers_at_once_lose_no_line(place: Path) -> None:
    """Containers start at the same time; each line is whole."""
    children = []
    for child in range(8):
        pid = os.fork()
        if pid == 0:
            for number in range(20):
                hook_log.record(f"hook: {child} {number} end", 1, str(place))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    lines = {text for _, text in said(place)}
    assert lines == {f"hook: {child} {number} end" for child in range(8) for number in range(20)}
