# SPDX-License-Identifier: Apache-2.0
"""Have a container see /proc/driver: `show_driver.py SOURCE ARGUMENTS`, those of `runc create`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "simhost"))

import fakeproc

parser = argparse.ArgumentParser()
parser.add_argument("--bundle", "-b", type=Path, default=Path())
options, _ = parser.parse_known_args(sys.argv[2:])
fakeproc.add(options.bundle, sys.argv[1])
