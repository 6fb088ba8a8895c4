#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record what machines read of a checkout's programs, and compare two recordings.

`record.py --checkout DIR --out OUT` runs the programs of DIR, which `make setup` has built, on
simulated GPU hosts (../simhost) and writes OUT/HOST/GROUP/CASE/: `call` (the command, what differs
in its environment, its exit status), `stdout`, `stderr`, and the files that it wrote. The same
behaviour gives the same tree (normal.py has what is normalised). Nothing of the programs is
imported, so that their modules may lie anywhere: one record.py records an old and a new checkout.

`record.py compare OLD NEW` prints what differs, and exits with 1 if anything does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compared
import hosts

HERE = Path(__file__).resolve().parent
SIMHOST = HERE.parent / "simhost" / "simhost.py"
DEADLINE_S = 900


def main() -> int:
    """Run the command line and return its exit status."""
    if sys.argv[1:2] == ["compare"]:
        parser = argparse.ArgumentParser(prog="record.py compare")
        parser.add_argument("old", type=Path)
        parser.add_argument("new", type=Path)
        parser.add_argument("--lines", type=int, default=20, help="of each diff (default 20)")
        chosen = parser.parse_args(sys.argv[2:])
        return compared.compare(chosen.old, chosen.new, chosen.lines)
    parser = argparse.ArgumentParser(prog="record.py", description=__doc__.split("\n")[0])
    parser.add_argument("--checkout", type=Path, default=HERE.parents[1])
    parser.add_argument("--out", type=Path, required=True, help="replaced if it is a recording")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--host", action="append", help="only this host; may be repeated")
    return record(parser.parse_args())


def record(chosen: argparse.Namespace) -> int:
    """Record every host, or those chosen."""
    out, checkout = chosen.out.resolve(), chosen.checkout.resolve()
    names = chosen.host or list(hosts.HOSTS)
    began = time.monotonic()
    prepare(out)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        statuses = list(pool.map(lambda name: play(name, checkout, out), names))
    files = sum(path.is_file() for path in out.rglob("*"))
    print(f"{files} files of {len(names)} hosts in {time.monotonic() - began:.0f} s: {out}")
    return 1 if any(statuses) else 0


def prepare(out: Path) -> None:
    """Make the directory *out*; an earlier recording in it is removed."""
    mark = out / "recording"
    if out.is_dir() and any(out.iterdir()):
        if not mark.exists():
            sys.exit(f"record.py: {out} is not empty, and no recording")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    mark.write_text("1\n")


def play(name: str, checkout: Path, out: Path) -> int:
    """Record one host in a simulated host of its own."""
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, str(SIMHOST), "run", *hosts.HOSTS[name].options, "--"),
            *(sys.executable, str(HERE / "inside.py"), name, str(checkout), str(out / name)),
        ],
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=DEADLINE_S,
        # The launcher as it was built, not the one that tests watch.
        env={"PATH": os.environ["PATH"], "SIMHOST_WATCHED": "off"},
    )
    print(f"{name}: {time.monotonic() - began:.0f} s, exit {done.returncode}", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
