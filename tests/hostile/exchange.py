# SPDX-License-Identifier: Apache-2.0
"""An attacker: `exchange.py ONE OTHER [PAUSE_US]` exchanges two paths for as long as it is let."""

from __future__ import annotations

import ctypes
import os
import sys
import time

AT_FDCWD = -100
RENAME_EXCHANGE = 2


def main() -> None:
    """Say that it begins, then exchange until the parent is gone or ends it."""
    one, two = (os.fsencode(path) for path in sys.argv[1:3])
    libc = ctypes.CDLL(None)
    parent = os.getppid()
    pause = int(sys.argv[3]) / 1e6 if len(sys.argv) > 3 else 0
    os.write(1, b"begun\n")
    while os.getppid() == parent:
        for _ in range(1 if pause else 1000):
            libc.renameat2(AT_FDCWD, one, AT_FDCWD, two, RENAME_EXCHANGE)
        time.sleep(pause)


if __name__ == "__main__":
    main()
