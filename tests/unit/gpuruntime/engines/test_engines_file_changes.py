# SPDX-License-Identifier: Apache-2.0
"""Files of engines survive a kill at any system call, and records say what was before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuruntime.engines import (
    config_paths,
    file_changes,
    file_sets,
    files,
    undo_records,
)
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ConfigError

BEFORE = '{\n  "a": 1\n}\n'
ENTRY = RuntimeEntry("gpuruntime", "/usr/bin/gpu-container-runtime")
CALLS = ("open", "mkdir", "fchmod", "fsync", "rename", "unlink", "rmdir")


def place(path: Path) -> EngineConfig:
    """Return a docker whose config is *path*."""
    return EngineConfig("docker", "docker", str(path), "", "")


def configure(path: Path, state: Path) -> None:
    """Do what the command does."""
    file_changes.configure(
        file_changes.to_configure(file_sets.to_configure(place(path), ENTRY).files, str(state)),
        str(state),
    )


def undo(path: Path, state: Path) -> None:
    """Do what the command does with --undo."""
    found = file_sets.to_undo(place(path), ENTRY).files
    file_changes.undo(file_changes.to_undo(found, str(state)), str(state))


def killed_at(call: str, count: int, act: Callable[[], None]) -> bool:
    """Run *act* in a child killed at the *count*th *call*; return whether it came so far."""
    child = os.fork()
    if child == 0:
        real = getattr(os, call)
        seen = 0

        def dies(*arguments: object, **options: object) -> object:
            nonlocal seen
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, call, dies)
        try:
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_kill_leaves_the_old_file_or_the_new(
    tmp_path: Path, call: str, *, is_there: bool
) -> None:
    """Half a config and no container of the node starts. An undo is right afterwards, too."""
    etc, state = tmp_path / "etc", tmp_path / "state"
    path = etc / "docker" / "daemon.json"
    for count in range(1, 40):
        if is_there:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(BEFORE)
        died = killed_at(call, count, lambda: configure(path, state))
        if path.exists():
            document = json.loads(path.read_text())
            assert document == {"a": 1} or "runtimes" in document
        else:
            assert not is_there
        undone = killed_at(call, count, lambda: undo(path, state))
        undo(path, state)
        assert path.exists() == is_there
        assert not is_there or path.read_text() == BEFORE
        if not died and not undone:
            break
    else:
        pytest.fail("never came to the end")


def test_a_second_configure_keeps_the_first_original(tmp_path: Path) -> None:
    """Undo goes back to what was before all of ours."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text(BEFORE)
    configure(path, state)
    other = RuntimeEntry("gpuruntime", "/opt/gpu-container-runtime", is_default=True)
    plan = file_changes.to_configure(file_sets.to_configure(place(path), other).files, str(state))
    file_changes.configure(plan, str(state))
    undo(path, state)
    assert path.read_text() == BEFORE


def test_an_edit_between_two_configures_stays(tmp_path: Path) -> None:
    """It is part of what was there before the second."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text(BEFORE)
    configure(path, state)
    path.write_text(path.read_text().replace('"a": 1', '"a": 2'))
    other = RuntimeEntry("gpuruntime", "/opt/gpu-container-runtime", is_default=True)
    file_changes.configure(
        file_changes.to_configure(file_sets.to_configure(place(path), other).files, str(state)),
        str(state),
    )
    undo(path, state)
    assert json.loads(path.read_text()) == {"a": 2}


def test_what_was_replaced_comes_back(tmp_path: Path) -> None:
    """Another's default and entry, also if somebody has edited something else since."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    old = {"default-runtime": "kata", "runtimes": {"gpuruntime": {"path": "/old"}}}
    path.write_text(json.dumps(old))
    entry = RuntimeEntry("gpuruntime", "/new", is_default=True)
    file_changes.configure(
        file_changes.to_configure(file_sets.to_configure(place(path), entry).files, str(state)),
        str(state),
    )
    document = json.loads(path.read_text())
    assert document["default-runtime"] == "gpuruntime"
    document["theirs"] = True
    path.write_text(json.dumps(document))
    undo(path, state)
    assert json.loads(path.read_text()) == {**old, "theirs": True}


def test_what_somebody_has_changed_of_ours_is_theirs(tmp_path: Path) -> None:
    """A default that is another by now stays that."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text("{}")
    entry = RuntimeEntry("gpuruntime", "/new", is_default=True)
    file_changes.configure(
        file_changes.to_configure(file_sets.to_configure(place(path), entry).files, str(state)),
        str(state),
    )
    document = json.loads(path.read_text())
    document["default-runtime"] = "kata"
    path.write_text(json.dumps(document))
    undo(path, state)
    assert json.loads(path.read_text()) == {"default-runtime": "kata"}


def test_a_file_that_was_removed_since_stays_away(tmp_path: Path) -> None:
    """Nobody asked for it back."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text(BEFORE)
    configure(path, state)
    path.unlink()
    undo(path, state)
    assert not path.exists()
    assert not state.exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1, "path": 1}', "{"])
def test_a_broken_record_is_named(tmp_path: Path, text: str) -> None:
    """With what to do about it."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text(BEFORE)
    configure(path, state)
    (record,) = state.iterdir()
    record.write_text(text)
    with pytest.raises(ConfigError, match="not an undo record") as caught:
        configure(path, state)
    assert caught.value.hint == "remove it"


def test_records_that_others_may_write_are_not_believed(tmp_path: Path) -> None:
    """An undo would write what they say."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text(BEFORE)
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        undo(path, state)
    assert path.read_text() == BEFORE


def test_each_user_has_records_of_his_own() -> None:
    """Rootless docker's config is the user's."""
    assert undo_records.default_directory({}, 0) == "/var/lib/gpuruntime/engines"
    home = {"HOME": "/home/u"}
    assert undo_records.default_directory(home, 7) == "/home/u/.local/state/gpuruntime/engines"
    assert undo_records.default_directory({"XDG_STATE_HOME": "/s"}, 7) == "/s/gpuruntime/engines"


def test_the_names_of_the_engines_are_in_the_help() -> None:
    """And each of them has a place."""
    host = config_paths.HostFacts({"HOME": "/root"}, 0, lambda _: False, ())
    assert [config_paths.find(name, host, "x").name for name in config_paths.names()] == list(
        config_paths.names()
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_file_of_another_user_is_named(tmp_path: Path) -> None:
    """Neither taken for missing nor overwritten."""
    path = tmp_path / "daemon.json"
    path.write_text(BEFORE)
    path.chmod(0o600)
    new = str(tmp_path / "new")
    for directory in (tmp_path, *tmp_path.parents):
        if os.stat(directory).st_uid == 0 and str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    # In a child: this process has threads, and those of a test runner do not bear another user.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            for action in (lambda: files.read(str(path)), lambda: files.replace(new, "text")):
                try:
                    action()
                except ConfigError as error:
                    os.write(writer, f"{error.lines()}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, encoding="utf-8") as stream:
        said = stream.read()
    assert "Permission denied" in said
    assert f'cannot write "{new}"' in said
    assert said.count("run as root") == 2
    assert [item.name for item in tmp_path.iterdir()] == ["daemon.json"]


def test_extended_attributes_are_kept(tmp_path: Path) -> None:
    """The SELinux label is one."""
    path = tmp_path / "daemon.json"
    path.write_text(BEFORE)
    try:
        os.setxattr(path, "user.mine", b"kept")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    configure(path, tmp_path / "state")
    assert os.getxattr(path, "user.mine") == b"kept"
