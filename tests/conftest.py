# SPDX-License-Identifier: Apache-2.0
"""Tiers: one that cannot run here is skipped by name, or fails where it was promised.

`GPURUNTIME_TEST_REQUIRE=system,engine` promises those two. The summary counts each tier's tests,
and shows what tests have measured: their properties of the name "summary".
A tier's marker may name the programs that the test needs: `@pytest.mark.engine("podman")`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from watched import build as watched

REQUIRE = "GPURUNTIME_TEST_REQUIRE"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# The tiers that a machine may be unable to run, and what a test without arguments needs.
PRIVILEGED = {
    "system": ("runc", "crun"),
    "newer_engines": (),
    "engine": ("dockerd", "docker", "containerd", "ctr", "podman"),
}
TIERS = ("unit", "property", "conformance", *PRIVILEGED)
OUTCOMES = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}

pytest.register_assert_rewrite("containers.seen", "containers.labspec")
pytest_plugins = ("catalogue",)
tier_by_test: dict[str, str] = {}
KEPT = Path("/run/gpuruntime")
there = pytest.StashKey[list[str]]()


def pytest_configure() -> None:
    """Refuse a promise of a tier that does not exist; have the launcher that tests watch."""
    unknown = required() - set(PRIVILEGED)
    if unknown:
        raise pytest.UsageError(f"{REQUIRE}: no tier {', '.join(sorted(unknown))}")
    if os.geteuid() == 0 and shutil.which("gcc"):
        try:
            watched.build()
        except subprocess.CalledProcessError as error:
            raise pytest.UsageError(f"the watched launcher: {error.stderr}") from error


def kept_by_us() -> list[str]:
    """Return what programs of ours have left on this machine itself."""
    return [str(path) for path in (KEPT, *sorted(KEPT.glob("*")))] if KEPT.exists() else []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note what is there already."""
    session.config.stash[there] = kept_by_us()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that has left something where only an installed program may."""
    left = [path for path in kept_by_us() if path not in session.config.stash[there]]
    session.config.stash[there] = left
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def required() -> set[str]:
    """Return the tiers that must run here."""
    return {word.strip() for word in os.environ.get(REQUIRE, "").split(",") if word.strip()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note each test's tier."""
    for item in items:
        found = [tier for tier in TIERS if item.get_closest_marker(tier)]
        tier_by_test[item.nodeid] = found[-1] if found else "unit"


def why_not(item: pytest.Item) -> str | None:
    """Return why *item* cannot run here, or None."""
    for tier, usual in PRIVILEGED.items():
        marker = item.get_closest_marker(tier)
        if marker is None:
            continue
        if os.geteuid() != 0:
            return f"tier {tier}: needs root"
        needed = marker.args or usual
        missing = [name for name in needed if shutil.which(name, path=PATH) is None]
        if missing:
            return f"tier {tier}: not installed: {', '.join(missing)}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that cannot run here, or fail it where its tier was promised."""
    reason = why_not(item)
    if reason is None:
        return
    if tier_by_test[item.nodeid] in required():
        pytest.fail(f"{reason}, and {REQUIRE} promises it", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests of each tier ran, so that a tier that did not is seen."""
    counts: Counter[tuple[str, str]] = Counter()
    for category, outcome in OUTCOMES.items():
        for report in terminalreporter.stats.get(category, []):
            tier = tier_by_test.get(report.nodeid)
            if tier is not None:
                counts[tier, outcome] += 1
    for path in terminalreporter.config.stash[there]:
        terminalreporter.write_line(f"left on this machine by a test: {path}", red=True)
    terminalreporter.section("tiers")
    for tier in TIERS:
        shown = ", ".join(f"{counts[tier, o]} {o}" for o in ("passed", "failed", "skipped"))
        terminalreporter.write_line(f"{tier:13} {shown}")
    for category in OUTCOMES:
        for report in terminalreporter.stats.get(category, []):
            for name, line in getattr(report, "user_properties", ()):
                if name == "summary":
                    terminalreporter.write_line(line)
