# SPDX-License-Identifier: Apache-2.0
"""Every transcript of the documents has a test that makes it; tests/system has most of those."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scenarios import transcripts
from scenarios.transcripts import ELSEWHERE, PRINTED_ELSEWHERE, SETTINGS, Transcript

ALL = [one for path in transcripts.pages() for one in transcripts.of_page(path)]
# Languages of code blocks. Only `console` is a transcript; `text` is a figure or a message.
LANGUAGES = {"console", "sh", "yaml", "toml", "json", "text", "Dockerfile"}
# Page with such blocks → the test that compares them, "" for a figure.
TEXTS = {
    "docs/concepts/architecture.md": "",
    # Files that a program reads.
    "docs/development/simulated-host.md": "",
    "docs/reference/metrics.md": "",
    "docs/reference/prestart.md": "tests/system/test_device_grants.py",
    "docs/reference/requirements.md": "tests/unit/gpuruntime/request/test_requirements.py",
}
TREE = transcripts.TREE


@pytest.mark.parametrize("transcript", ALL, ids=lambda one: one.name)
def test_a_transcript_is_made_by_a_test(transcript: Transcript) -> None:
    """What no test prints is wrong one day, and a reader who compares is lost."""
    settings = [name for name, setting in SETTINGS.items() if setting.has(transcript)]
    assert len(settings) <= 1
    for command, output in transcript.steps:
        if transcripts.PLACEHOLDER.search(command):
            assert not output, f"{transcript.name}: nobody can run {command}"
        elif transcripts.maker(transcript.page, command) is not None:
            is_compared = any(
                transcript.page == page and command.startswith(beginning)
                for page, beginning in PRINTED_ELSEWHERE
            )
            assert is_compared or not output, f"{transcript.name}: {command}"
        else:
            assert settings, f"{transcript.name}: no test runs {command}"


def test_the_tables_have_nothing_that_no_document_has() -> None:
    """A row without a transcript would hide that its page has changed."""
    for setting in SETTINGS.values():
        for entry in setting.transcripts:
            page, _, command = entry.partition(": ")
            steps = [one.steps[0][0] for one in ALL if one.page == page]
            assert any(first.startswith(command) for first in steps), entry
    commands = {(one.page, command) for one in ALL for command, _ in one.steps}
    for page, beginning in [*ELSEWHERE, *PRINTED_ELSEWHERE]:
        assert any(page == p and c.startswith(beginning) for p, c in commands), (page, beginning)
    for path in [*ELSEWHERE.values(), *PRINTED_ELSEWHERE.values(), *filter(None, TEXTS.values())]:
        assert (TREE / path).is_file()
    assert len(ALL) > 30


@pytest.mark.parametrize("path", transcripts.pages(), ids=lambda path: path.name)
def test_a_code_block_says_what_it_is(path: Path) -> None:
    """Commands with what they print are `console`, so that the test above sees them."""
    text = re.sub(r"(?ms)^````.*?^````$", "", path.read_text())
    fences = re.findall(r"(?m)^ *```(\S*)$", text)
    assert set(fences[::2]) <= LANGUAGES
    assert set(fences[1::2]) <= {""}
    assert ("text" in fences) == (str(path.relative_to(TREE)) in TEXTS)
    for language, block in re.findall(r"(?ms)^ *```(\S+)\n(.*?)^ *```$", text):
        if language != "console":
            assert not re.search(r"(?m)^ *\$ ", block), block


def test_a_block_is_taken_apart_and_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is indented, as in a list."""
    monkeypatch.setattr(transcripts, "TREE", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("1. Do:\n\n   ```console\n   $ one --x\n   old 12\n   # two\n   ```\n\nEnd.\n")
    monkeypatch.setattr(transcripts, "pages", lambda: [page])
    (transcript,) = transcripts.of_page(page)
    assert transcript.steps == (("one --x", "old 12\n"), ("two", ""))
    setting = transcripts.Setting(("page.md: one",))
    assert setting.has(transcript)
    assert not transcripts.Setting(("page.md: two",)).has(transcript)
    same = [["old 12\n", ""]]
    assert transcripts.differences(setting, same) == []
    other: list[list[str | None]] = [["new\n\n13\n", None]]
    (difference,) = transcripts.differences(setting, other)
    assert difference.startswith("page.md:3: $ one --x\nshown:\nold 12\nprinted:\nnew\n")
    transcripts.write(setting, other)
    assert page.read_text() == (
        "1. Do:\n\n   ```console\n   $ one --x\n   new\n\n   13\n   # two\n   ```\n\nEnd.\n"
    )


OLD_DOCKER = """docker: Error response from daemon: OCI runtime create failed: gpu: x
hint: y: unknown.
"""
NEW_DOCKER = """docker: Error response from daemon: failed: OCI runtime create failed: gpu: x
hint: y: unknown

Run 'docker run --help' for more information
"""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("us without a GPU 0.93, with GPUs 1.81 (", "us without a GPU 1.07, with GPUs 2.00 ("),
        ("runtime /usr/sbin/runc", "runtime /usr/bin/runc"),
        (f"hook {transcripts.PROGRAMS}/gpu-cdi-hook", "hook /usr/bin/gpu-cdi-hook"),
        (NEW_DOCKER, OLD_DOCKER),
    ],
)
def test_what_differs_between_machines_does_not_count(one: str, other: str) -> None:
    """Everything else does."""
    assert transcripts.normalised(one) == transcripts.normalised(other)
    assert transcripts.normalised(one) != transcripts.normalised(f"{other} more")
