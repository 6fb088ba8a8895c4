# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: with GPURUNTIME_TEST_SHORT, tests of what a release needs do not run.

They build and install packages, run the launcher under an emulator, and repeat the transcripts of
documents: a fifth of the processor time, for what seldom breaks. The summary names their files.
"""

from __future__ import annotations

import effort
import pytest

# The beginnings of the names of tests.
RELEASE = (
    "tests/bench/test_bench.py",
    "tests/image/",
    "tests/launcher/test_aarch64.py",
    "tests/launcher/test_replay_aarch64.py",
    "tests/launcher/test_replay_characters.py",
    "tests/node/test_install.py",
    "tests/switch/",
    "tests/system/test_bundle.py",
    "tests/system/test_deb.py",
    "tests/system/test_install.py",
    "tests/system/test_maintainer_scripts.py",
    "tests/system/test_release.py",
    "tests/system/test_transcripts.py",
    "tests/system/test_wheel.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of a release."""
    if not effort.IS_SHORT:
        return
    left_out = [item for item in items if item.nodeid.startswith(RELEASE)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.nodeid.startswith(RELEASE)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files that did not run."""
    if not effort.IS_SHORT:
        return
    terminalreporter.section("not run")
    terminalreporter.write_line("SHORT is set: what a release needs is tested by make test alone:")
    for name in RELEASE:
        terminalreporter.write_line(f"  {name}")
