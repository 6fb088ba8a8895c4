# SPDX-License-Identifier: Apache-2.0
"""The tier `newer_engines`: collected only if an argument names this directory.

`make test-newer-engines` does. It needs a network once, and some hundred megabytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "newer_engines: engines unpacked from newer Debian suites; needs root"
    )


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Ignore this directory unless an argument names a path in it."""
    paths = (
        Path(config.invocation_params.dir, str(argument).partition("::")[0])
        for argument in config.invocation_params.args
    )
    return None if any(HERE in (path, *path.parents) for path in paths) else True
