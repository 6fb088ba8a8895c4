# SPDX-License-Identifier: Apache-2.0
"""`inside.py HOST CHECKOUT OUT`: record one host's cases; run on the simulated host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hosts
from recorder import Recorder

if __name__ == "__main__":
    name, checkout, out = sys.argv[1:]
    # Nothing of the machine is written, whatever a command makes of its options.
    Path(out).mkdir(parents=True, exist_ok=True)
    for words in (("--bind", out, out), ("-o", "remount,bind,ro", "/")):
        subprocess.run(["mount", *words], check=True)
    recorder = Recorder(Path(checkout), Path(out))
    for group in hosts.HOSTS[name].groups:
        group(recorder)
