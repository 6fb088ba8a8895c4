# SPDX-License-Identifier: Apache-2.0
"""Our drop-in of containerd comes behind those of others, in front of which it would be lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("gpuruntime")
MAIN = 'version = 2\nimports = ["{}/conf.d/*.toml"]\n'
THEIRS = """\
version = 2

[plugins]

  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
    BinaryName = "/usr/bin/nvidia-container-runtime"
"""


class Host:
    """The config of a containerd in *place*."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.main = place / "config.toml"
        self.main.write_text(MAIN.format(place))
        self.drop_ins = place / "conf.d"
        self.drop_ins.mkdir()
        self.theirs = self.drop_ins / "99-nvidia.toml"

    def configure(self, *words: object) -> str:
        """Run the command; return what it says."""
        return subprocess.run(
            [
                *(PROGRAM, "runtime", "configure", "--runtime", "containerd"),
                *("--config", self.main, "--state-dir", self.place / "state"),
                *("--runtime-path", "/bin/true", *map(str, words)),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr

    def names(self) -> list[str]:
        """Return the names of the drop-ins."""
        return sorted(path.name for path in self.drop_ins.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a config that imports drop-ins, of which there is none."""
    return Host(tmp_path)


@pytest.mark.slow
def test_alone_it_has_its_usual_name(host: Host) -> None:
    """As the documents say."""
    host.configure()
    assert host.names() == ["99-gpuruntime.toml"]


@pytest.mark.slow
def test_behind_the_incumbents_it_is_the_last(host: Host) -> None:
    """It has the incumbent's runtime as well: before 2.1, only the last file counts."""
    host.theirs.write_text(THEIRS)
    assert 'warning: "' not in host.configure()
    assert host.names() == ["99-nvidia.toml", "zz-gpuruntime.toml"]
    text = (host.drop_ins / "zz-gpuruntime.toml").read_text()
    assert "containerd.runtimes.nvidia]" in text
    assert "containerd.runtimes.gpuruntime]" in text
    assert host.configure().count("unchanged") == 2
    # It stays, and goes, when that of the incumbent has gone.
    host.theirs.unlink()
    host.configure()
    assert host.names() == ["zz-gpuruntime.toml"]
    host.configure("--undo")
    assert host.names() == []
    assert host.main.read_text() == MAIN.format(host.place)


def test_settings_of_others_that_are_not_of_the_plugin_change_nothing(host: Host) -> None:
    """They are merged, in whichever order."""
    host.theirs.write_text('version = 2\n[debug]\nlevel = "info"\n')
    host.configure()
    assert host.names() == ["99-gpuruntime.toml", "99-nvidia.toml"]


@pytest.mark.slow
def test_an_undo_finds_both_that_we_have_written(host: Host) -> None:
    """The incumbent came after the first."""
    host.configure()
    host.theirs.write_text(THEIRS)
    host.configure()
    assert host.names() == ["99-gpuruntime.toml", "99-nvidia.toml", "zz-gpuruntime.toml"]
    said = host.configure("--undo")
    assert said.count("removed ") == 2
    assert host.names() == ["99-nvidia.toml"]
    assert host.theirs.read_text() == THEIRS
    assert host.main.read_text() == MAIN.format(host.place)
    assert not (host.place / "state").exists()


def test_a_drop_in_that_was_named_stays_where_it_was_named(host: Host) -> None:
    """With a warning: who names one has a reason."""
    host.theirs.write_text(THEIRS)
    named = host.drop_ins / "50-mine.toml"
    assert f'"{host.theirs}" is read after "{named}"' in host.configure("--drop-in-config", named)
    assert host.names() == ["50-mine.toml", "99-nvidia.toml"]
