# SPDX-License-Identifier: Apache-2.0
"""`make demo` finds a GPU by asking the driver, and leaves the machine as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import driver, leftovers
from scenarios import transcripts

TREE = Path(__file__).parents[2]
DEMO = TREE / "tests" / "demo" / "demo.py"
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
NOTHING_LEFT = "afterwards: no mount, cgroup, process or file of the demo is left\n"
pytestmark = pytest.mark.system("runc", "gcc", "busybox")


def demo(*prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo, as the last words of the command line *prefix*; return what came of it."""
    return subprocess.run(
        [*prefix, sys.executable, str(DEMO)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have the demo make its work directory in a directory, and assert that it removes it."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    assert list(directory.iterdir()) == []


def program(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no GPU here"),
        ("echo 'No devices were found'; exit 6", '"nvidia-smi -L" failed: No devices were found'),
        ("exit 9", '"nvidia-smi -L" failed: status 9'),
        ("true", "the driver reports no GPU"),
        ("exec sleep 100", 'the driver does not answer "nvidia-smi -L" in 1 s'),
    ],
)
def test_a_driver_that_does_not_answer_is_no_gpu(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever nodes a driver has left in /dev."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    if script is not None:
        program(tmp_path / "bin" / "nvidia-smi", script)
    with pytest.raises(driver.NoGpuError) as failure:
        driver.list_gpus(1)
    assert str(failure.value) == reason


def test_a_node_without_a_driver_is_no_gpu(work: Path) -> None:
    """A driver that was removed leaves /dev/nvidiactl until the next boot."""
    del work
    script = """
    mkdir -p "$TMPDIR/dev"; mount -t tmpfs dev "$TMPDIR/dev"
    cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/fd "$TMPDIR/dev"
    mkdir "$TMPDIR/dev/pts" "$TMPDIR/dev/shm"; mknod "$TMPDIR/dev/nvidiactl" c 195 255
    mount --move "$TMPDIR/dev" /dev; rmdir "$TMPDIR/dev"
    exec "$@"
    """
    done = demo("unshare", "--mount", "sh", "-euc", script, "sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo: no GPU here, so on the simulated host")
    assert done.stdout.endswith(f"{NOTHING_LEFT}demo: ok\n")
    (shown,) = [
        output
        for transcript in transcripts.of_page(TREE / "README.md")
        for command, output in transcript.steps
        if command == "make demo" and output
    ]
    assert transcripts.normalised(done.stdout) == transcripts.normalised(shown)


def test_a_real_gpu_is_compared_with_nvidia_smi(work: Path, tmp_path: Path) -> None:
    """What stands for the real host is a simulated one, with an nvidia-smi that needs no NVML.

    It needs the parts of glibc that the files of a real driver need.
    """
    del work
    program = tmp_path / "smi.c"
    program.write_text('#include <stdio.h>\nint main(void) { puts("GPU 0: one of this host"); }\n')
    script = rf"""
    gcc -o /usr/bin/nvidia-smi {program} -Wl,--no-as-needed -lm \
      -l:libdl.so.2 -l:libpthread.so.0 -l:librt.so.1
    "$@" || exit
    ls -A /run/gpuruntime
    """
    done = demo(
        *(sys.executable, str(SIMHOST), "run", "--gpus", "2", "--", "sh", "-uc", script, "sh")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo: a real GPU is here\n")
    assert "  smi: GPU 0: one of this host\n" in done.stdout
    assert "  cuInit succeeds\n" in done.stdout
    assert "nvidia-smi -L inside equals outside\n" in done.stdout
    # The last line would be followed by what is left in /run/gpuruntime.
    assert done.stdout.endswith(f"{NOTHING_LEFT}demo: ok\n")


def groups() -> set[str]:
    """Return the cgroups that simulated hosts have."""
    return {
        f"{directory}/{name}"
        for directory, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(("simhost-", "gpuruntime-demo-"))
    }


@pytest.mark.parametrize("moment", ["demo: no GPU here", "inside the container:"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_ended_leaves_nothing(
    number: signal.Signals, moment: str, work: Path
) -> None:
    """Ctrl-C reaches the whole process group, SIGTERM one process."""
    groups_before = groups()
    with subprocess.Popen(
        [sys.executable, "-u", str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while moment not in process.stdout.readline():
            assert process.poll() is None
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        # Nothing that the demo started holds the pipe longer than itself.
        output, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == -number
    assert output.endswith(NOTHING_LEFT)
    assert errors == f"demo: ended by {number.name}\n"
    assert list(work.iterdir()) == []
    assert groups() == groups_before
    # Others have theirs meanwhile: only these two places are the demo's.
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        assert not line.split()[4].startswith((str(work), str(TREE / "build/simhost/mnt")))


def test_a_demo_that_fails_leaves_nothing(work: Path, tmp_path: Path) -> None:
    """Here runc fails."""
    del work
    runc = program(tmp_path / "bin" / "runc", "echo no container today >&2; exit 1")
    groups_before = groups()
    done = demo(PATH=f"{runc.parent}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stdout.endswith(NOTHING_LEFT)
    assert "no container today" in done.stderr
    assert done.stderr.endswith("demo: failed, status 1\n")
    assert groups() == groups_before


def test_only_what_the_demo_made_counts_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs make cgroups and mounts meanwhile, as engines do for every container."""
    monkeypatch.setattr(leftovers, "SETTLE_S", 0.5)
    own = tmp_path / "own"
    other = tmp_path / "other"
    (top,) = {line.split()[4] for line in _cgroup_mounts()[:1]}
    cgroups = [Path(top, name) for name in (f"own-{os.getpid()}", f"other-{os.getpid()}")]
    traces = leftovers.Traces((str(own),), (cgroups[0].name,), leftovers.driver_nodes())
    child = subprocess.Popen(["sleep", "100"])
    try:
        for directory in (own, other):
            directory.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
        for cgroup in cgroups:
            cgroup.mkdir()
        assert traces.remaining() == [
            f"mount: {own}",
            f"cgroup: {cgroups[0]}",
            f"process: {child.pid}",
        ]
    finally:
        for directory in (own, other):
            subprocess.run(["umount", directory], check=False)
        for cgroup in cgroups:
            cgroup.rmdir()
        child.kill()
        child.wait()
    start = time.monotonic()
    assert traces.remaining() == []
    assert time.monotonic() - start < leftovers.SETTLE_S


def _cgroup_mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if " - cgroup" in line and "cpuset" not in line]
