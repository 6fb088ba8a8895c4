# SPDX-License-Identifier: Apache-2.0
"""Config files that name our program are found, each with the command that undoes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuruntime.engines import config_paths, file_changes, file_sets, references
from gpuruntime.engines.config_paths import EngineConfig, HostFacts
from gpuruntime.engines.references import Reference
from gpuruntime.engines.runtime_entry import RuntimeEntry

PROGRAM = "/opt/x/gpu-container-runtime"
NVIDIA = "/opt/x/nvidia-container-runtime"
HOST = HostFacts({"HOME": "/nonexistent"}, 0, lambda _path: False, ())
UNDO = "gpuruntime runtime configure --undo --runtime"


def find(state: Path, *programs: str) -> list[Reference]:
    """Return the references to *programs*."""
    return references.find(programs or (PROGRAM,), HOST, str(state))


def register(engine: EngineConfig, entry: RuntimeEntry, state: Path) -> None:
    """Configure *entry* as the command does."""
    changes = file_changes.to_configure(file_sets.to_configure(engine, entry).files, str(state))
    file_changes.configure(changes, str(state))


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory in which docker, containerd and k3s have their usual files."""
    table = config_paths._ENGINES
    for name, path in (
        ("docker", "daemon.json"),
        ("containerd", "config.toml"),
        ("crio", "crio.conf"),
        ("podman", "containers.conf"),
        ("k3s", "k3s"),
    ):
        family, _, drop_in, restart = table[name]
        if drop_in:
            drop_in = str(tmp_path / f"{name}.d" / Path(drop_in).name)
        monkeypatch.setitem(table, name, (family, str(tmp_path / path), drop_in, restart))
    (tmp_path / "k3s").mkdir()
    return tmp_path


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize("name", ["docker", "containerd", "crio", "podman", "k3s"])
def test_each_engine_s_file_is_found(usual: Path, name: str, *, has_record: bool) -> None:
    """By the record, and by the usual place if there is none."""
    state = usual / "state"
    engine = config_paths.find(name, HOST, "gpuruntime")
    for entry in (RuntimeEntry("gpuruntime", PROGRAM), RuntimeEntry("other", "/opt/other")):
        register(engine, entry, state if has_record else usual / "elsewhere")
    (reference,) = find(state)
    assert PROGRAM in Path(reference.path).read_text()
    assert (reference.name, reference.command) == ("gpuruntime", f"{UNDO} {name}")
    assert [found.name for found in find(state, PROGRAM, "/opt/other")] == ["gpuruntime", "other"]
    assert find(state, "/opt/x/gpu-container") == []


def test_the_command_names_what_is_not_usual(usual: Path) -> None:
    """Name, config file, drop-in: it undoes the runtime where it was registered."""
    state = usual / "state"
    crio = config_paths.find("crio", HOST, "gpuruntime")
    other = str(usual / "my config.json")
    for engine, name in (
        (EngineConfig("docker", "docker", other, "", ""), "mine"),
        (
            EngineConfig(
                "containerd", "containerd", f"{usual}/c.toml", f"{usual}/conf.d/x.toml", ""
            ),
            "gpuruntime",
        ),
        (EngineConfig("crio", "crio", crio.config, str(usual / "50-x.toml"), ""), "gpuruntime"),
    ):
        register(engine, RuntimeEntry(name, PROGRAM), state)
    assert [reference.command for reference in find(state)] == [
        f"{UNDO} crio --drop-in-config {usual}/50-x.toml",
        f"{UNDO} containerd --config {usual}/c.toml --drop-in-config {usual}/conf.d/x.toml",
        f"{UNDO} docker --runtime-name mine --config '{other}'",
    ]


def test_a_file_that_cannot_be_read_has_no_reference(usual: Path) -> None:
    """The maintainer script of a package asks, and must not fail."""
    (usual / "daemon.json").write_text(f'{{"runtimes": {{"x": {{"path": "{PROGRAM}"}}')
    (usual / "config.toml").mkdir()
    state = usual / "state"
    state.mkdir()
    (state / "broken.json").write_text("{")
    assert find(state) == []
