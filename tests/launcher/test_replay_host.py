# SPDX-License-Identifier: Apache-2.0
"""What the host answers: the launcher and gpuruntime/probes.py see the same changes."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from fuzz import replay as harness
from launcher import replays

from gpuruntime import probes
from gpuruntime.launcher import replay

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Case = tuple[str, str, "Callable[[Path], object]", "Callable[[Path], object]"]


def write(name: str, data: bytes = b"x") -> Callable[[Path], object]:
    """Return a function that writes a file below a place."""
    return lambda top: (top / name).write_bytes(data)


def link(name: str, target: str) -> Callable[[Path], object]:
    """Return a function that creates or replaces a link."""

    def change(top: Path) -> None:
        (top / name).unlink(missing_ok=True)
        (top / name).symlink_to(target)

    return change


def remove(name: str) -> Callable[[Path], object]:
    """Return a function that removes a file."""
    return lambda top: (top / name).unlink()


def make(*names: str) -> Callable[[Path], object]:
    """Return a function that creates directories; the last may be a FIFO."""

    def change(top: Path) -> None:
        for name in names:
            if name.endswith("|"):
                os.mkfifo(top / name[:-1], 0o600)
            else:
                (top / name).mkdir(parents=True)

    return change


def again(name: str) -> Callable[[Path], object]:
    """Return a function that replaces a file by a copy with the same times."""

    def change(top: Path) -> None:
        shutil.copy2(top / name, top / "copy")
        (top / "copy").rename(top / name)

    return change


def mode(name: str, value: int) -> Callable[[Path], object]:
    """Return a function that changes the mode of a file."""
    return lambda top: (top / name).chmod(value)


def nothing(_: Path) -> None:
    """Leave the place as it is."""


def both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a function that applies all *changes*."""

    def change(top: Path) -> None:
        for one in changes:
            one(top)

    return change


ODD = b"a\xff\xc3\xa9 b".decode("utf-8", "surrogateescape")
LARGE = b"x" * 700_001
# Operation, argument below the place, initial state, and a change that must be detected.
CASES: dict[str, Case] = {
    "place, another": ("place", "f", write("f"), again("f")),
    "place, gone": ("place", "f", write("f"), remove("f")),
    "place, there now": ("place", "f", nothing, write("f")),
    "place, by a link": ("place", "l", both(make("f", "g"), link("l", "f")), link("l", "g")),
    "identity, longer": ("identity", "f", write("f"), write("f", b"xy")),
    "identity, mode": ("identity", "f", write("f"), mode("f", 0o600)),
    "identity, another": ("identity", "f", write("f"), again("f")),
    "identity, gone": ("identity", "f", write("f"), remove("f")),
    "identity, there now": ("identity", "d/f", nothing, both(make("d"), write("d/f"))),
    "identity, name in it": ("identity", "d", make("d"), write("d/f")),
    "identity, no directory": ("identity", "f/x", write("f"), both(remove("f"), make("f/x"))),
    "exists, gone": ("exists", "l", link("l", "nowhere"), remove("l")),
    "exists, there now": ("exists", "f", nothing, link("f", "nowhere")),
    "link, other": ("link", "l", link("l", "a"), link("l", "b")),
    "link, longer": ("link", "l", link("l", "a"), link("l", "a/")),
    "link, no text": ("link", "l", link("l", ODD), link("l", "x")),
    "link, gone": ("link", "l", link("l", "-"), remove("l")),
    "link, none": ("link", "f", write("f"), both(remove("f"), link("f", "-"))),
    "names, more": ("names", "d", make("d/a", "d/b"), make("d/c")),
    "names, fewer": ("names", "d", make("d/a", "d/b"), lambda top: (top / "d/a").rmdir()),
    "names, other": ("names", "d", make("d/ab"), lambda top: (top / "d/ab").rename(top / "d/a")),
    "names, none": ("names", "d", make("d"), make("d/a")),
    "names, no text": ("names", "d", make(f"d/{ODD}"), make("d/x")),
    "names, gone": ("names", "d", make("d"), lambda top: (top / "d").rmdir()),
    "names, no directory": ("names", "f", write("f"), both(remove("f"), make("f"))),
    "names, many": ("names", "d", make(*(f"d/{i}" for i in range(2000))), make("d/x")),
    "nodes, mode": ("nodes", "p", make("p|"), mode("p", 0o666)),
    "nodes, gone": ("nodes", "p", make("p|"), remove("p")),
    "nodes, there now": ("nodes", "p", nothing, make("p|")),
    "nodes, other kind": ("nodes", "p", make("p|"), both(remove("p"), write("p"))),
    "nodes, link": ("nodes", "p", make("p|"), both(remove("p"), link("p", "q"))),
    "nodes, of many, more": ("nodes", "n*", make("n0|", "m0|"), make("n1|")),
    "nodes, of many, fewer": ("nodes", "n*", make("n0|", "n1|"), remove("n1")),
    "nodes, of many, mode": ("nodes", "n*", make("n0|", "n1|"), mode("n1", 0o666)),
    "nodes, of many, none": ("nodes", "n*", make("m0|"), make("n|")),
    "nodes, all": ("nodes", "d/*", make("d", "d/a|"), make("d/b|")),
    "nodes, no directory": ("nodes", "d/n*", nothing, make("d/n0")),
    "nodes, no text": ("nodes", "n*", make(f"n{ODD}|"), make("nx|")),
    "content, other": ("content", "f", write("f", b"abc"), write("f", b"abd")),
    "content, longer": ("content", "f", write("f", b"\0abc"), write("f", b"\0\0abc")),
    "content, empty": ("content", "f", write("f", b""), write("f", b"\0")),
    "content, none": ("content", "f", nothing, write("f", b"")),
    "content, gone": ("content", "f", write("f"), remove("f")),
    "content, a directory": ("content", "d", make("d"), lambda top: (top / "d").rmdir()),
    "content, a pipe": ("content", "p", make("p|"), both(remove("p"), write("p"))),
    "content, large": ("content", "f", write("f", LARGE), write("f", LARGE[:-1] + b"y")),
    "content, too large": ("content", "f", write("f", 5 * LARGE), write("f", b"y" + 5 * LARGE)),
}  # fmt: skip
# A change that changes no answer would show nothing. This one is none to either.
UNSEEN = {"content, a directory"}


@pytest.mark.parametrize("name", CASES)
def test_both_see_the_same(name: str, tmp_path: Path, readers: Path) -> None:
    """A result of Python holds for the launcher until it changes."""
    operation, argument, before, change = CASES[name]
    top = tmp_path / "top"
    top.mkdir()
    before(top)
    state = probes.read({"x": [operation, [f"{top}/{argument}"]]})
    fields = replay.flat_probes(state.values())
    assert fields is not None
    assert holds(fields, readers)
    change(top)
    seen = probes.read({"x": [operation, [f"{top}/{argument}"]]}) != state
    assert seen is (name not in UNSEEN)
    assert holds(fields, readers) is not seen


@pytest.mark.parametrize("operation", sorted(set(probes._OPERATIONS) - {"program", "variable"}))
def test_each_operation_has_a_case(operation: str) -> None:
    """One that is added needs one, in both languages."""
    assert any(case[0] == operation for case in CASES.values())


@pytest.mark.parametrize(
    ("name", "value"), [("PATH", harness.CALLER.path), ("NOT_SET", None), ("PAT", None)]
)
def test_a_variable(name: str, value: str | None, readers: Path) -> None:
    """Set to the expected value, to another value, or not at all."""
    for content in (value, "other", "", None, "x" * 9000):
        fields = replay.flat_probes([["variable", {name: content}]])
        assert fields is not None
        assert holds(fields, readers) is (content == value)


def test_the_program_itself() -> None:
    """Its version is in the head of the file; its files are probed by path."""
    state = probes.read({"program": ["program", ["version", "discover/driver_table.py"]]})
    fields = replay.flat_probes(state.values())
    assert fields is not None
    operation, path, stamp = replays.fields(fields)
    assert operation == b"content"
    assert probes.read({"x": ["content", [os.fsdecode(path)]]})["x"][1].popitem()[1] == [
        int(number) for number in stamp.split()
    ]


@pytest.mark.parametrize("probe", [["names", {"relative": []}], ["nodes", {"": {}}]])
def test_what_depends_on_the_working_directory_is_no_probe(probe: list[Any]) -> None:
    """The launcher may be somewhere else."""
    assert replay.flat_probes([probe]) is None


def test_what_it_does_not_know_does_not_hold(readers: Path) -> None:
    """Nor does half of a probe."""
    good = replay.listed((b"exists", b"/", b"1"))
    cases = [
        *(good, good * 2, good + replay.listed((b"exists", b"/", b"0"))),
        *(good + replay.listed((b"", b"", b"")), replay.listed((b"exist", b"/", b"1"))),
        *(replay.listed((b"exists", b"/")), good[:-1], good + b"x"),
    ]
    lines = harness.run([(b"p", case) for case in cases], readers)
    assert lines == [b"1", b"1", *([b"0"] * (len(cases) - 2))]


def holds(fields: bytes, readers: Path) -> bool:
    """Return whether the launcher finds that the probes *fields* hold, under the sanitisers."""
    (line,) = harness.run([(b"p", fields)], readers)
    return line == b"1"
