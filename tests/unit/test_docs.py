# SPDX-License-Identifier: Apache-2.0
"""The documents say what is true: tables name files that exist, the example is the defaults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gpuruntime.cli.main import COMMANDS
from gpuruntime.configfile import option_table

TREE = Path(__file__).parents[2]
ARCHITECTURE = TREE / "docs" / "concepts" / "architecture.md"
CHANGING = TREE / "docs" / "development" / "changing-the-code.md"
SCREEN_LINES = 50
# Modules that are files of a package, not rooms.
NO_ROOMS = {"__init__.py", "__main__.py"}


def _rows() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| (.+) \|$", CHANGING.read_text(), re.MULTILINE)
    assert len(rows) > 15
    return rows


@pytest.mark.parametrize(("what", "path", "names"), _rows())
def test_the_table_of_places_names_what_exists(what: str, path: str, names: str) -> None:
    """A newcomer opens what the table names; a renamed function must not be found missing."""
    text = (TREE / path).read_text()
    listed = re.findall(r"`([^`]+)`", names)
    assert listed, names
    for name in listed:
        definition = rf"^(?:(?:async )?def |class |(?:static )?.*\b)?{re.escape(name)}\b *[(:=]"
        assert re.search(definition, text, re.MULTILINE), f"{path} has no {name} ({what})"


def _rooms() -> list[tuple[str, str]]:
    """Return the rows of the table of rooms: number, and folder or module as the page has it."""
    return re.findall(r"^\| (\d+) \| `([^`]+)` \|", ARCHITECTURE.read_text(), re.MULTILINE)


def test_the_rooms_are_the_folders_and_modules_of_the_package() -> None:
    """A newcomer finds each name on the page in the tree, and the other way round."""
    package = TREE / "gpuruntime"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py")} - NO_ROOMS
    assert sorted(name for _, name in _rooms()) == sorted(folders | modules)


def test_the_rows_of_the_rooms_are_the_import_contract() -> None:
    """What may import what is read on the page and checked by lint: both must say the same."""
    rows: dict[int, set[str]] = {}
    for number, name in _rooms():
        rows.setdefault(int(number), set()).add(name.removesuffix("/").removesuffix(".py"))
    contracts = tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [
        contract["layers"]
        for contract in contracts["contracts"]
        if contract.get("containers") == ["gpuruntime"]
    ]
    # "|" between two modules forbids that they import each other, as the page says of one row.
    wanted = [set(layer.split(" | ")) for layer in layers]
    assert [rows[number] for number in sorted(rows)] == wanted
    assert sorted(rows) == list(range(1, len(layers) + 1))


@pytest.mark.parametrize("page", [ARCHITECTURE, TREE / "docs" / "glossary.md"])
def test_a_page_names_paths_that_exist(page: Path) -> None:
    """A newcomer opens what a page names, also what its text and its diagrams name."""
    paths = set(re.findall(r"(?<![\w/])[\w/-]+(?:\.(?:py|c|h)\b|/(?=[ `]))", page.read_text()))
    assert len(paths) > 15
    roots = (TREE, TREE / "gpuruntime")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


def test_architecture_fits_three_screens() -> None:
    """What is longer is not read."""
    assert len(ARCHITECTURE.read_text().splitlines()) <= 3 * SCREEN_LINES


def test_the_example_config_and_the_reference_are_those_of_the_table() -> None:
    """Operators copy the one and read the other; both are generated, as the reference says."""
    assert (TREE / "config.toml.example").read_text() == option_table.example()
    assert (TREE / "docs" / "reference" / "config.md").read_text() == option_table.reference()


def test_readme_shows_the_two_commands_on_its_first_screen() -> None:
    """The first screen must get a newcomer to a container with a GPU."""
    first = "\n".join((TREE / "README.md").read_text().splitlines()[:SCREEN_LINES])
    for wanted in ("$ make demo", "$ make test", "demo: ok", "by mknod: Operation not permitted"):
        assert wanted in first


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str) -> None:
    """The table of lazy commands must not name a module that does not load."""
    program = Path(sys.executable).with_name("gpuruntime")
    done = subprocess.run(
        [program, command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: gpuruntime" in done.stdout


@pytest.mark.slow
def test_the_wheel_has_four_top_level_names(tmp_path: Path) -> None:
    """Generic names in a shared site-packages collide; the set must not grow by accident."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=TREE, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in tops if not name.endswith((".dist-info", ".data"))} == {
        "cdi",
        "gpunode",
        "gpuruntime",
        "hooks",
    }
