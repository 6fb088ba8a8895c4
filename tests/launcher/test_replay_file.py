# SPDX-License-Identifier: Apache-2.0
"""Damaged replay files, and bundles that cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
from fuzz import replay as harness
from launcher import replays
from launcher.conftest import OWN_RUN
from launcher.replays import RUNTIME, Scene

from gpuruntime import __version__
from gpuruntime.launcher import replay

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from launcher.conftest import Bench

DATA = replays.recorded("containerd")


@pytest.fixture(params=("plain", "twin"))
def scene(request: pytest.FixtureRequest, bench: Bench) -> Scene:
    """Return a scene in which the launcher has a record for DATA."""
    if request.param == "twin":
        request.getfixturevalue("twin")
    made = Scene.make(bench, request.param)
    made.remember(DATA)
    # The control for all that follows.
    assert made.replays(DATA)
    return made


def _missing(file: Path) -> None:
    file.unlink()


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _half(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def _more(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def _nul(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-9] + b"\0" + data[-8:])


def _version(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(__version__.encode(), b"9.9.9", 1))


def _format(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"gpuruntime-replay 4", b"gpuruntime-replay 3", 1))


def _config(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"missing\n", b"config /x\nstat 1 2 3 4\n", 1))


def _user(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"user %d\n" % os.geteuid(), b"user 4711\n", 1))


def _group_writes(file: Path) -> None:
    file.chmod(0o664)


def _others_write(file: Path) -> None:
    file.chmod(0o646)


def _directory_of_others(file: Path) -> None:
    file.parent.chmod(0o777)


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _socket(file: Path) -> None:
    file.unlink()
    before = os.open(".", os.O_RDONLY)
    try:
        # The name of a socket may not be long.
        os.chdir(file.parent)
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(file.name)
    finally:
        os.fchdir(before)
        os.close(before)


def _too_large(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data + b" " * (replay.MAX_BYTES + 1 - len(data)))


def _owner(file: Path) -> None:
    os.chown(file, 4711, 0)


SPOILED = (
    *(_missing, _empty, _half, _more, _nul, _version, _format, _config, _user, _group_writes),
    *(_others_write, _directory_of_others, _link, _pipe, _directory, _socket, _too_large, _owner),
)


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__.lstrip("_"))
def test_what_cannot_be_believed_is_no_answer(scene: Scene, spoil: Callable[[Path], None]) -> None:
    """The launcher ignores the file and starts Python, and nothing hangs."""
    if spoil is _owner and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    spoil(scene.file)
    assert not scene.replays(DATA)


@pytest.mark.system("setpriv")
def test_a_file_that_may_not_be_read_is_no_answer(scene: Scene) -> None:
    """The file of root is unreadable for a rootless engine: it contains secrets of containers."""
    without = ("--bounding-set", "-dac_override,-dac_read_search")
    command = [str(shutil.which("setpriv")), *without, scene.program]
    command += ["create", "--bundle", str(scene.bundle), "c1"]
    for mode, expected in ((0o600, "lowlevel/runc"), (0, "python")):
        scene.file.chmod(mode)
        (scene.bundle / "config.json").write_bytes(DATA)
        outcome = scene.bench.start(command, env=scene.bench.environment())
        assert outcome.who == expected
    assert scene.written == DATA


def behind_head(scene: Scene) -> tuple[bytes, list[bytes]]:
    """Return the head of the replay file, and the fields behind it."""
    content = scene.file.read_bytes()
    start = content.index(b"\n", content.index(b"\nuser ") + 1) + 1
    return content[:start], replays.fields(content[start:])


def test_the_largest_file_is_read(scene: Scene) -> None:
    """The control for a file that is too large; it has many questions to the host."""
    head, fields = behind_head(scene)
    question = replay.listed((b"exists", b"/", b"1"))
    spare = replay.MAX_BYTES - len(scene.file.read_bytes()) - len("000000:")
    fields[3] += question * (spare // len(question))
    scene.file.write_bytes(head + replay.listed(fields))
    assert scene.file.stat().st_size > replay.MAX_BYTES - 2 * len(question)
    assert scene.replays(DATA)


def contents(scene: Scene) -> list[bytes]:
    """Return the fields of the replay file, for the call of the harness, and without questions."""
    _, fields = behind_head(scene)
    return [
        harness.CALLER.program.encode(),
        harness.CALLER.path.encode(),
        fields[2],
        b"",
        fields[4],
    ]


def test_a_file_that_ends_early_is_not_used_wherever_it_ends(scene: Scene, readers: Path) -> None:
    """At every byte, under the sanitisers."""
    file = replay.listed(contents(scene))
    cut = [(b"r", DATA + b"\0" + file[:length]) for length in range(len(file))]
    lines = harness.run([*cut, (b"r", DATA + b"\0" + file)], readers)
    assert set(lines[:-1]) == {b"-"}
    # The control.
    assert lines[-1] == scene.by_python(DATA)


@pytest.mark.parametrize(
    "field", [b"", b":", b"1", b"1:", b"1:a", b"2:a\n", b"-1:a\n", b"99999999999999999999:a\n"]
)
def test_what_is_not_a_field_is_not_used(scene: Scene, readers: Path, field: bytes) -> None:
    """In each place where there are fields."""
    good = contents(scene)
    files = [
        replay.listed(good[:number]) + field + replay.listed(good[number + 1 :])
        for number in range(len(good))
    ]
    files += [
        replay.listed([*good[:number], good[number] + field, *good[number + 1 :]])
        for number in (2, 3, 4)
        if field
    ]
    files += [replay.listed([*good[:2], field, b"", field])]
    lines = harness.run([(b"r", DATA + b"\0" + file) for file in files], readers)
    assert lines == [b"-"] * len(files)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        *((0, b"nvidia-container-runtime"), (1, b"/elsewhere"), (3, b"6:exists\n1:/\n1:0\n")),
        # A hole that does not exist, no bytes in front of a hole, a kind that does not exist.
        *((4, b"1:{\n4:2047\n1:}\n"), (4, b"1:{\n1:x\n1:}\n"), (4, b"")),
        *((2, b"0:\n1:s\n"), (2, b"1:{\n2:ss\n1:}\n"), (2, b"1:{\n")),
    ],
)
def test_a_file_with_another_value_is_not_used(
    scene: Scene, readers: Path, number: int, value: bytes
) -> None:
    """Each value counts."""
    values = contents(scene)
    values[number] = value
    (line,) = harness.run([(b"r", DATA + b"\0" + replay.listed(values))], readers)
    assert line == b"-"


@pytest.mark.parametrize(("text", "is_used"), [(b"another", True), (b"NVIDIA_X", False)])
def test_a_hole_has_no_word(scene: Scene, readers: Path, text: bytes, is_used: bool) -> None:
    """Also where the file is found, whose name depends on the words."""
    argument = json.dumps(json.loads(DATA)["process"]["args"][0]).encode()
    assert DATA.count(argument) == 1
    data = DATA.replace(argument, b'"%s"' % text)
    (line,) = harness.run([(b"r", data + b"\0" + replay.listed(contents(scene)))], readers)
    assert (line != b"-") is is_used


# What is done to the bundle, which is a file system of 32 KiB; then the launcher is started.
UNWRITABLE = {
    "read-only": "mount -o remount,ro .",
    "full": "cat /dev/zero > fill 2>/dev/null; :",
    # Room for a beginning of it.
    "nearly full": "cat /dev/zero > fill 2>/dev/null; truncate -s -8192 fill",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_is_left_to_python(scene: Scene, name: str) -> None:
    """With config.json as it was, and nothing beside it."""
    document = json.loads(DATA)
    document["process"]["args"] = ["x" * 9000]
    data = json.dumps(document).encode()
    scene.file.unlink()
    scene.remember(data)
    assert scene.replays(data)
    place = scene.bench.path("other/bundle")
    (place / "config.json").unlink()
    kept = scene.bench.path("other/kept.json")
    kept.write_bytes(data)
    seen = scene.bench.path("other/seen")
    script = (
        f"mount -t tmpfs -o size=32k bundle {place} && cd {place} && cp {kept} config.json && "
        f'{UNWRITABLE[name]}; "$@"; status=$?; cp config.json {seen}; rm -f fill 2>/dev/null; '
        f"ls -A > {seen}.names; exit $status"
    )
    own = ("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script)
    bench = scene.bench
    for old in bench.workshop.root.rglob("*.record"):
        old.unlink()
    subprocess.run(
        [*own, "sh", scene.program, "create", "c1"],
        env={"PATH": bench.environment()["PATH"] + ":/usr/bin:/bin"},
        capture_output=True,
        check=False,
        timeout=30,
    )
    records = {path.name for path in bench.workshop.root.rglob("*.record")}
    assert records == {"python.record"}
    assert seen.read_bytes() == data
    assert set((seen.parent / "seen.names").read_text().split()) <= {"config.json", "fill"}


@pytest.mark.system("strace")
def test_a_write_that_fails_at_its_end_is_left_to_python(bench: Bench) -> None:
    """A file system of another machine may say only at close(2) that it has no room."""
    scene = Scene.make(bench, "plain")
    scene.remember(DATA)
    trace = (str(shutil.which("strace")), "-o", "/dev/null", "-e", "inject=close:error=EIO")
    command = [scene.program, "create", "--bundle", str(scene.bundle), "c1"]
    for prefix, who in (((), "lowlevel/runc"), (trace, "python")):
        scene.create(DATA)
        (scene.bundle / "config.json").write_bytes(DATA)
        for old in bench.workshop.root.rglob("*.record"):
            old.unlink()
        environment = {"PATH": bench.environment()["PATH"]}
        subprocess.run(
            [*prefix, *command], env=environment, capture_output=True, check=False, timeout=30
        )
        records = {path.name for path in bench.workshop.root.rglob("*.record")}
        assert records == {f"{who.rpartition('/')[2]}.record"}
    assert scene.written == DATA


def test_the_shim_writes_what_the_launcher_reads(bench: Bench, real: Path, tmp_path: Path) -> None:
    """For real, with /run of its own: Python once, and never again."""
    # It makes the spec.
    Scene.make(bench, "plain")
    config = tmp_path / "config.toml"
    specs = bench.path("specs")
    config.write_text(
        f'[{RUNTIME}]\nmode = "cdi"\n[{RUNTIME}.modes.cdi]\nspec-dirs = ["{specs}"]\n'
    )
    place = tmp_path / "bundle"
    place.mkdir()
    (place / "first.json").write_bytes(DATA)
    (place / "config.json").write_bytes(DATA)
    program = real / "gpu-container-runtime"
    script = (
        f'cd {place} && "$@" && /bin/cp config.json by-python && '
        '/bin/cp first.json config.json && export GPURUNTIME_FAST=only && exec "$@"'
    )
    done = subprocess.run(
        [*OWN_RUN, "/bin/sh", "-c", script, "sh", str(program), "create", "c1"],
        env=bench.environment(GPURUNTIME_CONFIG=str(config)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (place / "by-python").read_bytes() != DATA
    assert (place / "config.json").read_bytes() == (place / "by-python").read_bytes()


def test_a_limit_of_file_sizes_is_python_s(scene: Scene) -> None:
    """Where the limit is, a signal ends who does not ignore it."""
    scene.bundle.joinpath("config.json").write_bytes(DATA)
    command = [scene.program, "create", "--bundle", str(scene.bundle), "c1"]
    for old in scene.bench.workshop.root.rglob("*.record"):
        old.unlink()
    limited = ["/bin/sh", "-c", 'ulimit -S -f 100; exec "$@"', "sh", *command]
    subprocess.run(limited, env=scene.bench.environment(), check=True, timeout=30)
    records = {path.name for path in scene.bench.workshop.root.rglob("*.record")}
    assert records == {"python.record"}
    assert scene.written == DATA
