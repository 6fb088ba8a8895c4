# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime explain --rootfs` and `--image` as commands: output, exit status, engines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import driver_roots
import forked_cli
import image_packages
import pytest
from image_trees import Image, elf_file

from gpuruntime.cli import explain_image
from gpuruntime.errors import GpuRuntimeError

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("gpuruntime")
MEMBERS = {
    *("image", "works", "abi", "libc", "driver", "capabilities", "needs", "findings", "notes"),
    "error",
}
# An engine at the lowest contract: it answers as the directory STATE says, and logs its calls.
ENGINE = """#!/bin/sh
echo "$@" >> {state}/calls
case "$1" in
image)
    [ -e {state}/inspect.json ] || {{ echo "no such image" >&2; exit 1; }}
    cat {state}/inspect.json;;
create)
    [ ! -e {state}/full ] || {{ echo "no space left" >&2; exit 125; }}
    echo pulled; echo c0ffee;;
export) [ ! -e {state}/hangs ] || exec sleep 60; cat {state}/image.tar;;
rm) ;;
*) exit 2;;
esac
"""


class Place:
    """A directory with a driver root, an image of each kind, and an engine that has the image."""

    def __init__(self, path: Path, image: Path) -> None:
        self.path = path
        driver_roots.build(path / "driver", "ubuntu")
        (path / "config.toml").write_text(f'[nvidia-container-cli]\nroot = "{path}/driver"\n')
        shutil.copytree(image, path / "image", symlinks=True)
        self.image = Image(path / "image")
        (path / "bin").mkdir()
        self.engine("docker", ["NVIDIA_VISIBLE_DEVICES=all", "EMPTY=", "odd"])

    def engine(self, name: str, env: list[str] | None) -> Path:
        """Add an engine, which has the image if *env* is its environment; return its state."""
        state = self.path / f"{name}-state"
        state.mkdir()
        program = self.path / "bin" / name
        program.write_text(ENGINE.format(state=state))
        program.chmod(0o755)
        if env is not None:
            (state / "inspect.json").write_text(json.dumps([{"Config": {"Env": env}}]))
        with tarfile.open(state / "image.tar", "w") as tar:
            tar.add(self.image.path, arcname=".")
        return state

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `gpuruntime explain`."""
        environment = {
            "PATH": f"{self.path}/bin:/usr/bin:/bin",
            "GPURUNTIME_CONFIG": f"{self.path}/config.toml",
        }
        return forked_cli.run("explain", *arguments, env=environment, timeout_s=timeout)

    def calls(self, name: str = "docker") -> list[str]:
        """Return the words of the engine's calls."""
        log = self.path / f"{name}-state/calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image with a program that needs the driver."""
    image = Image(tmp_path_factory.mktemp("image")).glibc("2.36")
    return image.program("/bin/app", "libc.so.6", "libcuda.so.1", "libnvcuvid.so.1").path


@pytest.fixture
def place(tmp_path: Path, image: Path) -> Place:
    """Return a place of the test's own."""
    return Place(tmp_path, image)


def test_an_image_whose_work_would_fail(place: Place) -> None:
    """One line each, an action in each that is wrong, and the status for CI."""
    done = place.run("--rootfs", str(place.image.path), "-e", "NVIDIA_VISIBLE_DEVICES=all")
    assert done.returncode == 1
    lines = dict(re.findall(r"^(\w+) +(.*)$", done.stdout, re.MULTILINE))
    assert f"{place.image.path}: for x86-64, glibc 2.36; " in lines["image"]
    assert lines["driver"] == driver_roots.VERSION
    assert lines["capabilities"] == "compute, utility"
    assert lines["needs"] == "libnvcuvid.so.1 (video): /bin/app needs it"
    assert lines["fails"] == (
        "libnvcuvid.so.1: /bin/app needs it, but the container does not request video; "
        'add "video" to NVIDIA_DRIVER_CAPABILITIES: compute,utility,video'
    )
    assert re.fullmatch(
        r'error: image: a container of ".*" would start, and its GPU work would fail: .*\n'
        r'hint: add "video" to NVIDIA_DRIVER_CAPABILITIES: compute,utility,video\n',
        done.stderr,
    )


def test_an_image_that_works(place: Place) -> None:
    """With the capability that it lacked; nothing on standard error."""
    root = str(place.image.path)
    done = place.run("--rootfs", root, "-e", "NVIDIA_DRIVER_CAPABILITIES=compute,video")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fails" not in done.stdout


@pytest.mark.parametrize("wanted", ["compute,utility", "all"])
def test_json(place: Place, wanted: str) -> None:
    """The same as the lines, for programs; the status too."""
    done = place.run(
        "--rootfs", str(place.image.path), "--json", "-e", f"NVIDIA_DRIVER_CAPABILITIES={wanted}"
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert set(report) == MEMBERS
    assert report["works"] == (wanted == "all")
    assert done.returncode == (0 if report["works"] else 1)
    assert report["libc"] == {"kind": "glibc", "version": "2.36"}
    assert report["driver"] == {"version": driver_roots.VERSION, "cuda": None}
    assert report["needs"][1] == {
        "library": "libnvcuvid.so.1",
        "abi": "x86-64",
        "capability": "video",
        "requested": wanted == "all",
        "users": [{"path": "/bin/app", "how": "needs"}],
    }
    assert all(set(item) == {"level", "what", "why", "action"} for item in report["findings"])


def test_names_of_the_image_forge_no_line(place: Place) -> None:
    """A path may have a line feed and escape sequences."""
    place.image.program("/bin/x\nfails  y\x1b[2J", "libnvoptix.so.1")
    done = place.run("--rootfs", str(place.image.path))
    assert "\x1b" not in done.stdout
    assert r"/bin/x\x0afails  y\x1b[2J needs it" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rootfs", "/", "--image", "x"),
        ("--rootfs", "/", "config.json"),
        ("--image", "x", "--bundle", "/"),
        ("--rootfs",),
    ],
)
def test_two_things_at_once_are_refused(place: Place, arguments: tuple[str, ...]) -> None:
    """What would be explained must be plain."""
    done = place.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert place.calls() == []


@pytest.mark.parametrize("name", ["", "-x", "--help", "a\nb"])
def test_what_is_no_reference_never_reaches_an_engine(place: Place, name: str) -> None:
    """It could be an option of the engine's."""
    done = place.run(f"--image={name}")
    assert done.returncode == 1
    assert re.fullmatch(r"error: request: .* is not an image reference\nhint: .*\n", done.stderr)
    assert place.calls() == []


def test_an_image_of_docker(place: Place) -> None:
    """Its environment counts, its files are streamed, and the container is removed."""
    done = place.run("--image", "app:1")
    assert done.returncode == 1
    assert "libnvcuvid.so.1: /bin/app needs it, but the container does not" in done.stdout
    assert "no GPU" not in done.stdout
    inspect, create, export, remove = place.calls()
    assert inspect == "image inspect -- app:1"
    assert create.startswith("create --pull never ")
    assert create.endswith(" -- app:1")
    assert (export, remove) == ("export c0ffee", "rm -f -v c0ffee")


def test_variables_go_before_those_of_the_image(place: Place) -> None:
    """As with docker run -e."""
    assert place.run("--image", "a", "-e", "NVIDIA_DRIVER_CAPABILITIES=all").returncode == 0


def test_podman_has_what_docker_has_not(place: Place) -> None:
    """The first engine that has the image is used."""
    (place.path / "docker-state/inspect.json").unlink()
    place.engine("podman", ["NVIDIA_DRIVER_CAPABILITIES=all"])
    assert place.run("--image", "app:1").returncode == 0
    assert len(place.calls()) == 1
    assert len(place.calls("podman")) == 4


def _nowhere(place: Place) -> None:
    (place.path / "docker-state/inspect.json").unlink()


def _no_json(place: Place) -> None:
    (place.path / "docker-state/inspect.json").write_text("[" * 100_000)


def _full(place: Place) -> None:
    (place.path / "docker-state/full").touch()


def _cut(place: Place) -> None:
    os.truncate(place.path / "docker-state/image.tar", 12345)


@pytest.mark.parametrize(
    ("fault", "message", "removed"),
    [
        (_nowhere, "no engine on this machine has the image", False),
        (_no_json, "its description of the image is malformed", False),
        (_full, "docker create: no space left", False),
        (_cut, "the engine's export of the image cannot be read", True),
    ],
)
def test_an_engine_that_fails_is_one_line(
    place: Place, fault: Any, message: str, *, removed: bool
) -> None:
    """And no container is left."""
    place.engine("podman", None)
    fault(place)
    done = place.run("--image", "app:1")
    assert done.returncode == 1
    assert re.fullmatch(rf"error: \w+: [^\n]*{message}[^\n]*\nhint: [ -~]+\n", done.stderr)
    assert ("rm -f -v c0ffee" in place.calls()) == removed


def test_an_engine_that_hangs_is_ended(place: Place) -> None:
    """With its container removed; of the deadline, which is long, only that it exists."""
    (place.path / "docker-state/hangs").touch()
    script = "from gpuruntime.cli import explain_image as e, main; e.DEADLINE_S = -29; main.main()"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, "explain", "--image", "app:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={"PATH": f"{place.path}/bin:/usr/bin:/bin"},
    )
    assert time.monotonic() - began < 45
    assert done.returncode == 1
    assert done.stderr.startswith("error: runtime: the image could not be read in 1 s\n")
    assert place.calls()[-1] == "rm -f -v c0ffee"


def parse_for(seconds: float) -> None:
    """Do what parsers do, which take every Exception for damage."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def test_the_deadline_is_not_taken_for_damage_of_a_file() -> None:
    """The signal comes at any time, most likely amid a parser."""

    def read() -> None:
        with explain_image._deadline(0.2):
            parse_for(30)

    with pytest.raises(GpuRuntimeError, match="could not be read in"):
        read()


# Of each distribution: what is said of the driver's libraries, of which libcuda needs glibc 2.34.
DISTRIBUTIONS = {
    "debian": "",
    "old-glibc": "libcuda.so.1: needs glibc 2.34 (GLIBC_2.34 of libc.so.6), the image has 2.31",
    "musl": "all libraries of the driver: they are for glibc, and the image has musl",
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_packages_of_distributions(place: Place, name: str) -> None:
    """As they are, unpacked: thousands of files, real links, real symbol versions."""
    tree = image_packages.ROOT / name
    if not tree.is_dir():
        pytest.skip(f'no packages of {name}: run "make image-packages"')
    libraries = place.path / "driver/usr/lib/x86_64-linux-gnu"
    for soname, version in (("libcuda.so.1", "2.34"), ("libnvidia-ml.so.1", "2.17")):
        file = libraries / f"{soname.removesuffix('.1')}.{driver_roots.VERSION}"
        needed = {"libc.so.6": [f"GLIBC_{version}"]}
        elf_file(file, soname=soname, needed=list(needed), requires=needed)
    done = place.run("--rootfs", str(tree))
    fails = re.findall("^fails +(.*)$", done.stdout, re.MULTILINE)
    assert [line.startswith(DISTRIBUTIONS[name]) for line in fails] == [True] * bool(
        DISTRIBUTIONS[name]
    )
    assert done.returncode == (1 if DISTRIBUTIONS[name] else 0)
