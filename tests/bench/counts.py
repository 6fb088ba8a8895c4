# SPDX-License-Identifier: Apache-2.0
"""Count instructions, and loads of NVML. For the simulated host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import creates
from bench.cases import Case
from bench.lives import HOOK, WORK, Place, forget
from scenario import WORK as COUNTER

CALLGRIND = (
    *("valgrind", "--tool=callgrind", "--trace-children=yes", "--callgrind-out-file=/dev/null"),
)
STATE = {"ociVersion": "1.0.2", "id": "one", "status": "creating", "pid": 4194303}
COUNT = re.compile(r"Collected : (\d+)")


def counted(log: Path, command: Sequence[object], **options: Any) -> int:
    """Return the instructions of *command*, including programs that it executes and starts."""
    log.unlink(missing_ok=True)
    words = [*CALLGRIND, f"--log-file={log}", *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    counts = [int(count) for count in COUNT.findall(log.read_text())]
    if not counts:
        sys.exit(f"{' '.join(words)}: nothing was counted: {done.stderr}")
    return sum(counts)


def hook(place: Place, case: Case) -> int:
    """Return the instructions of our hook, as in *case*, up to its first operation.

    Its container has no root. It may start the ldconfig of the host: otherwise it would confine
    itself, and valgrind.
    """
    config = json.loads(place.document(case))
    (entry,) = (
        entry
        for entries in config["hooks"].values()
        for entry in entries
        if entry["path"].endswith(HOOK)
    )
    bundle = WORK / "hook-bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").write_text(place.document(case))
    state = WORK / "state.json"
    state.write_text(json.dumps({**STATE, "bundle": str(bundle)}))
    with state.open() as stream:
        command = [entry["path"], *entry["args"][1:], "--ldconfig-mode", "host"]
        environment = dict(word.split("=", 1) for word in entry["env"])
        path = {"PATH": os.environ["PATH"]}
        log = WORK / "hook.log"
        return counted(log, command, stdin=stream, env={**path, **environment})


def questions(place: Place, case: Case) -> int:
    """Return how often NVML is loaded in a cold create of *case*. Replaces the library."""
    COUNTER.mkdir(exist_ok=True)
    creates.count_questions()
    forget()
    before = creates.questions()
    place.create(case)
    return creates.questions() - before
