# SPDX-License-Identifier: Apache-2.0
"""The transcripts of the documents show what the commands print.

`GPURUNTIME_WRITE_GOLDEN=1` writes what they print into the documents.
"""

from __future__ import annotations

import os
import platform
import shutil

import pytest
from scenarios import transcripts

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
pytestmark = [
    pytest.mark.system("runc"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the documents show x86-64"),
]


@pytest.mark.parametrize("name", transcripts.SETTINGS)
def test_a_transcript_shows_what_its_commands_print(name: str) -> None:
    """Readers compare theirs with it."""
    setting = transcripts.SETTINGS[name]
    missing = [program for program in setting.needs if not shutil.which(program, path=PATH)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    outputs = transcripts.on_host(name)
    if os.environ.get("GPURUNTIME_WRITE_GOLDEN"):
        transcripts.write(setting, outputs)
    assert transcripts.differences(setting, outputs) == []
