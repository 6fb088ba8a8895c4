# SPDX-License-Identifier: Apache-2.0
"""What the hook says to people: help, version, and a start that fails."""

from __future__ import annotations

import json
import posix
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuruntime import __version__
from gpuruntime.system import hook_usage
from gpuruntime.system.paths import Root, read_of_image
from hooks import classic, entry, report, update_container

TREE = Path(__file__).parents[3]
HOOK = TREE / ".venv" / "bin" / "gpu-cdi-hook"
START_PYTHON = "/usr/bin/python3"
MIB = 1 << 20


def call(*words: str, name: str = "gpu-cdi-hook") -> tuple[int, str, str]:
    """Return status, output and error of the hook."""
    done = subprocess.run(
        [name, *words], executable=HOOK, input="", capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["gpu-cdi-hook", "nvidia-cdi-hook"])
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["-help"], ["help"], ["x", "--help"]])
def test_help(words: list[str], name: str) -> None:
    """It is for people, on standard output, and lists every hook that there is."""
    status, output, error = call(*words, name=name)
    assert (status, error) == (0, "")
    assert output.startswith(f"usage: {name} ")
    for hook in (update_container.NAME, *entry.CLASSIC):
        assert f"\n  {hook} " in output


@pytest.mark.parametrize("hook", [update_container.NAME, *entry.CLASSIC])
def test_help_of_a_hook_has_its_options(hook: str) -> None:
    """Those that its parser takes, and no others."""
    status, output, error = call(hook, "--help")
    assert (status, error) == (0, "")
    assert output.startswith(f"usage: gpu-cdi-hook {hook} ")
    assert call("help", hook) == (0, output, "")
    own = output.partition("\nOptions of every hook:\n")[0]
    shown = set(re.findall(r"(?m)^  --([a-z-]+)", own))
    if hook == update_container.NAME:
        assert shown == update_container.VALUES | update_container.SWITCHES
    else:
        assert shown == set(classic.OPTIONS[hook])
    common = output.removeprefix(own)
    for option in ("container-spec", "deadline", "debug", "quiet", "help"):
        assert f"\n  --{option} " in common
    for option, value, _ in hook_usage.HOOKS[hook][1]:
        assert f"  {option} {value}".rstrip() in own


def test_help_of_the_prestart_hook() -> None:
    """On standard output, as Go's flags have it."""
    status, output, error = call("-help", name="nvidia-container-runtime-hook")
    assert (status, error) == (0, "")
    assert output.startswith("usage: nvidia-container-runtime-hook [-debug] [-config FILE] pre")
    assert "\n  -version " in output


@pytest.mark.parametrize("words", [["--version"], ["-version"], ["-v"]])
def test_version(words: list[str]) -> None:
    """As the prestart hook prints it; under a name of the incumbent's, its words come first."""
    ours = f"version {__version__}\n"
    assert call(*words) == (0, f"gpu-cdi-hook {ours}", "")
    theirs = f"NVIDIA CDI Hook {ours}nvidia-cdi-hook {ours}"
    assert call(*words, name="nvidia-cdi-hook") == (0, theirs, "")


@pytest.mark.parametrize("words", [[], ["--debug"], ["--deadline=5"], [""]])
def test_no_hook_at_all(words: list[str]) -> None:
    """A container that has such a hook starts, and who typed it learns what to do."""
    status, output, error = call(*words)
    assert (status, output) == (0, "")
    assert error == (
        "gpu-cdi-hook: warning: no hook is named, nothing is done; "
        '"gpu-cdi-hook --help" lists them\n'
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--debug", "--deadline", "5", "noop"],
        ["--deadline=5", "--debug", "noop"],
        ["--config", "/x.toml", "noop"],
        ["noop", "--deadline", "5"],
    ],
)
def test_options_in_any_order(words: list[str]) -> None:
    """The value of one is not the hook's name."""
    assert call(*words) == (0, "", "")


@pytest.mark.parametrize(
    "words", [["--flying", "update-container"], ["--flying", "5", "update-container"]]
)
def test_an_option_that_nobody_knows(words: list[str]) -> None:
    """Behind it may be its value, or the name of the hook: nothing done is no success."""
    status, output, error = call(*words)
    assert (status, output) == (2, "")
    assert '"--flying" is an unknown option' in error


def test_meta_02_too_few_descriptors_are_said(tmp_path: Path) -> None:
    """It is no bug, and the hint is what helps."""
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "config.json").write_text('{"root": {"path": "rootfs"}}')
    said = set()
    for descriptors in range(4, 12):
        done = subprocess.run(
            ["setpriv", "--bounding-set=-sys_resource", "sh", "-c",
             'ulimit -n "$1"; exec "$0" update-container --link a.so.1::/opt/x/a.so',
             str(HOOK), str(descriptors)],
            input=json.dumps({"bundle": str(tmp_path)}), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1)
        assert "bug" not in done.stderr
        said |= {done.returncode, *done.stderr.splitlines()[1:]}
    assert {
        0,
        1,
        f"hint: allow the runtime {report.MIN_DESCRIPTORS} open files or more",
    } <= said


def test_help_as_a_value_is_a_value(tmp_path: Path) -> None:
    """Whatever an argument begins with, in its place it is data."""
    status, output, error = call("update-container", "--link", "--help")
    assert (status, output) == (2, "")
    assert '"--help" is not TARGET::LINK' in error


def limited(kib: int) -> subprocess.CompletedProcess[str]:
    """Start the hook with so much address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (kib << 10, kib << 10))

    return subprocess.run(
        [HOOK, "update-container", "--mask-params"],
        input="{}", capture_output=True, text=True, check=False, preexec_fn=limit, timeout=90,
    )  # fmt: skip


@pytest.mark.slow
def test_cg_01_little_address_space_is_said_in_two_lines() -> None:
    """From the moment on that our code is reached; before that, it is Python that speaks."""
    said = set()
    for kib in range(12_900, 18_000, 150):
        done = limited(kib)
        if "hook" not in done.stderr.partition(":")[0]:
            # The interpreter did not come so far.
            continue
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 2
        assert "Traceback" not in done.stderr
        assert "\nhint: " in done.stderr
        said.add(done.stderr.split(": ")[2])
    assert {"cannot load the hook", "the memory is not enough for the hook\nhint"} & said
    assert any("standard input names no bundle" in text for text in said)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("gpuruntime/record.py", "No module named 'gpuruntime.record'"),
        ("hooks/state.py", "cannot import name 'state' from 'hooks'"),
        ("hooks/classic.py", "cannot import name 'classic' from 'hooks'"),
        ("hooks/entry.py", "No module named 'hooks.entry'"),
    ],
)
def test_half_an_installation_is_said_in_two_lines(
    tmp_path: Path, missing: str, text: str
) -> None:
    """A container does not start then, and the engine's log says why."""
    for package in ("cdi", "gpuruntime", "hooks"):
        shutil.copytree(
            TREE / package, tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.c", "discover", "cli"),
        )  # fmt: skip
    (tmp_path / missing).unlink()
    code = f"import sys;sys.path.append({str(tmp_path)!r});from hooks.entry import main;main()"
    done = subprocess.run(
        [START_PYTHON, "-I", "-S", "-B", "-c", code, "/usr/bin/gpu-cdi-hook", "chmod", "--mode=7"],
        input="", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (first, second) = done.stderr.splitlines()
    assert first.startswith("gpu-cdi-hook: runtime: cannot load the hook: ")
    assert text in first
    assert second.startswith("hint: ")
    assert "install gpuruntime again" in second


# ---- errors name what they are about ----


@pytest.mark.parametrize("has_openat2", [True, False])
def test_what_is_no_directory_is_named(tmp_path: Path, *, has_openat2: bool) -> None:
    """Also by the walk, on kernels without openat2."""
    (tmp_path / "file").touch()
    root = Root(str(tmp_path))
    root._has_openat2 = has_openat2
    with pytest.raises(OSError, match="Not a directory") as caught:
        root.open_path("/file/.")
    assert "file/." in str(caught.value)
    root.close()


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by the number of our descriptor."""
    (tmp_path / "file").write_text("x")
    root = Root(str(tmp_path))
    open_ = posix.open

    def refuse(path: str, *arguments: object, **keywords: object) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise PermissionError(13, "Permission denied", path)
        return open_(path, *arguments, **keywords)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(posix, "open", refuse)
    with pytest.raises(OSError, match="Permission denied") as caught:
        read_of_image(root.open_path("/file"), "/file", 10)
    assert str(caught.value) == 'read("/file"): Permission denied'


@pytest.mark.slow
def test_time_01_the_step_that_takes_too_long_is_named(tmp_path: Path) -> None:
    """Which of forty links it was decides where to look."""
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "config.json").write_text('{"root": {"path": "rootfs"}}')
    code = f"""
import sys
sys.path.append({str(TREE)!r})
import time
from gpuruntime.system import ops
from hooks import entry
ops.MaskParams.execute = lambda *_: time.sleep(30)
ops.MaskParams.ldconfig = "x"
entry.main()
"""
    words = ["gpu-cdi-hook", "--deadline=1", "update-container", "--mask-params"]
    done = subprocess.run(
        [START_PYTHON, "-I", "-S", "-B", "-c", code, *words],
        input=json.dumps({"bundle": str(tmp_path)}),
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 1
    assert "was not done in 1 s: it could not mount over /proc/driver/nvidia/params" in done.stderr
