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
    edits,
    files,
    json_text,
    records,
    targets,
    toml_text,
    work,
)
from gpuruntime.engines.config_paths import Place
from gpuruntime.engines.entry import Entry
from gpuruntime.engines.errors import BadFileError
from gpuruntime.errors import ConfigError

BEFORE = '{\n  "a": 1\n}\n'
ENTRY = Entry("gpuruntime", "/usr/bin/gpu-container-runtime")
CALLS = ("open", "mkdir", "fchmod", "fsync", "rename", "unlink", "rmdir")


def place(path: Path) -> Place:
    """Return a docker whose config is *path*."""
    return Place("docker", "docker", str(path), "", "")


def configure(path: Path, state: Path) -> None:
    """Do what the command does."""
    work.configure(work.plan(targets.of(place(path), ENTRY).targets, str(state)), str(state))


def undo(path: Path, state: Path) -> None:
    """Do what the command does with --undo."""
    found = targets.for_undo(place(path), ENTRY).targets
    work.undo(work.plan_undo(found, str(state)), str(state))


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
    other = Entry("gpuruntime", "/opt/gpu-container-runtime", is_default=True)
    plan = work.plan(targets.of(place(path), other).targets, str(state))
    work.configure(plan, str(state))
    undo(path, state)
    assert path.read_text() == BEFORE


def test_an_edit_between_two_configures_stays(tmp_path: Path) -> None:
    """It is part of what was there before the second."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text(BEFORE)
    configure(path, state)
    path.write_text(path.read_text().replace('"a": 1', '"a": 2'))
    other = Entry("gpuruntime", "/opt/gpu-container-runtime", is_default=True)
    work.configure(work.plan(targets.of(place(path), other).targets, str(state)), str(state))
    undo(path, state)
    assert json.loads(path.read_text()) == {"a": 2}


def test_what_was_replaced_comes_back(tmp_path: Path) -> None:
    """Another's default and entry, also if somebody has edited something else since."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    old = {"default-runtime": "kata", "runtimes": {"gpuruntime": {"path": "/old"}}}
    path.write_text(json.dumps(old))
    entry = Entry("gpuruntime", "/new", is_default=True)
    work.configure(work.plan(targets.of(place(path), entry).targets, str(state)), str(state))
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
    entry = Entry("gpuruntime", "/new", is_default=True)
    work.configure(work.plan(targets.of(place(path), entry).targets, str(state)), str(state))
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
    with pytest.raises(ConfigError, match="no record") as caught:
        configure(path, state)
    assert caught.value.hint == "remove it"


def test_records_that_others_may_write_are_not_believed(tmp_path: Path) -> None:
    """An undo would write what they say."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text(BEFORE)
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        undo(path, state)
    assert path.read_text() == BEFORE


def test_each_user_has_records_of_his_own() -> None:
    """Rootless docker's config is the user's."""
    assert records.default_directory({}, 0) == "/var/lib/gpuruntime/engines"
    home = {"HOME": "/home/u"}
    assert records.default_directory(home, 7) == "/home/u/.local/state/gpuruntime/engines"
    assert records.default_directory({"XDG_STATE_HOME": "/s"}, 7) == "/s/gpuruntime/engines"


@pytest.mark.parametrize(
    ("text", "path", "value", "wanted"),
    [
        # Above the first table and its comment.
        ("# of a\n[a]\n", ("x",), 1, "x = 1\n\n# of a\n[a]\n"),
        ("# top\n\n[a]\n", ("x",), 1, "# top\n\nx = 1\n\n[a]\n"),
        ("y = 2\n", ("x",), 1, "y = 2\nx = 1\n"),
        ("y = 2", ("x",), 1, "y = 2\nx = 1\n"),
        # In the table, not below the comment of the next.
        ("[a]\n  y = 1\n\n# b\n[b]\n", ("a", "x"), 1, "[a]\n  y = 1\n  x = 1\n\n# b\n[b]\n"),
        ("[a.b]\ny = 1\n", ("a", "x"), "s", '[a.b]\ny = 1\n\n[a]\nx = "s"\n'),
        ("x = 1 # why\n", ("x",), 2, "x = 2 # why\n"),
        ('x = """\na\n""" # why\n', ("x",), [1], "x = [1] # why\n"),
        ("a = {y = 1}\n", ("a", "x"), 1, "a = {y = 1, x = 1}\n"),
        ("a.y = 1\n", ("a", "x"), 1, "a.y = 1\na.x = 1\n"),
        ("[[a]]\nx = 1\n", ("b", "x"), 1, "[[a]]\nx = 1\n\n[b]\nx = 1\n"),
        ("y = 1\r\n", ("x",), 1, "y = 1\r\nx = 1\r\n"),
        ('"a b" = 1\n', ("é",), True, '"a b" = 1\n"é" = true\n'),
        ("[a] # h\r\ny = 1\r\n", ("a", "x"), 1, "[a] # h\r\ny = 1\r\nx = 1\r\n"),
        # What is set keeps its place, its blanks and its comment.
        ("a = {y = 1, z = 2} # c\n", ("a", "y"), 3, "a = {y = 3, z = 2} # c\n"),
        ("  x  =  [\n 1, # one\n]  # c\ny = 1", ("x",), [], "  x  =  []  # c\ny = 1"),
        ("x = []\n", ("x",), [], "x = []\n"),
        ("[a]\nb.x = 1\nb.y = 2\n", ("a", "b", "y"), 3, "[a]\nb.x = 1\nb.y = 3\n"),
        # tomlkit does not read this document.
        ("x = 1\n[[a]]\n[b]\n[a.c]\n", ("x",), 2, "x = 2\n[[a]]\n[b]\n[a.c]\n"),
    ],
)
def test_a_toml_key_is_set_where_a_person_would(
    text: str, path: tuple[str, ...], value: object, wanted: str
) -> None:
    """The next reader is one."""
    assert toml_text.assign(text, path, value) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = []\n", 'x = ["i"]\n'),
        ('x = ["a"] # why\n', 'x = ["a", "i"] # why\n'),
        ('x = ["a",]\n', 'x = ["a", "i"]\n'),
        ('x = [\n  "a", # one\n]\n', 'x = [\n  "a", # one\n  "i",\n]\n'),
        ('x = [\n\t"a" # one\n]\n', 'x = [\n\t"a", # one\n\t"i"\n]\n'),
        ('x = [\r\n  "a",\r\n]\r\n', 'x = [\r\n  "a",\r\n  "i",\r\n]\r\n'),
        ("x = [\n]\n", 'x = ["i"\n]\n'),
    ],
)
def test_an_item_joins_a_toml_list_in_its_manner(text: str, wanted: str) -> None:
    """One line is added to a list of lines."""
    assert toml_text.append_item(text, ("x",), "i") == wanted


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ("x = 1\ny = 2\n", ("x",), "y = 2\n"),
        ("[a]\nx = 1\n\n[a.b]\ny = 1\n\n# c\n[c]\n", ("a", "b"), "[a]\nx = 1\n\n# c\n[c]\n"),
        ("a = {x = 1, y = 2}\n", ("a", "x"), "a = { y = 2}\n"),
        ("x = 1\n", ("nothing", "here"), "x = 1\n"),
    ],
)
def test_a_toml_key_is_taken_out(text: str, path: tuple[str, ...], wanted: str) -> None:
    """With its lines, and no other's."""
    assert toml_text.remove(text, path) == wanted


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ('{"a": 1, "b": 2}', ("a",), '{"b": 2}'),
        ('{"a": 1, "b": 2}', ("b",), '{"a": 1}'),
        ('{"a": {"b": 2}}', ("a", "b"), '{"a": {}}'),
        ('{"a": 1}', ("b", "c"), '{"a": 1}'),
        ('{"a": 1}', ("a", "c"), '{"a": 1}'),
        ('{\n  "a": 1,\n  "b": 2\n}\n', ("a",), '{\n  "b": 2\n}\n'),
    ],
)
def test_a_json_member_is_taken_out(text: str, path: tuple[str, ...], wanted: str) -> None:
    """With its comma."""
    assert json_text.remove(text, path) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = [] # c\n", "x = [] # c\n"),
        ("x = [\n]\n", "x = [\n]\n"),
        ('x = ["a"] # c\n', "x = [] # c\n"),
        ("x = 1\n", "x = []\n"),
        ("x = {}\n", "x = []\n"),
    ],
)
def test_a_toml_list_can_be_emptied(text: str, wanted: str) -> None:
    """One that is empty already keeps its lines."""
    assert edits.apply("toml", text, [(("x",), [])]) == wanted


def test_null_is_as_good_as_nothing() -> None:
    """Go's decoder takes it so."""
    text = '{"runtimes": null}'
    changed = edits.apply("json", text, [(("runtimes", "x"), {"path": "p"})])
    assert json.loads(changed) == {"runtimes": {"x": {"path": "p"}}}


def test_a_value_on_the_way_is_named() -> None:
    """By its path in the document."""
    with pytest.raises(BadFileError, match=r'has "a\.b", which is no table'):
        edits.apply("toml", "[a]\nb = 1\n", [(("a", "b", "c"), 1)])


def test_the_names_of_the_engines_are_in_the_help() -> None:
    """And each of them has a place."""
    host = config_paths.Host({"HOME": "/root"}, 0, lambda _: False, ())
    assert [config_paths.find(name, host, "x").name for name in config_paths.names()] == list(
        config_paths.names()
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_file_of_another_user_is_named(tmp_path: Path) -> None:
    """Neither taken for missing nor overwritten."""
    path = tmp_path / "daemon.json"
    path.write_text(BEFORE)
    path.chmod(0o600)
    for directory in (tmp_path, *tmp_path.parents):
        if os.stat(directory).st_uid == 0 and str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="Permission denied") as caught:
            files.read(str(path))
        with pytest.raises(ConfigError, match="cannot write"):
            files.replace(str(tmp_path / "new"), "text")
    finally:
        os.seteuid(0)
    assert "run as root" in str(caught.value.hint)
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
