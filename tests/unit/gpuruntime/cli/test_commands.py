# SPDX-License-Identifier: Apache-2.0
"""`make test-install` runs every command of the command line, of the README and of the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from scenarios import commands

from gpuruntime.cli import container_cli
from gpuruntime.cli.main import root

TREE = Path(__file__).parents[4]
# Kept for programs that call it; there is nothing that it could do so far.
NOT_RUN = {("nvidia-container-cli", "configure")}


def leaves(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command that is no group."""
    if not isinstance(command, click.Group):
        yield words
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from leaves(child, (*words, name))


def test_every_command_is_run_from_an_installation() -> None:
    """A command that was tested from the checkout only did not work from the package."""
    there = {
        *leaves(root, ("gpuruntime",)),
        *leaves(container_cli.root, ("nvidia-container-cli",)),
    }
    assert len(there) > 15
    missing = {
        words
        for words in there - NOT_RUN
        if not any(run[: len(words)] == words for run in commands.COMMANDS)
    }
    assert missing == set()


def groups(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words of each group."""
    if isinstance(command, click.Group):
        yield words
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from groups(child, (*words, name))


@pytest.mark.parametrize("words", [*groups(root, ())], ids=" ".join)
def test_recordings_follow_every_command_of_a_help_text(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Whatever its heading is."""
    monkeypatch.syspath_prepend(TREE / "tests" / "record")
    from command_line import commands_of  # noqa: PLC0415 (it imports modules beside it)

    command: click.Command = root
    for word in words:
        assert isinstance(command, click.Group)
        child = command.get_command(click.Context(command), word)
        assert child is not None
        command = child
    assert isinstance(command, click.Group)
    text = CliRunner().invoke(root, [*words, "--help"]).output
    assert sorted(commands_of(text)) == sorted(command.list_commands(click.Context(command)))


def test_what_the_documents_call_is_a_command() -> None:
    """So that it is one of those above."""
    texts = [path.read_text() for path in (TREE / "README.md", *(TREE / "docs").rglob("*.md"))]
    called = {
        tuple(found.split())
        for text in texts
        for found in re.findall(r"(?m)^(?:\$ |# )?(gpuruntime [a-z]+ [a-z][a-z-]+)\b", text)
    }
    assert len(called) > 5
    there = set(leaves(root, ("gpuruntime",)))
    for words in called:
        starts = {leaf[:3] for leaf in there} | {leaf for leaf in there if len(leaf) == 2}
        assert words in starts or words[:2] in starts, words
