# SPDX-License-Identifier: Apache-2.0
"""Which low-level runtime is taken, and what is said when there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuruntime.errors import RuntimeExecError
from gpuruntime.oci.lowlevel import execute, find


def program(place: Path, name: str, mode: int = 0o755) -> Path:
    """Make a program."""
    path = place / name
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def search(candidates: list[str], path: str | None, identity: str = "") -> tuple[str, list[str]]:
    """Return what is found and the warnings."""
    warnings: list[str] = []
    return find(candidates, path, identity, warnings.append), warnings


def test_the_first_candidate_that_is_there_is_taken(tmp_path: Path) -> None:
    """In the order of the config, then of PATH."""
    second = tmp_path / "second"
    second.mkdir()
    crun = program(tmp_path, "the-crun")
    runc = program(second, "the-runc")
    program(tmp_path, "the-runc", 0o644)
    path = f"{tmp_path}:{second}"
    assert search(["the-runc", "the-crun"], path) == (str(runc), [])
    assert search(["no-runc", "the-crun"], path) == (str(crun), [])
    assert search([str(crun)], None) == (str(crun), [])


def test_a_relative_path_entry_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory is the bundle: an image's."""
    program(tmp_path, "the-runc")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeExecError):
        search(["the-runc"], ".::bin")


def test_the_launcher_itself_is_skipped_with_a_warning(tmp_path: Path) -> None:
    """It would call us again for ever."""
    ours = program(tmp_path, "the-runc")
    other = tmp_path / "other"
    other.mkdir()
    (other / "the-runc").symlink_to(ours)
    real = program(other, "the-crun")
    status = ours.stat()
    identity = f"{status.st_dev}:{status.st_ino}"
    found, warnings = search(["the-runc", "the-crun"], f"{tmp_path}:{other}", identity)
    assert found == str(real)
    assert len(warnings) == 2
    assert str(ours) in warnings[0]


def test_none_names_all_that_were_looked_for() -> None:
    """Exit code 127, as a shell."""
    with pytest.raises(RuntimeExecError) as error:
        search(["no-runc", "/no/crun"], "/nowhere")
    assert error.value.exit_code == 127
    assert '"no-runc", "/no/crun"' in error.value.message


@pytest.mark.parametrize(("content", "code"), [(None, 127), ("no program", 126)])
def test_one_that_cannot_be_executed_is_named(
    tmp_path: Path, content: str | None, code: int
) -> None:
    """A runtime of another machine, or removed between search and exec."""
    path = tmp_path / "runc"
    if content is not None:
        path.write_text(content)
        path.chmod(0o755)
    with pytest.raises(RuntimeExecError, match=str(path)) as error:
        execute(str(path), [])
    assert error.value.exit_code == code


def test_repeated_and_odd_environment_entries_are_handed_on(tmp_path: Path) -> None:
    """os.environ would lose them; the engine's block arrives byte for byte."""
    code = (
        "import sys; sys.path.append(sys.argv[1]); from gpuruntime.oci.lowlevel import execute; "
        "execute('/bin/cat', ['/proc/self/environ'])"
    )
    tree = str(Path(__file__).parents[4])
    # execve with a block that no shell would make.
    caller = tmp_path / "caller.c"
    caller.write_text(
        "#include <unistd.h>\n"
        "int main(int c, char **v) { (void)c; char *e[] = "
        '{"A=1", "LC_ALL=C.UTF-8", "A=2", "odd", "=x", 0}; return execve(v[1], v + 1, e); }\n'
    )
    subprocess.run(["gcc", "-o", tmp_path / "caller", caller], check=True)
    done = subprocess.run(
        [tmp_path / "caller", "/usr/bin/python3", *("-I", "-S", "-B", "-c"), code, tree],
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"A=1\0LC_ALL=C.UTF-8\0A=2\0odd\0=x\0"
