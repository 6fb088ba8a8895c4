# SPDX-License-Identifier: Apache-2.0
"""One cluster for the tests of this directory, all of one worker (TOGETHER in ../conftest.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from containers import seen
from kubernetes import images

SCENARIO = Path(__file__).with_name("scenario.py")
# A cluster that does not come up must not hold up the other tests.
TIMEOUT_S = 600


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """Return what the pods, the node and the accounts have seen, also with a current image."""
    archive = images.current()
    words = [str(archive)] if archive else []
    return seen.play(*words, program=SCENARIO, host=["--gpus", "4"], timeout=TIMEOUT_S)
