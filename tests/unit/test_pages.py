# SPDX-License-Identifier: Apache-2.0
"""The man pages and completions that an installation gets, which scripts/pages.py generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuruntime.cli.main import COMPLETE_VARIABLE, VARIABLES
from gpuruntime.system import hook_usage

TREE = Path(__file__).parents[2]
OURS = ("gpu-container-runtime", "gpu-container-runtime-hook", "gpu-cdi-hook")


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of everything, with the incumbent's names."""
    place = tmp_path_factory.mktemp("share")
    command = [sys.executable, "-B", TREE / "scripts" / "pages.py", place, "nvidia"]
    subprocess.run(command, check=True, timeout=60, env={"PYTHONPATH": str(TREE)})
    return place


def page(share: Path, name: str) -> str:
    """Return the text of the page *name* without the marks of troff."""
    section = name.rpartition(".")[2]
    text = (share / "man" / f"man{section}" / name).read_text()
    if text.startswith(".so man"):
        text = (share / "man" / text.split()[1]).read_text()
    return text.replace("\\-", "-")


def test_the_page_of_the_hook_has_every_hook_and_option(share: Path) -> None:
    """It is made from the table of `--help`, also under the incumbent's name."""
    text = page(share, "gpu-cdi-hook.8")
    for hook, (purpose, options) in hook_usage.HOOKS.items():
        section = text.partition(f'.SH "{hook.upper()}"\n')[2].partition("\n.SH ")[0]
        assert section.startswith(purpose)
        for option, value, meaning in options:
            assert f".B {option} {value}".rstrip() + "\n" + " ".join(meaning.split()) in section
    for option, _, _ in hook_usage.COMMON:
        assert f".B {option}" in text
    assert page(share, "nvidia-cdi-hook.8") == text


def test_the_page_of_the_prestart_hook_has_its_options(share: Path) -> None:
    """As its usage."""
    text = page(share, "gpu-container-runtime-hook.8")
    for option, _, meaning in hook_usage.PRESTART:
        assert f".B {option}" in text
        assert " ".join(meaning.split()) in text
    for name in ("nvidia-container-runtime-hook", "nvidia-container-toolkit"):
        assert page(share, f"{name}.8") == text


@pytest.mark.parametrize("name", ["gpuruntime.1", "gpu-container-runtime.8"])
def test_variables_are_in_the_pages(share: Path, name: str) -> None:
    """Those that name the config file."""
    for variable, meaning in VARIABLES.items():
        if "config" in meaning:
            assert f".B {variable}\n{meaning}\n" in page(share, name)


def test_completions_ask_by_the_one_variable(share: Path) -> None:
    """Of each program, for each shell."""
    for name in ("gpuruntime", "nvidia-ctk", "nvidia-container-cli"):
        files = [path for path in share.rglob(f"*{name}*") if "man" not in path.parts]
        assert len(files) == 3
        for path in files:
            assert COMPLETE_VARIABLE in path.read_text()
