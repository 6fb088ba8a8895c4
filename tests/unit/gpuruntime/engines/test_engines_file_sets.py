# SPDX-License-Identifier: Apache-2.0
"""Each engine's files before and after, written by hand: configure, once more, and undo."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpuruntime.engines import config_paths, file_changes, file_sets
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.runtime_entry import RuntimeEntry

DATA = Path(__file__).parents[3] / "data" / "engines"
PROGRAM = "/usr/bin/gpu-container-runtime"
HOST = config_paths.HostFacts({"HOME": "/root"}, 0, lambda _path: False, ())


class Case(NamedTuple):
    """An engine, the name of its file, and what is asked for."""

    engine: str
    config: str
    is_default: bool = False
    has_cdi: bool = False
    annotations: tuple[str, ...] = ()
    is_in_place: bool = False


CASES = {
    "docker-new": Case("docker", "daemon.json", is_default=True, has_cdi=True),
    "docker-kept": Case("docker", "daemon.json", has_cdi=True),
    "docker-default": Case("docker-rootless", "daemon.json", is_default=True),
    "docker-one-line": Case("docker", "daemon.json"),
    "docker-crlf": Case("docker", "daemon.json"),
    "containerd-new": Case("containerd", "config.toml", is_default=True, has_cdi=True),
    "containerd-v1": Case("containerd", "config.toml", is_default=True, has_cdi=True),
    "containerd-v2": Case("containerd", "config.toml", annotations=("cdi.k8s.io/",)),
    "containerd-v3": Case("containerd", "config.toml", is_default=True, has_cdi=True),
    "containerd-imports": Case("containerd", "config.toml"),
    "containerd-in-place": Case("containerd", "config.toml", is_in_place=True),
    "microk8s": Case("microk8s", "containerd-template.toml", is_default=True),
    "k0s": Case("k0s", "containerd.toml", is_default=True),
    "k3s-new": Case("k3s", "config.toml"),
    "k3s-v2": Case("rke2", "config.toml.tmpl", annotations=("cdi.k8s.io/",)),
    "crio-new": Case("crio", "crio.conf", is_default=True),
    "crio-drop-ins": Case("crio", "crio.conf"),
    "crio-in-place": Case("crio", "crio.conf", is_default=True, is_in_place=True),
    "podman-new": Case("podman", "containers.conf", is_default=True),
    "podman-in-place": Case("podman", "containers.conf", is_in_place=True),
}


def place_in(directory: Path, case: Case) -> EngineConfig:
    """Return the engine's place, moved to *directory*."""
    usual = config_paths.find(case.engine, HOST, "gpuruntime")
    path = directory / case.config
    drop_in = usual.drop_in
    if drop_in:
        drop_in = str(directory / Path(drop_in).parent.name / Path(drop_in).name)
    if case.is_in_place:
        drop_in = ""
    return EngineConfig(usual.name, usual.family, str(path), drop_in, usual.restart)


def entry_of(case: Case) -> RuntimeEntry:
    """Return what the case asks for."""
    return RuntimeEntry(
        "gpuruntime",
        PROGRAM,
        is_default=case.is_default,
        has_cdi=case.has_cdi,
        annotations=case.annotations,
    )


def tree(directory: Path) -> dict[str, bytes]:
    """Return the files below *directory*."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def lay_out(name: str, directory: Path) -> None:
    """Put the files of the case's `before` into *directory*."""
    for path, data in tree(DATA / name / "before").items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data.replace(b"@DIR@", os.fsencode(directory)))


def stamps(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return what tells whether something was written."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        status = os.lstat(path)
        found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return found


def configure(place: EngineConfig, case: Case, state: Path) -> list[str]:
    """Do what the command does."""
    found = file_sets.to_configure(place, entry_of(case))
    return file_changes.configure(file_changes.to_configure(found.files, str(state)), str(state))


def undo(place: EngineConfig, case: Case, state: Path) -> list[str]:
    """Do what the command does with --undo."""
    entry = RuntimeEntry("gpuruntime", PROGRAM)
    found = file_sets.to_undo(place, entry)
    del case
    return file_changes.undo(file_changes.to_undo(found.files, str(state)), str(state))


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """Return a directory for the engine's files."""
    directory = tmp_path / "etc"
    directory.mkdir()
    return directory


def test_every_directory_of_data_is_a_case() -> None:
    """A golden file that no test reads is worth nothing."""
    assert sorted(CASES) == sorted(path.name for path in DATA.iterdir())


@pytest.mark.parametrize("name", CASES)
def test_configured_files_are_as_written_by_hand(etc: Path, tmp_path: Path, name: str) -> None:
    """What was there stays as it is, to the byte."""
    case = CASES[name]
    lay_out(name, etc)
    configure(place_in(etc, case), case, tmp_path / "state")
    wanted = {
        path: data.replace(b"@DIR@", os.fsencode(etc))
        for path, data in tree(DATA / name / "after").items()
    }
    assert tree(etc) == wanted


@pytest.mark.parametrize("name", CASES)
def test_a_second_configure_touches_nothing(etc: Path, tmp_path: Path, name: str) -> None:
    """Engines that are restarted whenever their config is written kill pods for nothing."""
    case = CASES[name]
    lay_out(name, etc)
    place = place_in(etc, case)
    first = configure(place, case, tmp_path / "state")
    assert any(line.startswith("wrote") for line in first)
    before = stamps(tmp_path)
    second = configure(place, case, tmp_path / "state")
    assert all(line.startswith("unchanged") for line in second)
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("name", CASES)
def test_undo_gives_back_every_byte_and_no_directory(etc: Path, tmp_path: Path, name: str) -> None:
    """Also after two configures, and nothing of ours is left anywhere."""
    case = CASES[name]
    lay_out(name, etc)
    place = place_in(etc, case)
    before = tree(etc), sorted(etc.rglob("*"))
    configure(place, case, tmp_path / "state")
    configure(place, case._replace(is_default=case.is_default, has_cdi=True), tmp_path / "state")
    undo(place, case, tmp_path / "state")
    assert (tree(etc), sorted(etc.rglob("*"))) == before
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", CASES)
def test_undo_without_a_record_takes_the_runtime_out(etc: Path, tmp_path: Path, name: str) -> None:
    """As after an installation by somebody else, or when /var/lib has been cleaned."""
    case = CASES[name]
    lay_out(name, etc)
    place = place_in(etc, case)
    configure(place, case, tmp_path / "state")
    assert any(b"gpuruntime" in data for data in tree(etc).values())
    undo(place, case, tmp_path / "elsewhere")
    for path, data in tree(etc).items():
        if path != "config.toml" or b"imports" not in data:
            assert b"gpuruntime" not in data, path


@pytest.mark.parametrize("name", [name for name in CASES if "k3s" not in name])
def test_undo_keeps_what_somebody_has_added_since(etc: Path, tmp_path: Path, name: str) -> None:
    """A config is edited by more than one."""
    case = CASES[name]
    lay_out(name, etc)
    place = place_in(etc, case)
    configure(place, case, tmp_path / "state")
    path = etc / case.config
    is_json = case.config.endswith("json")
    if not path.exists():
        path = Path(place.drop_in)
    text = path.read_text()
    if is_json:
        path.write_text('{"theirs": [1, 2],' + text.strip()[1:])
    else:
        path.write_text(text + "\n[theirs]\nkey = 1 # kept\n")
    undo(place, case, tmp_path / "state")
    left = path.read_text()
    document: dict[str, Any] = json.loads(left) if is_json else tomllib.loads(left)
    assert document.pop("theirs") == ([1, 2] if is_json else {"key": 1})
    before = DATA / name / "before" / case.config
    old = before.read_text() if before.exists() else ("{}" if is_json else "")
    old = old.replace("@DIR@", str(etc))
    wanted = json.loads(old) if is_json else tomllib.loads(old)
    document.pop("version", None)
    wanted.pop("version", None)
    assert document == wanted
    assert is_json or "key = 1 # kept\n" in left


def test_undo_keeps_what_somebody_has_added_to_a_template(etc: Path, tmp_path: Path) -> None:
    """A template is text: only our lines are known."""
    case = CASES["k3s-v2"]
    lay_out("k3s-v2", etc)
    place = place_in(etc, case)
    path = etc / case.config
    before = path.read_text()
    configure(place, case, tmp_path / "state")
    path.write_text("{{/* theirs */}}\n" + path.read_text() + "# theirs\n")
    undo(place, case, tmp_path / "state")
    assert path.read_text() == "{{/* theirs */}}\n" + before + "# theirs\n"
