# SPDX-License-Identifier: Apache-2.0
"""The engine's log: one record a line in the format it asked for, and no way to hang or forge."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gpuruntime.log import LEVELS, Log

HOSTILE = '\n"level":"info"\x1b[2J %s {0} \u202e \0 \\" time="x" level=info msg="forged'


@pytest.mark.parametrize("json_format", [True, False])
@pytest.mark.parametrize("text", ["a\nhint: b", HOSTILE, "x" * (1 << 20), '"quoted" \\ '])
def test_a_record_is_one_line_and_can_be_read_back(
    tmp_path: Path, text: str, json_format: bool
) -> None:
    """LOG-01: docker and containerd parse these lines."""
    path = tmp_path / "log"
    log = Log(str(path), json_format=json_format)
    log.record("error", text)
    lines = path.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].isascii()
    if json_format:
        record = json.loads(lines[0])
        assert set(record) == {"level", "msg", "time"}
        assert (record["level"], record["msg"]) == ("error", text)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["time"])
    else:
        match = re.fullmatch(r'time="[^"]+" level=error msg=("(?:[^"\\]|\\.)*")', lines[0])
        assert match
        assert json.loads(match[1]) == text


def test_a_warning_is_escaped(tmp_path: Path) -> None:
    """Its text may come from a container."""
    path = tmp_path / "log"
    Log(str(path), json_format=True).warning(HOSTILE)
    message = json.loads(path.read_text())["msg"]
    assert message.isascii()
    assert message.isprintable()


def test_records_are_appended(tmp_path: Path) -> None:
    """The file is the engine's: what is in it stays."""
    path = tmp_path / "log"
    path.write_text("old\n")
    log = Log(str(path), json_format=True)
    log.record("warning", "one")
    log.record("error", "two")
    assert [line[:4] for line in path.read_text().splitlines()] == ["old", '{"le', '{"le']


@pytest.mark.parametrize("level", LEVELS)
def test_levels_below_the_chosen_one_are_silent(tmp_path: Path, level: str) -> None:
    """`error` is always on."""
    path = tmp_path / "log"
    log = Log(str(path), json_format=True, level=level)
    for each in LEVELS:
        log.record(each, each)
    seen = [json.loads(line)["level"] for line in path.read_text().splitlines()]
    assert seen == list(LEVELS[: LEVELS.index(level) + 1])


def test_the_debug_file_gets_the_same_records(tmp_path: Path) -> None:
    """Beside the engine's log, which is gone with the container."""
    log = Log(str(tmp_path / "log"), json_format=False)
    log.debug_file = str(tmp_path / "debug")
    log.record("info", "x")
    assert (tmp_path / "debug").read_text() == (tmp_path / "log").read_text()


def test_the_directories_of_the_debug_file_are_made(tmp_path: Path) -> None:
    """The operator has named it, and nobody else would; the engine makes its own."""
    log = Log(str(tmp_path / "engine" / "log"), json_format=False)
    log.debug_file = str(tmp_path / "a" / "b" / "debug")
    log.record("info", "x")
    assert (tmp_path / "a" / "b" / "debug").read_text().endswith('msg="x"\n')
    assert os.listdir(tmp_path) == ["a"]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """A missing directory, a FIFO nobody reads, a link, a directory, a full device."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    for name in ("missing/log", "fifo", "link", "."):
        Log(str(tmp_path / name), json_format=True).record("error", "x")
    Log("/dev/full", json_format=True).record("error", "x")
    Log("/dev/null", json_format=True).record("error", "x")
    Log(None, json_format=True).record("error", "x")
    assert (tmp_path / "target").read_text() == ""


@pytest.mark.parametrize("which", ["engine", "debug"])
def test_a_file_with_another_name_is_not_written_to(tmp_path: Path, which: str) -> None:
    """LOG-02: who may make names in its directory would choose what root appends to."""
    victim, path = tmp_path / "victim", tmp_path / "log"
    victim.write_text("old\n")
    os.link(victim, path)
    log = Log(str(path) if which == "engine" else None, json_format=True)
    log.debug_file = str(path)
    log.record("error", "x")
    assert victim.read_text() == "old\n"
    victim.unlink()
    log.record("error", "x")
    assert '"msg":"x"' in path.read_text().replace(" ", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_written_to(tmp_path: Path) -> None:
    """As logrotate makes it for syslog; who names the log knows whose it is."""
    path = tmp_path / "log"
    path.touch()
    os.chown(path, 12345, 0)
    Log(str(path), json_format=True).record("error", "x")
    assert json.loads(path.read_text())["msg"] == "x"


def test_an_error_goes_to_stderr_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A person who runs it by hand has no log file."""
    log = Log(str(tmp_path / "log"), json_format=True)
    log.error("program: request: x\nhint: y")
    assert capfd.readouterr().err == "program: request: x\nhint: y\n"
    assert json.loads((tmp_path / "log").read_text())["msg"] == "program: request: x\nhint: y"
