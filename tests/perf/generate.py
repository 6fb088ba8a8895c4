# SPDX-License-Identifier: Apache-2.0
"""Count the instructions of `cdi generate` on simulated hosts, of the process that asks NVML too.

They are held against those of importing what such a command cannot do without, in the same
interpreter. valgrind counts for a forked child what its parent had done before as well: before
each fork, a child that ends at once shows how much that is.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
PYTHON = TREE / ".venv" / "bin" / "python"
REAL_ROOT = TREE / "build" / "driver-root" / "550"
IMPORTS = "import click, ctypes, json"
EIGHT = ("--gpus", "8")
MIG = ("--gpus", "8", "--mig", "all:7")
FILE = ("--output", "/etc/cdi/nvidia.yaml")
# Options of the host, words of the command, and how often it may take what the imports take: 0.70
# of what it took at commit 384055a, which was 3.68, 4.27, 3.85 and 4.63.
BUDGETS = {
    "8 GPUs": (EIGHT, (), 2.57),
    "56 MIG devices": (MIG, (), 2.99),
    "8 GPUs, to a file": (EIGHT, FILE, 2.70),
    "56 MIG devices, to a file": (MIG, FILE, 3.24),
}
# 448 MIG devices, above the imports: so often what 56 take.
MANY_LIMIT = 8.5

PROGRAM = """
import os, sys
real = os.fork
def fork():
    pid = real()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return real()
os.fork = fork
sys.argv = ["gpuruntime", "cdi", "generate", "--hook-path", "/usr/bin/gpu-cdi-hook", *sys.argv[1:]]
from gpuruntime.cli.main import main
main()
"""


def _counts(arguments: list[str], *options: str) -> list[int]:
    """Return the instructions of Python with *arguments*, and of its children, as they end."""
    ran = subprocess.run(
        [
            *(sys.executable, str(SIMHOST), "run", *options, "--"),
            *("valgrind", "--tool=cachegrind", "--cache-sim=no", "--trace-children=yes"),
            *("--cachegrind-out-file=/dev/null", str(PYTHON), *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=TREE,
    )
    counts = re.findall(r"I\s+refs:\s+([\d,]+)", ran.stderr)
    if ran.returncode != 0 or not counts:
        raise RuntimeError(ran.stderr[-2000:])
    return [int(count.replace(",", "")) for count in counts]


@functools.cache
def imports() -> int:
    """Return the instructions of the imports that all is held against."""
    return _counts(["-c", IMPORTS])[0]


def generate(options: tuple[str, ...], words: tuple[str, ...] = ()) -> int:
    """Return the instructions of `cdi generate` with *words* on a host with *options*."""
    # The first time, Python compiles what it imports.
    _compile()
    inherited, child, itself = _counts(["-c", PROGRAM, *words], *options)
    return itself + child - inherited


@functools.cache
def _compile() -> None:
    subprocess.run([PYTHON, "-m", "compileall", "-q", "cdi", "gpuruntime"], cwd=TREE, check=True)


def main() -> None:
    """Print the numbers and ratios; fail above a limit."""
    print(f"{IMPORTS}: {imports():,} instructions")
    is_over = False
    for name, (options, words, limit) in BUDGETS.items():
        count = generate(options, words)
        is_over |= count > limit * imports()
        print(f"{name}: {count:,}: {count / imports():.2f} x that (limit {limit})")
    if REAL_ROOT.is_dir():
        count = generate((*EIGHT, "--driver-root", str(REAL_ROOT)))
        print(f"8 GPUs, the real 550 tree: {count:,}: {count / imports():.2f} x that")
    few = generate(MIG) - imports()
    many = generate(("--gpus", "64", "--mig", "all:7")) - imports()
    print(f"448 MIG devices: {many / few:.2f} x those of 56 (limit {MANY_LIMIT})")
    sys.exit(is_over or many > MANY_LIMIT * few)


if __name__ == "__main__":
    main()
