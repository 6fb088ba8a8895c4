# SPDX-License-Identifier: Apache-2.0
"""Each engine's files before and after, written by hand: configure, once more, and undo."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpuruntime.engines import config_paths, file_changes, file_sets, rancher
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


def place_in(directory: Path, case: Case, brand: str = "gpuruntime") -> EngineConfig:
    """Return the engine's place, moved to *directory*."""
    usual = config_paths.find(case.engine, HOST, brand)
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


FIRST = RuntimeEntry("gpu-a", "/opt/a/gpu-container-runtime", has_cdi=True)
SECOND = RuntimeEntry("gpu-b", "/opt/b/gpu-container-runtime", has_cdi=True)


def register(place: EngineConfig, entry: RuntimeEntry, state: Path) -> None:
    """Configure *entry* as the command does."""
    changes = file_changes.to_configure(file_sets.to_configure(place, entry).files, str(state))
    file_changes.configure(changes, str(state))


def unregister(place: EngineConfig, entry: RuntimeEntry, state: Path) -> None:
    """Undo *entry* as the command does, which is given its name only."""
    config_files = file_sets.to_undo(place, RuntimeEntry(entry.name, PROGRAM)).files
    file_changes.undo(file_changes.to_undo(config_files, str(state)), str(state))


def meaning(directory: Path) -> dict[str, Any]:
    """Return path → document, or text of a template, of the files below *directory*."""
    return {
        path: json.loads(data)
        if path.endswith(".json")
        else data
        if "tmpl" in path
        else tomllib.loads(data.decode())
        for path, data in tree(directory).items()
    }


@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize("undone", ["first", "second"])
@pytest.mark.parametrize("name", CASES)
def test_an_undo_removes_one_of_two_runtimes(
    tmp_path: Path, name: str, undone: str, *, is_default: bool
) -> None:
    """The other is left as if only it had been configured; after its undo, every byte is back."""
    case = CASES[name]
    state = tmp_path / "state"
    both, alone = tmp_path / "etc", tmp_path / "other" / "etc"
    # k3s and RKE2 refuse a default that they have not detected.
    is_default = is_default and "k3s" not in name
    entries = [dataclasses.replace(each, is_default=is_default) for each in (FIRST, SECOND)]
    gone, left = entries if undone == "first" else entries[::-1]
    for directory in (both, alone):
        directory.mkdir(parents=True)
        lay_out(name, directory)
    before = tree(both)
    for entry in entries:
        register(place_in(both, case), entry, state)
    register(place_in(alone, case), left, tmp_path / "other" / "state")
    unregister(place_in(both, case), gone, state)
    expected = {
        path: json.loads(json.dumps(value).replace(str(alone), str(both)))
        if isinstance(value, dict)
        else value
        for path, value in meaning(alone).items()
    }
    assert meaning(both) == expected
    unregister(place_in(both, case), left, state)
    assert tree(both) == before
    assert not state.exists()


@pytest.mark.parametrize("undone", ["first", "second"])
@pytest.mark.parametrize("name", [name for name in CASES if "k3s" not in name])
def test_an_undo_of_one_of_two_keeps_an_edit_in_between(
    etc: Path, tmp_path: Path, name: str, undone: str
) -> None:
    """An edit beside our runtimes, made between the two configures or after them."""
    case = CASES[name]
    state = tmp_path / "state"
    lay_out(name, etc)
    place = place_in(etc, case)
    path = Path(place.drop_in or etc / case.config)
    for number, entry in enumerate((FIRST, SECOND)):
        register(place, entry, state)
        if not path.exists():
            path = etc / case.config
        add_key(path, f"theirs{number}")
    order = (FIRST, SECOND) if undone == "first" else (SECOND, FIRST)
    for entry in order:
        unregister(place, entry, state)
        kept = meaning(etc)[str(path.relative_to(etc))]
        assert (kept["theirs0"], kept["theirs1"]) == ({"key": 1}, {"key": 1})
        assert entry.path not in path.read_text()
    assert SECOND.path not in path.read_text()
    assert FIRST.path not in path.read_text()


def add_key(path: Path, key: str) -> None:
    """Add the table *key* to the config *path*."""
    text = path.read_text()
    if path.suffix == ".json":
        path.write_text(f'{{"{key}": {{"key": 1}},' + text.strip()[1:])
    else:
        path.write_text(f"{text}\n[{key}]\nkey = 1\n")


def test_an_edit_in_the_runtime_that_stays_is_kept(tmp_path: Path) -> None:
    """The undo of the other runtime does not configure this one again."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    place = EngineConfig("docker", "docker", str(path), "", "")
    for entry in (FIRST, SECOND):
        register(place, dataclasses.replace(entry, is_default=True), state)
    document = json.loads(path.read_text())
    document["runtimes"]["gpu-b"]["args"] = ["--debug"]
    document["default-runtime"] = "runc"
    path.write_text(json.dumps(document))
    unregister(place, FIRST, state)
    assert json.loads(path.read_text()) == {
        "default-runtime": "runc",
        "features": {"cdi": True},
        "runtimes": {"gpu-b": {"path": SECOND.path, "args": ["--debug"]}},
    }


def test_the_default_that_the_other_runtime_replaced_comes_back(tmp_path: Path) -> None:
    """The last one that was configured is the default; its undo restores the one before."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text('{"default-runtime": "kata"}')
    place = EngineConfig("docker", "docker", str(path), "", "")
    for entry in (FIRST, SECOND):
        register(place, dataclasses.replace(entry, is_default=True), state)
    unregister(place, SECOND, state)
    assert json.loads(path.read_text())["default-runtime"] == "gpu-a"
    unregister(place, FIRST, state)
    assert path.read_text() == '{"default-runtime": "kata"}'


def test_each_engine_and_each_file_has_its_own_undo(tmp_path: Path) -> None:
    """One name in docker's file, in another file of docker's, and in containerd's."""
    state = tmp_path / "state"
    places = {
        name: EngineConfig(family, family, str(tmp_path / name), "", "")
        for name, family in (
            ("daemon.json", "docker"),
            ("other.json", "docker"),
            ("config.toml", "containerd"),
        )
    }
    for place in places.values():
        register(place, FIRST, state)
    configured = tree(tmp_path)
    unregister(places["other.json"], FIRST, state)
    for name in ("daemon.json", "config.toml"):
        assert (tmp_path / name).read_bytes() == configured[name]
    assert not (tmp_path / "other.json").exists()


IMPORTING = 'version = 2\nimports = ["{}/conf.d/*.toml"]\n'


def test_a_copy_of_the_runtime_goes_with_it(tmp_path: Path) -> None:
    """A drop-in for containerd before 2.1 has a copy of what an earlier drop-in configures."""
    path, state = tmp_path / "config.toml", tmp_path / "state"
    path.write_text(IMPORTING.format(tmp_path))
    drop_ins = [str(tmp_path / "conf.d" / f"99-{brand}.toml") for brand in config_paths.BRANDS]
    ours, nvidia = (
        EngineConfig("containerd", "containerd", str(path), drop_in, "") for drop_in in drop_ins
    )
    register(ours, FIRST, state)
    register(nvidia, SECOND, state)
    assert "gpu-a" in Path(nvidia.drop_in).read_text()
    unregister(ours, FIRST, state)
    assert not Path(ours.drop_in).exists()
    text = Path(nvidia.drop_in).read_text()
    assert "gpu-a" not in text
    assert SECOND.path in text
    assert path.read_text() == IMPORTING.format(tmp_path)


@pytest.mark.parametrize("engine", ["containerd", "crio", "podman"])
def test_the_incumbent_s_drop_in_is_undone_by_the_runtime_s_name(
    tmp_path: Path, engine: str
) -> None:
    """It has no record of ours, and another name than our drop-in."""
    state = tmp_path / "state"
    ours, theirs = (
        place_in(tmp_path, Case(engine, "main.toml"), brand) for brand in config_paths.BRANDS
    )
    register(theirs, RuntimeEntry("nvidia", "/usr/bin/nvidia-container-runtime"), tmp_path / "x")
    register(ours, FIRST, state)
    configured = Path(ours.drop_in).read_bytes()
    unregister(ours, RuntimeEntry("nvidia", ""), state)
    for path in (ours.drop_in, theirs.drop_in):
        assert not Path(path).exists() or "nvidia-container-runtime" not in Path(path).read_text()
    assert b"gpu-a" in configured
    assert FIRST.path in Path(ours.drop_in).read_text()


def test_an_import_that_others_need_stays(tmp_path: Path) -> None:
    """Somebody has put a file of his own into the directory, and nothing else imports it."""
    path, state = tmp_path / "config.toml", tmp_path / "state"
    path.write_text("version = 2\n")
    drop_in = tmp_path / "conf.d" / "99-gpuruntime.toml"
    place = EngineConfig("containerd", "containerd", str(path), str(drop_in), "")
    register(place, FIRST, state)
    theirs = drop_in.with_name("mirrors.toml")
    theirs.write_text("version = 2\n")
    unregister(place, FIRST, state)
    assert tomllib.loads(path.read_text())["imports"] == [f"{drop_in.parent}/*.toml"]
    assert not drop_in.exists()
    theirs.unlink()
    unregister(place, FIRST, state)
    assert path.read_text() == "version = 2\n"
    assert not state.exists()


def test_options_from_the_engine_s_own_output_survive_the_undo_of_another(tmp_path: Path) -> None:
    """They are not in the file, so they cannot be copied from it again."""
    path, state = tmp_path / "config.toml", tmp_path / "state"
    place = EngineConfig("containerd", "containerd", str(path), str(tmp_path / "99-x.toml"), "")
    source = (
        'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]\n'
        "SystemdCgroup = true\n"
    )
    changes = file_changes.to_configure(
        file_sets.to_configure(place, FIRST, source).files, str(state)
    )
    file_changes.configure(changes, str(state))
    alone = tomllib.loads((tmp_path / "99-x.toml").read_text())
    register(place, SECOND, state)
    unregister(place, SECOND, state)
    assert tomllib.loads((tmp_path / "99-x.toml").read_text()) == alone
    assert "SystemdCgroup" in str(alone)


def test_the_default_that_k3s_is_told_is_undone_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It detects both runtimes, and one line of its own config says which is the default."""
    monkeypatch.setattr(rancher, "DETECTED_IN", ("/usr/bin",))
    for name in ("nvidia", "nvidia-cdi"):
        monkeypatch.setitem(rancher.DETECTED, name, "env")
    more = tmp_path / "99-gpuruntime.yaml"
    place = EngineConfig("k3s", "template", str(tmp_path), "", "", more=str(more))
    state = tmp_path / "state"
    for name in ("nvidia", "nvidia-cdi"):
        register(place, RuntimeEntry(name, "/usr/bin/env", is_default=True), state)
    unregister(place, RuntimeEntry("nvidia-cdi", ""), state)
    assert more.read_text() == "default-runtime: nvidia\n"
    unregister(place, RuntimeEntry("nvidia", ""), state)
    assert not more.exists()


def test_a_record_of_an_earlier_version_is_undone_as_a_whole(tmp_path: Path) -> None:
    """It does not say which runtimes it has."""
    path, state = tmp_path / "daemon.json", tmp_path / "state"
    path.write_text('{"a": 1}')
    place = EngineConfig("docker", "docker", str(path), "", "")
    register(place, FIRST, state)
    (record,) = state.iterdir()
    document = json.loads(record.read_text())
    del document["runtimes"]
    record.write_text(json.dumps(document))
    unregister(place, FIRST, state)
    assert path.read_text() == '{"a": 1}'
