# SPDX-License-Identifier: Apache-2.0
"""Tiers: a tier that cannot run here is skipped by name, or fails where it was promised."""

from __future__ import annotations

import os
import shutil
from collections import Counter

import pytest

REQUIRED = "GPURUNTIME_TEST_REQUIRE"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# Tier → the programs without which it cannot run.
TIERS = {
    "system": ("runc", "crun"),
    "engine": ("dockerd", "docker", "containerd", "ctr", "podman"),
}
COUNTS: Counter[tuple[str, str]] = Counter()


def why_not(tier: str) -> str | None:
    """Return why *tier* cannot run here, or None."""
    if os.geteuid() != 0:
        return f"tier {tier}: needs root"
    missing = [name for name in TIERS[tier] if shutil.which(name, path=PATH) is None]
    return f"tier {tier}: not installed: {', '.join(missing)}" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run, loudly, unless the tier is required."""
    required = os.environ.get(REQUIRED, "").split(",")
    reasons = {tier: why_not(tier) for tier in TIERS}
    for item in items:
        for tier, reason in reasons.items():
            if reason and item.get_closest_marker(tier):
                if tier in required:
                    raise pytest.UsageError(f"{REQUIRED}: {reason}")
                item.add_marker(pytest.mark.skip(reason=reason))


def tier_of(report: pytest.TestReport) -> str:
    """Return the tier of a report by its markers."""
    for tier in (*TIERS, "property"):
        if tier in report.keywords:
            return tier
    return "unit"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the outcome of each test by tier."""
    if report.when == "call" or report.outcome == "skipped":
        COUNTS[tier_of(report), report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests of each tier ran, so that a skipped tier is seen."""
    for tier in ("unit", "property", *TIERS):
        outcomes = [f"{COUNTS[tier, o]} {o}" for o in ("passed", "failed", "skipped")]
        terminalreporter.write_line(f"tier {tier}: {', '.join(outcomes)}")
