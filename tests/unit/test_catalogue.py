# SPDX-License-Identifier: Apache-2.0
"""Every id of the attack catalogue has a test or a reason, and what is named exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import catalogue
import effort
import pytest

TESTS = Path(__file__).parents[1]
TREE = TESTS.parent
# Options of pytest by which tests are left out.
LEAVE_OUT = ("markexpr", "keyword", "deselect", "ignore", "ignore_glob", "lf")


def is_whole(config: pytest.Config) -> bool:
    """Return whether every test is collected anyway: all were asked for, and none is left out."""
    is_part = effort.IS_SHORT or any(getattr(config.option, name, None) for name in LEAVE_OUT)
    return not is_part and bool({TESTS, TREE} & {Path(word).resolve() for word in config.args})


def collected_alone() -> dict[str, set[str]]:
    """Return the ids of each test that another pytest finds, of those that have any."""
    script = (
        "import json, sys, pytest\n"
        "found = {}\n"
        "class Ids:\n"
        "    def pytest_collection_modifyitems(self, items):\n"
        "        import catalogue\n"
        "        found.update({i.nodeid: sorted(catalogue.ids_of(i)) for i in items})\n"
        "words = ['--collect-only', '-qq', '-p', 'no:cacheprovider', 'tests']\n"
        "status = pytest.main(words, plugins=[Ids()])\n"
        "sys.stderr.write(json.dumps({k: v for k, v in found.items() if v}))\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=TREE, env={"PYTHONPATH": "tests", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    found = json.loads(done.stderr[done.stderr.index("{") :])
    return {name: set(ids) for name, ids in found.items()}


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """Return the ids of each test of the suite, of those that have any."""
    if not is_whole(request.config):
        return collected_alone()
    ids = {item.nodeid: catalogue.ids_of(item) for item in request.session.items}
    return {name: found for name, found in ids.items() if found}


@pytest.mark.slow
def test_every_id_has_a_test_or_a_reason(collected: dict[str, set[str]]) -> None:
    """META-03: whoever adds an id must say what becomes of it; and never both."""
    tested = set().union(*collected.values())
    assert tested | set(catalogue.NONE) == set(catalogue.IDS)
    assert tested & set(catalogue.NONE) == set()


@pytest.mark.slow
def test_tests_that_are_named_exist(collected: dict[str, set[str]]) -> None:
    """A test that was renamed would leave an id without one."""
    there = {name.partition("[")[0] for name in collected}
    assert {name for names in catalogue.TESTS.values() for name in names} <= there
    assert set(catalogue.TESTS) <= set(catalogue.IDS)


def test_reasons_are_short() -> None:
    """They are printed with each run."""
    assert all(len(reason) < 90 for reason in catalogue.NONE.values())


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        ("test_link_04_cache", "", {"LINK-04"}),
        ("test_x[env_01_preload-set]", "", {"ENV-01"}),
        ("test_fd_01_env_06_control", "", {"FD-01", "ENV-06"}),
        ("test_x", "CDI-04: what it leads to.", {"CDI-04"}),
        ("test_x", "A line.\n\nCDI-04 is not meant.", set()),
        ("test_cdi_040", "", set()),
        ("test_execution_01", "", set()),
    ],
)
def test_ids_of_a_test(name: str, text: str, ids: set[str]) -> None:
    """By its name, that of its parameter, or the first line of its docstring."""
    assert catalogue.ids_in(name, text) == ids
