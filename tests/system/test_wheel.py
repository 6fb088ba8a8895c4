# SPDX-License-Identifier: Apache-2.0
"""The wheel in a virtual environment: what is in it, and its programs, run through Python."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepare
import pytest
from scenarios.machine import SCENARIOS, run_on_host

TREE = Path(__file__).parents[2]
RECORDER = TREE / "tests" / "fakes" / "runtime" / "recorder.c"
ROLES = ("gpu-cdi-hook", "gpu-container-runtime", "gpu-container-runtime-hook")
HOOK_ENVIRONMENT = [b"LC_ALL=C.UTF-8", b"PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
# What a module of this name does is done by whoever imports it, as `site` does by itself.
EVIL = "import os\nopen(os.path.join(os.path.dirname(__file__), 'was-run'), 'w').close()\n"


def build(place: Path, **options: Any) -> Path:
    """Build the wheel into *place* and return it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(command, cwd=TREE, check=True, capture_output=True, **options)
    (wheel,) = place.glob("*.whl")
    return wheel


def pip(python: Path, *words: object) -> None:
    """Have pip do something for *python*, and say what it said if it cannot."""
    own = [sys.executable, "-m", "pip", "--python", python]
    command = [*own, *words, "-qq", "--disable-pip-version-check"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of this tree."""
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the wheel, installed from local files alone."""
    place = tmp_path_factory.mktemp("place") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin" / "python"
    pip(python, "install", "--no-index", "--find-links", prepare.WHEELS, wheel)
    return place


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a low-level runtime that writes down how it was started."""
    path = tmp_path_factory.mktemp("recorder") / "runc"
    subprocess.run(["gcc", "-static", "-O1", "-o", path, RECORDER], check=True)
    return path


def parts(record: Path) -> dict[str, bytes]:
    """Return the parts of what the recorder wrote: see recorder.c."""
    data, found = record.read_bytes(), {}
    while data:
        head, _, rest = data.partition(b"\n")
        name, length = head[1:].decode().split()
        found[name] = rest[: int(length)]
        data = rest[int(length) + 1 :]
    return found


def test_top_level_names_are_exactly_four(venv: Path) -> None:
    """Generic names in a site-packages collide; no dependency may bring one of ours either."""
    (site,) = venv.glob("lib/python3.*/site-packages")
    (record,) = site.glob("gpuruntime-*.dist-info/RECORD")
    tops = {line.split("/")[0] for line in record.read_text().splitlines() if line[:3] != "../"}
    assert tops == {"cdi", "gpunode", "gpuruntime", "hooks", record.parent.name}
    programs = {path.name for path in (venv / "bin").iterdir() if os.access(path, os.X_OK)}
    assert {*ROLES, "gpuruntime"} <= programs


def test_another_time_is_another_wheel(wheel: Path, tmp_path: Path) -> None:
    """The control of test_release.py: what is built again is compared to the byte."""
    later = build(tmp_path, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    assert later.name == wheel.name
    assert later.read_bytes() != wheel.read_bytes()


def test_an_editable_installation_has_the_launcher() -> None:
    """`make setup` makes one: programs of a wheel in its place would be slower, unnoticed."""
    for name in ROLES:
        data = (Path(sys.executable).parent / name).read_bytes()
        assert data.startswith(b"\x7fELF")


@pytest.mark.system("runc", "gcc")
def test_a_container_starts_with_it(venv: Path) -> None:
    """By the machine's devices, and by a spec whose hook is that of the environment."""
    seen = run_on_host(SCENARIOS / "wheel.py", str(venv / "bin"))
    for asked in ("variable", "spec"):
        came = seen[asked]
        assert (came["status"], came["output"]) == (0, "ModifyDeviceFiles: 0\n"), asked
    assert seen["hooks"] == [str(venv / "bin" / "gpu-cdi-hook")]
    assert {"/dev/nvidia0", "/dev/nvidiactl"} <= set(seen["nodes"])
    assert "/dev/nvidia1" not in seen["nodes"]


def test_info_says_how_the_commands_run(venv: Path) -> None:
    """A report of a slow start is explained by one line of it."""
    command = ["info", "--no-driver"]
    environment = {"PATH": f"{venv}/bin:/usr/bin:/bin"}
    slow = subprocess.run([venv / "bin" / "gpuruntime", *command], env=environment,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert "\nlauncher: Python: every call is slower" in slow.stdout
    ours = Path(sys.executable).parent
    native = subprocess.run([ours / "gpuruntime", *command], env={"PATH": f"{ours}:/usr/bin:/bin"},
                            capture_output=True, text=True, check=True)  # fmt: skip
    assert "\nlauncher: native\n" in native.stdout


@pytest.fixture
def own_run(tmp_path: Path) -> Iterator[list[str]]:
    """Return words that give a command a /run of its own, and leave its environment in order."""
    script = "mount -t tmpfs run /run && echo && exec sleep infinity"
    holder = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script]
    with subprocess.Popen(holder, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield ["nsenter", f"--target={process.pid}", "--mount", f"--wd={tmp_path}", "--"]
        process.kill()


@pytest.mark.system("gcc")
@pytest.mark.parametrize("ignored", [True, False])
def test_the_runtime_hands_on_what_the_engine_gave(
    venv: Path, recorder: Path, own_run: list[str], tmp_path: Path, ignored: bool
) -> None:
    """Variables in their order, descriptors, directory, mask, and who ignores which signal."""
    config = tmp_path / "config.toml"
    config.write_text(f'[nvidia-container-runtime]\nruntimes = ["{recorder}"]\n')
    given = [b"B=1", b"A=\xff", b"ODD=a=b\nc", b"LISTEN_FDS=1", b"PYTHONDONTWRITEBYTECODE=1"]
    given += [f"GPURUNTIME_CONFIG={config}".encode(), f"RECORDER_OUT={tmp_path}/record".encode()]
    reading, writing = os.pipe()
    # A child takes the disposition that its parent has.
    kept = signal.signal(signal.SIGPIPE, signal.SIG_IGN if ignored else signal.SIG_DFL)
    umask = os.umask(0o027)
    try:
        done = subprocess.run(
            [*own_run, venv / "bin" / "gpu-container-runtime", "state", "one"], cwd=tmp_path,
            env=dict(entry.split(b"=", 1) for entry in given), pass_fds=[writing],
            capture_output=True, text=True, check=False, restore_signals=False,
        )  # fmt: skip
    finally:
        os.umask(umask)
        signal.signal(signal.SIGPIPE, kept)
        os.close(reading)
        os.close(writing)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    seen = parts(tmp_path / "record")
    assert seen["cmdline"].split(b"\0")[:-1] == [os.fsencode(recorder), b"state", b"one"]
    assert seen["environ"].split(b"\0")[:-1] == given
    numbers = {int(line.split()[0]) for line in seen["fds"].splitlines()}
    assert numbers == {0, 1, 2, writing}
    status = dict(line.split(b":\t", 1) for line in seen["status"].splitlines())
    assert int(status[b"Umask"], 8) == 0o027
    assert bool(int(status[b"SigIgn"], 16) >> (signal.SIGPIPE - 1) & 1) is ignored


def test_the_version_is_ours_and_then_the_runtimes(venv: Path) -> None:
    """As with the launcher: engines read the low-level runtime's out of the same text."""
    done = subprocess.run([venv / "bin" / "gpu-container-runtime", "--version"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout.startswith("gpu-container-runtime version 0.1.0\n\n")


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """Return a directory of modules that leave a file when they are imported."""
    for name in ("sitecustomize", "os", "signal", "gpuruntime"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    return tmp_path


@pytest.fixture
def waiting(venv: Path, evil: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Give a hook that waits for its state, started with whatever an image can have given it."""
    with (evil / "left-open").open("w") as stream, subprocess.Popen(
        [venv / "bin" / "gpu-cdi-hook", "update-container", "--mask-params"],
        env={"PYTHONPATH": str(evil), "PYTHONHOME": str(evil), "HOME": str(evil), "A": "1"},
        cwd=evil, pass_fds=[stream.fileno()], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        umask=0,
    ) as process:  # fmt: skip
        try:
            end = time.monotonic() + 30
            wanted = b"hooks.entry"
            command = Path(f"/proc/{process.pid}/cmdline")
            while wanted not in command.read_bytes() and time.monotonic() < end:
                time.sleep(0.01)
            # Its last preparation.
            time.sleep(0.5)
            yield process
        finally:
            process.kill()


def test_the_hook_trusts_nothing_of_its_caller(
    waiting: subprocess.Popen[bytes], evil: Path
) -> None:
    """Neither variables nor descriptors nor the directory, as with the launcher."""
    of = Path(f"/proc/{waiting.pid}")
    assert waiting.poll() is None
    assert b"hooks.entry" in (of / "cmdline").read_bytes()
    assert sorted((of / "environ").read_bytes().split(b"\0")[:-1]) == HOOK_ENVIRONMENT
    opened = [os.readlink(path) for path in (of / "fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(evil))]
    assert os.readlink(of / "cwd") == "/"
    assert "\nUmask:\t0022\n" in (of / "status").read_text()
    assert not (evil / "was-run").exists()


def test_modules_on_a_callers_path_do_harm(evil: Path) -> None:
    """The control: an interpreter that reads the variables runs them."""
    subprocess.run([sys.executable, "-c", "pass"], env={"PYTHONPATH": str(evil)},
                   capture_output=True, check=False)  # fmt: skip
    assert (evil / "was-run").exists()


def test_outside_of_a_virtual_environment_the_hook_fails(venv: Path, tmp_path: Path) -> None:
    """It starts no other interpreter than that beside it."""
    copy = shutil.copy(venv / "bin" / "gpu-cdi-hook", tmp_path)
    done = subprocess.run([copy, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (127, "")
    assert f"{tmp_path}/python" in done.stderr
