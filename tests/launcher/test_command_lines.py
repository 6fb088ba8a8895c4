# SPDX-License-Identifier: Apache-2.0
"""One table of command lines, read by the launcher and by gpuruntime.oci.argv."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from effort import tries
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher.conftest import VERSION

from gpuruntime.errors import RequestError
from gpuruntime.oci import argv

if TYPE_CHECKING:
    from conftest import Bench

ROOT = Path(__file__).resolve().parents[2]
OPTIONS_H = ROOT / "gpuruntime" / "launcher" / "options.h"
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/data/argv/cases.json").read_text())
BY_ID = [pytest.param(case, id=case["id"]) for case in CASES]


@pytest.mark.parametrize("case", BY_ID)
@pytest.mark.parametrize("build", ["plain", "twin"])
def test_launcher_gives_each_command_line_to_the_right_program(
    case: dict[str, Any], build: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """A create that reaches runc unseen starts without its GPU; a needless Python costs time."""
    if build == "twin":
        request.getfixturevalue("twin")
    arguments = [os.fsencode(word) for word in case["arguments"]]
    outcome = bench.runtime(*case["arguments"], build=build)
    assert outcome.returncode == 0, outcome.stderr
    if case["to"] == "runtime":
        assert outcome.who == "lowlevel/runc"
        assert outcome.record.arguments == [os.fsencode(bench.path("lowlevel/runc")), *arguments]
    else:
        assert outcome.who == "python"
        assert outcome.record.arguments[11:] == arguments
    lines = (
        f"gpu-container-runtime version {VERSION}\n\n" if case["command"].get("version") else ""
    )
    assert outcome.stdout.decode() == lines
    assert outcome.stderr == b""


@pytest.mark.parametrize("case", BY_ID)
def test_parser_reads_each_command_line(case: dict[str, Any]) -> None:
    """The shim edits the parsed bundle, and writes to the parsed log."""
    assert argv.parse(case["arguments"]) == argv.Command(**case["command"])


@pytest.mark.parametrize("case", BY_ID)
def test_every_create_of_the_table_goes_to_python(case: dict[str, Any]) -> None:
    """The table itself must not promise a create that nobody looks at."""
    if case["command"].get("creates"):
        assert case["to"] == "python"


def test_table_is_complete() -> None:
    """A global option without a row could be read differently by the two."""
    assert len(CASES) >= 60
    assert len({case["id"] for case in CASES}) == len(CASES)
    words = {word for case in CASES for word in case["arguments"]}
    names = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
    assert argv.GLOBAL_OPTIONS.keys() <= names
    assert argv.RUN_OPTIONS.keys() - names == set()


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("OPTIONS", argv.GLOBAL_OPTIONS),
        ("CREATE_OPTIONS", argv.CREATE_OPTIONS),
        ("RUN_OPTIONS", dict(argv.RUN_OPTIONS.items() - argv.CREATE_OPTIONS.items())),
    ],
)
def test_both_tables_of_options_are_the_same(name: str, table: dict[str, str]) -> None:
    """They are written twice, since one is C."""
    pattern = rf"const struct option {name}\[\] = \{{(.*?)\}};"
    c_table = re.search(pattern, OPTIONS_H.read_text(), re.DOTALL)
    assert c_table is not None
    rows = re.findall(r'\{"([^"]+)", (FLAG|VALUE|QUERY)\}', c_table[1])
    assert len(dict(rows)) == len(rows)
    assert {option: kind.lower() for option, kind in rows} == table


def test_bundle_option_without_value_is_an_error_that_names_it() -> None:
    """Editing the working directory's config.json instead would be a surprise."""
    command = argv.parse(["--log", "/l", "create", "c1", "--bundle"])
    assert command.log == "/l"
    with pytest.raises(RequestError, match=r'the option "--bundle" has no value') as caught:
        _ = command.bundle
    assert caught.value.hint == 'put the bundle directory after "--bundle"'


def test_bundle_is_none_when_not_given() -> None:
    """The low-level runtime then uses the working directory."""
    assert argv.parse(["create", "c1"]).bundle is None
    assert argv.parse(["create", "-b", "/b", "c1"]).bundle == "/b"


WORDS = st.sampled_from(
    [
        *("create", "run", "state", "exec", "c1", "", "-", "--", "---", "-=", "--shiny", "-vh"),
        *(f"{dashes}{name}" for name in argv.GLOBAL_OPTIONS for dashes in ("-", "--")),
        *("--root=create", "--version=false", "--debug=true", "-b", "--bundle", "--bundle=x"),
    ]
)


@pytest.mark.property
@settings(
    max_examples=tries(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(arguments=st.lists(WORDS, max_size=6))
def test_what_the_launcher_passes_through_creates_nothing(
    arguments: list[str], bench: Bench
) -> None:
    """The safety of the fast path: in doubt, Python; and no doubt without a reason."""
    outcome = bench.runtime(*arguments)
    command = argv.parse(arguments)
    if outcome.who == "lowlevel/runc":
        assert not command.creates
        assert command.understood
    else:
        assert outcome.who == "python"
        assert not command.understood or command.subcommand in argv.CREATING
