# SPDX-License-Identifier: Apache-2.0
"""What CDI specs give, and the state that goes with it: whatever changes, it has to show."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdi import registry
from gpuruntime import probes
from gpuruntime.config import Config
from gpuruntime.errors import UnresolvedDeviceError
from gpuruntime.plan import sources
from gpuruntime.request.parse import Request

if TYPE_CHECKING:
    from cdi.registry import Registry
    from gpuruntime.probes import State

SPEC_DIRS = "nvidia-container-runtime.modes.cdi.spec-dirs"
NAME = "vendor.com/class=one"
# Longer than what is written now may be written again without a trace.
SETTLED_NS = 1_100_000_000


def write(path: Path, value: str) -> None:
    """Write a spec whose device gives the variable A with *value*."""
    path.parent.mkdir(exist_ok=True)
    device = {"name": "one", "containerEdits": {"env": [f"A={value}"]}}
    spec = {"cdiVersion": "0.5.0", "kind": "vendor.com/class", "devices": [device]}
    path.write_text(json.dumps(spec))


def ask(*directories: Path | str) -> tuple[list[str], State | None]:
    """Return the environment that the device is given by the specs of *directories*."""
    config = Config({SPEC_DIRS: [str(item) for item in directories]}, None)

    def read() -> Registry:
        return registry.load(config.spec_dirs, may_trust=lambda _: True, decode_yaml=dict)

    grant, state = sources.of_specs(Request("cdi", "environment", (NAME,)), config, read)
    return grant.edits["env"], state


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what sets the clock to SETTLED_NS after a time: a ctime cannot be set."""

    def set_clock(time_ns: int) -> None:
        monkeypatch.setattr(sources.time, "time_ns", lambda: time_ns + SETTLED_NS)

    return set_clock


@pytest.mark.parametrize("program", ["bin/hook", "/proc/self/exe", "/usr/../proc/1/exe"])
def test_a_spec_whose_hook_the_image_could_choose_gives_nothing(
    tmp_path: Path, program: str
) -> None:
    """The error names the file and why; the hint, the command that says all of it."""
    path = tmp_path / "x.json"
    write(path, "1")
    spec = json.loads(path.read_text())
    assert ask(tmp_path)[0] == ["A=1"]
    hook = {"hookName": "createContainer", "path": program, "env": ["A=b"]}
    spec["containerEdits"] = {"hooks": [hook]}
    path.write_text(json.dumps(spec))
    with pytest.raises(UnresolvedDeviceError) as caught:
        ask(tmp_path)
    assert f'not used: "{path}" (hook-path: containerEdits.hooks[0].path: "{program}" ' in str(
        caught.value
    )
    assert caught.value.hint is not None
    assert f"gpuruntime cdi validate {path}" in caught.value.hint


@pytest.mark.parametrize("way", ["{0}", "{0}/", "{0}/../specs/.", "{1}/../specs"])
def test_a_directory_is_watched_by_whatever_path_it_has(
    way: str, tmp_path: Path, later: Callable[[int], None]
) -> None:
    """Where ".." is behind a link, the kernel has another directory than who reads the specs."""
    specs, link = tmp_path / "specs", tmp_path / "link"
    (tmp_path / "far/away").mkdir(parents=True)
    link.symlink_to("far/away")
    write(specs / "x.json", "1")
    later(specs.stat().st_ctime_ns)
    directory = way.format(specs, link)
    given, state = ask(directory)
    assert given == ["A=1"]
    assert state is not None
    assert probes.changed(state) == []
    write(specs / "x.json", "2")
    later((specs / "x.json").stat().st_ctime_ns - SETTLED_NS)
    assert probes.changed(state) == ["specs"]
    assert ask(directory) == (["A=2"], None)


def test_what_changed_just_now_is_not_kept(tmp_path: Path, later: Callable[[int], None]) -> None:
    """A second name in a directory within the clock's tick leaves no trace."""
    low, high = tmp_path / "low", tmp_path / "high"
    high.mkdir()
    write(low / "x.json", "1")
    written_ns = (low / "x.json").stat().st_ctime_ns
    while high.stat().st_ctime_ns < written_ns + SETTLED_NS // 5:
        time.sleep(0.05)
        (high / "half.tmp").touch()
        (high / "half.tmp").unlink()
    later(written_ns)
    assert ask(low, tmp_path / "missing")[1] is not None
    assert ask(low, high) == (["A=1"], None)
    later(high.stat().st_ctime_ns)
    assert ask(low, high)[1] is not None
    assert ask(low, tmp_path / "missing")[1] is not None
