# SPDX-License-Identifier: Apache-2.0
r"""What a container asks for, row by row: tests/data/request, written by hand.

A file has sections; what stands before the first holds for all of them:

    == title
    by DOCUMENT SECTION       what decides the rows; a row's own: "  # DOCUMENT SECTION" at its end
    given INPUT: CELL         an input that every row has
    expect OUTPUT: CELL       what every row gives that does not say otherwise
    columns INPUT | INPUT => OUTPUT | OUTPUT
    CELL | CELL => CELL | CELL

Inputs: a variable's name (cell: its value, or `unset`), or one of INPUTS below. Outputs: OUTPUTS.
In a cell, `\n`, `\t`, `\xNN`, `\uNNNN` stand for characters, `{3*ab}` for ababab, `{0..3}` for
0,1,2,3; "quotes" keep blanks at the ends. `-` is an empty list, `?` an output that no document
decides. A result is names of devices, `driver only`, `nothing` (then each other output is empty,
except what was ignored), or an error's class and a word of its message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuruntime import errors
from gpuruntime.config import Config
from gpuruntime.request.parse import Request, from_oci

TABLE = Path(__file__).parents[3] / "data" / "request"
DIRECTORY = "/var/run/nvidia-container-devices"
RUNTIME = "nvidia-container-runtime"
LEAST_ROWS = 600

FLAG = {"yes": True, "no": False}
# Input → the option that it sets.
OPTIONS = {
    "accept env": "accept-nvidia-visible-devices-envvar-when-unprivileged",
    "accept mounts": "accept-nvidia-visible-devices-as-volume-mounts",
    "config mode": f"{RUNTIME}.mode",
    "default kind": f"{RUNTIME}.modes.cdi.default-kind",
    "disable require": "disable-require",
    "ignore imex": "features.ignore-imex-channel-requests",
    "jit capabilities": f"{RUNTIME}.modes.jit-cdi.driver-capabilities",
    "prefixes": f"{RUNTIME}.modes.cdi.annotation-prefixes",
    "supported": "supported-driver-capabilities",
    "swarm": "swarm-resource",
}
FLAGS = ("accept env", "accept mounts", "disable require", "ignore imex")
INPUTS = {
    **dict.fromkeys(OPTIONS, "an option: text, or yes or no; prefixes: a list"),
    "annotation": "the value of cdi.k8s.io/gpu",
    "annotations": "a list of key=value",
    "destination": "of a mount of /dev/null, instead of `mounts`",
    "env": "a list of entries as they are",
    "mounts": "a list of names below /var/run/nvidia-container-devices",
    "privileged": "yes: CAP_SYS_ADMIN is in the bounding set",
    "sets": "a list of set=capability,capability, instead of `privileged`",
    "source": "of that mount",
    "type": "of that mount",
}
OUTPUTS = {
    "capabilities": ",",
    "features": None,
    "ignored": None,
    "imex": None,
    "mig": None,
    "mode": None,
    "requirements": "&",
    "result": None,
    "source": None,
}
ESCAPE = re.compile(
    r"\\(?:([nrt\\])|x([0-9a-f]{2})|u([0-9a-f]{4}))|\{(\d+)\*([^}]*)\}|\{(\d+)\.\.(\d+)\}"
)
CHARACTERS = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


@dataclass
class Row:
    """One row; *where* is its file and line."""

    where: str
    by: str
    given: dict[str, str]
    expected: dict[str, str]


@dataclass
class Section:
    """What the rows of a section have in common."""

    by: str = ""
    given: dict[str, str] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def copy(self) -> Section:
        """Return a section that begins with what this one has."""
        return Section(self.by, dict(self.given), dict(self.expected))


def decode(cell: str) -> str:
    """Return the text that *cell* stands for."""
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        cell = cell[1:-1]
    return ESCAPE.sub(_character, cell)


def _character(match: re.Match[str]) -> str:
    short, byte, point, times, text, first, last = match.groups()
    if short:
        return CHARACTERS[short]
    if byte or point:
        return chr(int(byte or point, 16))
    if times:
        return int(times) * text
    return ",".join(str(number) for number in range(int(first), int(last) + 1))


def items(cell: str, separator: str | None = None) -> list[str]:
    """Return the items of a list."""
    return [] if cell == "-" else [decode(item.strip()) for item in cell.split(separator)]


def read(path: Path) -> Iterator[Row]:
    """Yield the rows of a file."""
    common = Section()
    section = common
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        where = f"{path.stem}:{number}"
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        if word == "==":
            section = common.copy()
        elif word == "by":
            section.by = rest
        elif word in ("given", "expect"):
            name, _, cell = rest.partition(":")
            names = INPUTS if word == "given" else OUTPUTS
            assert name in names or (word == "given" and name.isupper()), where
            (section.given if word == "given" else section.expected)[name] = cell.strip()
        elif word == "columns":
            given, _, expected = rest.partition("=>")
            section.inputs, section.outputs = cells(given), cells(expected)
            assert all(name in INPUTS or name.isupper() for name in section.inputs), where
            assert all(name in OUTPUTS for name in section.outputs), where
        else:
            yield row(where, line, section)


def cells(text: str) -> list[str]:
    """Return what stands between the bars."""
    return [cell.strip() for cell in text.split("|")]


def row(where: str, line: str, section: Section) -> Row:
    """Return the row in *line*."""
    text, _, by = line.partition("  # ")
    given, arrow, expected = text.partition("=>")
    assert arrow, where
    found = Row(
        where,
        by.strip() or section.by,
        section.given | dict(zip(section.inputs, cells(given), strict=True)),
        section.expected | dict(zip(section.outputs, cells(expected), strict=True)),
    )
    result = found.expected.get("result", "")
    assert found.by, f"{where}: nothing decides it"
    assert result, f"{where}: no result"
    has_mode = result == "nothing" or "Error" in result or "mode" in found.expected
    assert has_mode, f"{where}: no mode"
    return found


ROWS = [found for path in sorted(TABLE.glob("*.txt")) for found in read(path)]


def config_of(given: dict[str, str]) -> Config:
    """Return the operator's configuration of a row."""
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if name in given:
            cell = given[name]
            values[option] = FLAG[cell] if name in FLAGS else decode(cell)
            if name == "prefixes":
                values[option] = items(cell)
    return Config(values, None)


def document_of(given: dict[str, str]) -> dict[str, Any]:
    """Return the OCI config of a row."""
    env = ["PATH=/bin", *items(given.get("env", "-"))]
    env += [f"{n}={decode(v)}" for n, v in given.items() if n.isupper() and v != "unset"]
    sets = {"bounding": ["CAP_CHOWN"]}
    if given.get("privileged") == "yes":
        sets["bounding"].append("CAP_SYS_ADMIN")
    for item in items(given.get("sets", "-")):
        name, _, capabilities = item.partition("=")
        sets[name] = capabilities.split(",") if capabilities else []
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts += [mount(f"{DIRECTORY}/{name}") for name in items(given.get("mounts", "-"))]
    if "destination" in given:
        source, kind = given.get("source", "/dev/null"), given.get("type", "bind")
        mounts.append(mount(decode(given["destination"]), decode(source), decode(kind)))
    annotations = dict(item.split("=", 1) for item in items(given.get("annotations", "-")))
    if given.get("annotation", "unset") != "unset":
        annotations["cdi.k8s.io/gpu"] = decode(given["annotation"])
    return {
        "ociVersion": "1.0.2",
        "process": {"args": ["sh"], "env": env, "capabilities": sets},
        "root": {"path": "rootfs"},
        "mounts": mounts,
        "annotations": annotations,
    }


def mount(destination: str, source: str = "/dev/null", kind: str = "bind") -> dict[str, Any]:
    """Return a mount as the kubelet writes it."""
    return {"destination": destination, "type": kind, "source": source, "options": ["ro", "bind"]}


def outputs(request: Request) -> dict[str, Any]:
    """Return what *request* is, under the names of the table."""
    return {
        "capabilities": list(request.extras.capabilities),
        "features": list(request.extras.features),
        "imex": [str(channel) for channel in request.extras.imex],
        "mig": list(request.extras.mig),
        "mode": request.mode,
        "requirements": list(request.extras.requirements),
        "result": "driver only" if request.driver_only else list(request.devices),
        "source": request.source,
    }


def expected_outputs(cells_: dict[str, str]) -> dict[str, Any]:
    """Return what a row expects, without what it leaves open."""
    if cells_["result"] == "nothing":
        lists: dict[str, Any] = {name: [] for name in OUTPUTS if name != "ignored"}
        return lists | {"mode": "", "source": ""}
    found: dict[str, Any] = {}
    for name, cell in cells_.items():
        if cell == "?" or name == "ignored":
            continue
        if name in ("mode", "source") or cell == "driver only":
            found[name] = cell
        else:
            found[name] = items(cell, OUTPUTS[name])
    return found


def assert_ignored(request: Request, cell: str) -> None:
    """Each word of *cell* is in what is said of something ignored; `-`: nothing is."""
    said = [f"{entry.what} {entry.why}" for entry in request.ignored]
    assert all(entry.what and entry.why for entry in request.ignored)
    if cell == "-":
        assert not said
    elif cell != "?":
        for word in cell.split():
            assert any(word.lower() in text.lower() for text in said), f"{word} not in {said}"


@pytest.mark.parametrize("row", [pytest.param(row, id=row.where) for row in ROWS])
def test_a_row(row: Row) -> None:
    """The request, or the error, is what the row says."""
    document, config = document_of(row.given), config_of(row.given)
    error = re.fullmatch(r"(\w+Error) (.*)", row.expected["result"])
    if error:
        with pytest.raises(getattr(errors, error[1])) as caught:
            from_oci(document, config)
        assert error[2].lower() in caught.value.lines().lower()
        assert len(caught.value.lines()) < 9000
        return
    request = from_oci(document, config)
    expected = expected_outputs(row.expected)
    found = outputs(request)
    assert {name: found[name] for name in expected} == expected, row.by
    assert bool(request) == (row.expected["result"] != "nothing")
    assert_ignored(request, row.expected.get("ignored", "?"))


def test_the_table_is_there(record_property: Callable[[str, object], None]) -> None:
    """Rows that went missing would pass, and a row twice would count twice."""
    record_property("summary", f"request table: {len(ROWS)} rows")
    assert len(ROWS) >= LEAST_ROWS
    seen: dict[str, str] = {}
    for one in ROWS:
        inputs = repr(sorted(one.given.items()))
        assert inputs not in seen, f"{one.where} is {seen[inputs]} again"
        seen[inputs] = one.where


SPOILED = {
    "capabilities": "sound",
    "features": "sound",
    "ignored": "nobody-says-this",
    "imex": "7777777",
    "mig": "sound",
    "mode": "another",
    "requirements": "sound>=1",
    "result": "example.com/another=0",
    "source": "another",
}


@pytest.mark.parametrize("output", SPOILED)
def test_a_wrong_expectation_fails(output: str) -> None:
    """The table compares what it says it compares."""
    row = next(
        row for row in ROWS if row.expected.get("ignored") == "-" and is_pinned(row, output)
    )
    test_a_row(row)
    with pytest.raises(AssertionError):
        test_a_row(Row(row.where, row.by, row.given, {**row.expected, output: SPOILED[output]}))


def is_pinned(row: Row, output: str) -> bool:
    """Whether *row* says what *output* is, and asks for something."""
    is_request = row.expected["result"] != "nothing" and "Error" not in row.expected["result"]
    return is_request and row.expected.get(output, "?") != "?"


def test_a_missing_error_fails() -> None:
    """And another error than the one that is expected."""
    row = next(row for row in ROWS if row.expected["result"].startswith("RequestError"))
    test_a_row(row)
    for result in ("nothing", "ConfigError x", "RequestError nobody-says-this"):
        with pytest.raises((AssertionError, errors.GpuRuntimeError)):
            test_a_row(Row(row.where, row.by, row.given, {**row.expected, "result": result}))
