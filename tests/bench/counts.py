# SPDX-License-Identifier: Apache-2.0
"""Instructions, and questions to the driver. For the simulated host."""

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
    """Return how many instructions *command* takes, with all that it becomes and starts."""
    log.unlink(missing_ok=True)
    words = [*CALLGRIND, f"--log-file={log}", *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    found = [int(count) for count in COUNT.findall(log.read_text())]
    if not found:
        sys.exit(f"{' '.join(words)}: nothing was counted: {done.stderr}")
    return sum(found)


def hook(place: Place, case: Case) -> int:
    """Return the instructions of our hook, with its arguments of *case*, up to the container.

    It looks for one that is not there: a hook that enters one confines itself, and valgrind.
    """
    config = json.loads(place.document(case))
    (entry,) = (
        entry
        for entries in config["hooks"].values()
        for entry in entries
        if entry["path"].endswith(HOOK)
    )
    state = WORK / "state.json"
    state.write_text(json.dumps({**STATE, "bundle": str(WORK)}))
    with state.open() as stream:
        command = [entry["path"], *entry["args"][1:]]
        environment = dict(word.split("=", 1) for word in entry["env"])
        path = {"PATH": os.environ["PATH"]}
        return counted(WORK / "hook.log", command, stdin=stream, env={**path, **environment})


def questions(place: Place, case: Case) -> int:
    """Return how often NVML is loaded in a cold create of *case*. Replaces the library."""
    COUNTER.mkdir(exist_ok=True)
    creates.count_questions()
    forget()
    before = creates.questions()
    place.create(case)
    return creates.questions() - before
