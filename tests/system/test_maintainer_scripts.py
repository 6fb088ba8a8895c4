# SPDX-License-Identifier: Apache-2.0
"""The Debian package's scripts at a removal and a purge, and `make uninstall`: what they do.

They run on the copy of /etc, /var and /run that the tests have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "packaging" / "debian"
PROGRAMS = Path(sys.prefix, "bin")
RUNTIME = "/usr/bin/gpu-container-runtime"
HOOK_SPEC = '{"cdiVersion": "0.5.0", "hooks": [{"path": "/usr/bin/gpu-cdi-hook"}]}'
MADE = ("/etc/docker", "/etc/cdi", "/run/cdi", "/var/lib/gpuruntime", "/run/gpuruntime")
pytestmark = pytest.mark.system("sh", "timeout")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Remove what these tests make, which must not be the machine's."""
    assert "GPURUNTIME_TEST_ISOLATED" in os.environ
    yield
    for directory in MADE:
        shutil.rmtree(directory, ignore_errors=True)


def run(script: str, *words: str, path: str = str(PROGRAMS)) -> str:
    """Run a maintainer *script* as dpkg does; return what it says. Its failure fails the test."""
    done = subprocess.run(
        ["sh", str(SCRIPTS / script), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"PATH": f"{path}:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def configure(name: str, program: str) -> None:
    """Register *program* with docker."""
    words = ("runtime", "configure", "--runtime", "docker", "--runtime-name", name)
    subprocess.run(
        [PROGRAMS / "gpuruntime", *words, "--runtime-path", program],
        check=True,
        capture_output=True,
        env={**os.environ, "HOME": "/root"},
    )


def test_a_removal_lists_the_files_that_name_the_runtime() -> None:
    """With the command that undoes it; the removal goes on, and the record stays."""
    configure("gpuruntime", RUNTIME)
    before = Path("/etc/docker/daemon.json").read_bytes()
    said = run("gpuruntime.prerm", "remove")
    line = '"/etc/docker/daemon.json" has the runtime "gpuruntime"; undo: '
    assert f"{line}gpuruntime runtime configure --undo --runtime docker\n" in said
    assert "hint: install gpuruntime again" in said
    assert Path("/etc/docker/daemon.json").read_bytes() == before
    run("gpuruntime.postrm", "remove")
    assert os.listdir("/var/lib/gpuruntime/engines")


@pytest.mark.parametrize("words", [("remove",), ("upgrade", "2")])
def test_without_a_reference_there_is_no_message(words: tuple[str, ...]) -> None:
    """An upgrade does not remove the program."""
    if words[0] == "upgrade":
        configure("gpuruntime", RUNTIME)
    assert run("gpuruntime.prerm", *words) == ""


def test_a_removal_does_not_need_the_command_line(tmp_path: Path) -> None:
    """A broken Python must not make a package that cannot be removed."""
    program = tmp_path / "gpuruntime"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    configure("gpuruntime", RUNTIME)
    assert run("gpuruntime.prerm", "remove", path=str(tmp_path)) == ""


def test_a_purge_removes_what_we_made_and_nothing_else() -> None:
    """Specs of other tools, and what the other package keeps, stay."""
    configure("gpuruntime", RUNTIME)
    specs = [Path(place) for place in ("/etc/cdi/a.json", "/etc/cdi/b.yaml", "/run/cdi/a.yaml")]
    theirs = [Path("/etc/cdi/theirs.json"), Path("/run/cdi/theirs.json")]
    other = Path("/var/lib/gpuruntime/config.compat.toml")
    for path in (*specs, *theirs, other, Path("/run/gpuruntime/x")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HOOK_SPEC if path in specs else "{}")
    assert "/etc/cdi/a.json\n/etc/cdi/b.yaml\n" in run("gpuruntime.prerm", "remove")
    run("gpuruntime.postrm", "remove")
    run("gpuruntime.postrm", "purge")
    left = [path for path in (*specs, *theirs, other) if path.exists()]
    assert left == [*theirs, other]
    assert os.listdir("/var/lib/gpuruntime") == [other.name]
    assert not Path("/run/gpuruntime").exists()
    other.unlink()
    run("gpuruntime.postrm", "purge")
    assert not other.parent.exists()


def test_the_incumbents_names_are_listed_unless_the_incumbent_comes_back() -> None:
    """Then its programs have these names."""
    configure("nvidia", "nvidia-container-runtime")
    script = "gpuruntime-nvidia-compat.prerm"
    assert '"/etc/docker/daemon.json" has the runtime "nvidia"' in run(script, "remove")
    assert run(script, "remove", "in-favour", "nvidia-container-toolkit", "1") == ""
    assert run(script, "upgrade", "2") == ""


@pytest.mark.parametrize("is_staged", [False, True])
def test_an_uninstallation_lists_them_too(tmp_path: Path, *, is_staged: bool) -> None:
    """Not below a DESTDIR: the engines of this host do not use what is there."""
    prefix = f"{tmp_path}/prefix"
    configure("gpuruntime", f"{prefix}/bin/gpu-container-runtime")
    destination = f"{tmp_path}/stage" if is_staged else ""
    library = Path(f"{destination}{prefix}/lib/gpuruntime")
    library.mkdir(parents=True)
    (library / "manifest").write_text(f"f {prefix}/bin/gpuruntime\n")
    program = Path(f"{destination}{prefix}/bin/gpuruntime")
    program.parent.mkdir()
    program.symlink_to(PROGRAMS / "gpuruntime")
    done = subprocess.run(
        [SCRIPTS.parents[1] / "scripts" / "uninstall"],
        env={"PATH": "/usr/bin:/bin", "DESTDIR": destination, "PREFIX": prefix},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("undo: gpuruntime runtime configure" in done.stderr) != is_staged
    assert done.stderr.endswith(f'uninstalled from "{destination}{prefix}"\n')
    assert not program.is_symlink()
