# SPDX-License-Identifier: Apache-2.0
"""Count the instructions of loading many specs, and of `json` on the same bytes.

Instructions are counted by valgrind, and those of a program that only imports are taken off.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"
SPECS, DEVICES = 200, 64
LIMIT = 3.0

PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from cdi import registry
from cdi.complete import complete
from cdi.edits import apply
what, directory = sys.argv[2:]
texts = []
for name in os.listdir(directory):
    with open(directory + "/" + name, encoding="utf-8") as stream:
        texts.append(stream.read())
if what == "json":
    for text in texts:
        json.loads(text)
elif what == "load":
    config = {"ociVersion": "1.0.2", "process": {"env": ["A=b"]}, "mounts": []}
    known = registry.load([directory], may_trust=lambda status: True, decode_yaml=dict)
    apply(complete(known.resolve(["vendor7.com/gpu=17"])), config)
    assert not known.errors
    assert config["linux"]["devices"][0]["path"] == "/dev/null"
"""


def spec(number: int, detailed: bool) -> dict[str, Any]:
    """Return a spec of 64 devices; a detailed one says of each node all that can be said."""
    details = {"type": "c", "major": 1, "minor": 3, "fileMode": 438, "uid": 0, "gid": 0}
    device_edits = [
        {
            "env": [f"GPU={index}"],
            "deviceNodes": [
                {"path": "/dev/null", "permissions": "rw", **(details if detailed else {})},
                {"path": f"/dev/dri/card{index}", "hostPath": "/dev/null", "permissions": "rw"},
            ],
        }
        for index in range(DEVICES)
    ]
    library = "/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.14"
    mount = {"hostPath": library, "containerPath": library, "options": ["ro", "rbind"]}
    hook = {"hookName": "createContainer", "path": "/h", "args": ["h", "x"], "env": ["A=b"]}
    return {
        "cdiVersion": "0.5.0",
        "kind": f"vendor{number}.com/gpu",
        "devices": [
            {"name": str(index), "containerEdits": edits}
            for index, edits in enumerate(device_edits)
        ],
        "containerEdits": {"env": ["A=b"], "mounts": [mount], "hooks": [hook]},
    }


def instructions(what: str, directory: str) -> int:
    """Return how many instructions the program takes for *what*."""
    ran = subprocess.run(
        [
            *("valgrind", "--tool=cachegrind", "--cache-sim=no"),
            *("--cachegrind-out-file=/dev/null", PYTHON, "-I", "-S", "-B", "-X", "utf8"),
            *("-c", PROGRAM, str(TREE), what, directory),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"I\s+refs:\s+([\d,]+)", ran.stderr)
    if ran.returncode != 0 or found is None:
        raise RuntimeError(ran.stderr[-2000:])
    return int(found[1].replace(",", ""))


@functools.cache
def floor() -> int:
    """Return the instructions of the interpreter's own start."""
    with tempfile.TemporaryDirectory() as directory:
        return instructions("nothing", directory)


def measure(detailed: bool, specs: int = SPECS) -> tuple[int, int]:
    """Return the instructions of `json` alone, and of loading and injecting."""
    with tempfile.TemporaryDirectory() as directory:
        for number in range(specs):
            path = Path(directory) / f"{number}.json"
            path.write_text(json.dumps(spec(number, detailed), separators=(",", ":")))
        return instructions("json", directory) - floor(), instructions("load", directory) - floor()


def main() -> None:
    """Print both numbers and their ratio; fail above the limit."""
    worst = 0.0
    for detailed in (False, True):
        parse, load = measure(detailed)
        worst = max(worst, load / parse)
        print(
            f"{SPECS} specs of {DEVICES} devices, {'all' if detailed else 'usual'} members: "
            f"json {parse:,} instructions, load and inject {load:,}: {load / parse:.2f} x "
            f"(limit {LIMIT})"
        )
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
