# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of notes, and what it knows of engines; hosts are in tests/system."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest

from gpuruntime.cli.checks import finding, readers, toolkits
from gpuruntime.cli.checks.check_table import CHECKS
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Finding, Note, combine, exit_status
from gpuruntime.configfile import check
from gpuruntime.errors import ConfigError

TREE = Path(__file__).parents[4]
REFERENCE = TREE / "docs" / "reference" / "doctor.md"
NOTES = {
    "ok": finding.ok("well"),
    "warn": finding.warn("odd", "look"),
    "fail": finding.fail("bad", "mend"),
}


@pytest.mark.parametrize("statuses", list(itertools.product(NOTES, repeat=3)))
def test_the_worst_note_counts(statuses: tuple[str, ...]) -> None:
    """One line a check: what is worst comes first, and its action is the one."""
    found = combine("check", [NOTES[status] for status in statuses])
    worst = max(statuses, key=["ok", "warn", "fail"].index)
    assert found.status == worst
    assert found.action == NOTES[worst].action
    assert found.what.startswith(NOTES[worst].what)
    assert ("well" in found.what) == (worst == "ok")
    assert exit_status([found]) == ["ok", "warn", "fail"].index(worst)


def test_many_notes_are_one_line() -> None:
    """A directory of broken specs is not to hide the other checks."""
    notes = [Note("fail", f"file {n}", "mend") for n in range(100)]
    assert combine("check", notes).what == "file 0; file 1; file 2; and 97 more"
    assert combine("check", []).status == "ok"
    assert exit_status([]) == 0


def test_what_was_checked_is_named_whatever_was_found() -> None:
    """An operator sees that an engine was not overlooked."""
    notes = [
        finding.ok("well"),
        finding.context("engines checked: docker"),
        finding.fail("bad", ""),
    ]
    assert combine("check", notes).what == "bad; engines checked: docker"
    assert combine("check", notes[:2]).what == "well; engines checked: docker"


def test_the_report_begins_with_what_is_worst() -> None:
    """Of one severity, in the order of the checks; the last line counts them."""
    findings = [
        Finding(f"{n}", status, "", "") for n, status in enumerate(["ok", "fail", "warn"] * 2)
    ]
    order = [item.check for item in finding.by_severity(findings)]
    assert order == ["1", "4", "2", "5", "0", "3"]
    assert finding.summary(findings) == "6 checks: 2 failed, 2 warnings, 2 ok"
    assert finding.summary(findings[2:3]) == "1 check: 0 failed, 1 warning, 0 ok"


def test_what_a_host_says_forges_no_line() -> None:
    """A file name is anybody's who may write there."""
    line = Finding("check", "fail", "a\nfail  other", "do\x1b[0m").line()
    assert "\n" not in line
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("package", "version", "newest"),
    [
        ("podman", "4.0.9", ()),
        ("podman", "4.1.0", (0, 4, 0)),
        ("podman", "4.3.1+ds1-8", (0, 5, 0)),
        ("podman", "5.10.0", (1, 0, 0)),
        ("docker-ce", "5:24.0.7-1~debian.12", ()),
        ("docker-ce", "5:26.0.2-1", (0, 6, 0)),
        ("docker.io", "26.1.5+dfsg1-9", (0, 7, 0)),
        ("containerd.io", "1.6.33-1", ()),
        ("containerd.io", "1.7.9-1", (0, 5, 0)),
        ("containerd", "1.7.24~ds1-6", (0, 7, 0)),
        ("cri-o", "1.31.0-1.1", (0, 8, 0)),
    ],
)
def test_what_engines_read(
    tmp_path: Path, package: str, version: str, newest: tuple[int, ...]
) -> None:
    """By the libraries that their releases were built with."""
    status = tmp_path / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        f"Package: {package}\nStatus: install ok installed\nVersion: {version}\n\n"
        "Package: podman\nStatus: deinstall ok config-files\nVersion: 9.9.9\n\n"
    )
    (found,) = readers.installed(ExaminedMachine(str(tmp_path)))
    assert found.newest == newest
    assert found.reads("0.3.0") == (newest != ())
    assert not found.reads("1.1.0")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("lib/apk/db/installed", "C:Q1\nP:podman\nV:4.6.2-r0\n\n"),
        ("var/lib/pacman/local/podman-4.6.2-1/desc", ""),
    ],
)
def test_other_package_managers(tmp_path: Path, path: str, text: str) -> None:
    """Alpine and Arch."""
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    (found,) = readers.installed(ExaminedMachine(str(tmp_path)))
    assert (found.name, found.newest) == ("podman", (0, 5, 0))


def test_a_tree_is_read_as_its_own_root(tmp_path: Path) -> None:
    """An absolute link in it is not one of this machine's."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("theirs")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "up").symlink_to("../../../../../../etc/hostname")
    machine = ExaminedMachine(str(tmp_path))
    assert machine.read("/link") == "theirs"
    assert machine.read("/up") is None
    assert machine.real("/link") == "/etc/passwd"
    assert machine.read("/etc") is None
    assert machine.output("/bin/echo", "--version") == ""
    with pytest.raises(ConfigError):
        ExaminedMachine(str(tmp_path / "etc/passwd"))


def test_the_reference_has_every_check() -> None:
    """An operator looks a check up by the name in its line."""
    section = REFERENCE.read_text().partition("## Checks\n")[2]
    told = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
    assert told == list(CHECKS)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[nvidia-container-runtime]\nmode = 'nvml'\n", "fail"),
        ("supported-driver-capabilities = 'x'\n", "fail"),
        ("hook-deadline = 9999\n", "warn"),
        ("[nvidia-container-cli]\nno-pivot = true\n", "ok"),
    ],
)
def test_the_config_file_is_judged_as_by_config_check(
    tmp_path: Path, text: str, status: str
) -> None:
    """In the same words."""
    path = "/etc/gpuruntime/config.toml"
    file = tmp_path / path.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    result = combine("config", list(toolkits.config(ExaminedMachine(str(tmp_path)))))
    assert result.status == status
    if status != "ok":
        (fault,) = check.examine(tomllib.loads(text))[1]
        assert result.what == f'"{path}": {fault.message}'
        assert result.action == fault.hint
