# SPDX-License-Identifier: Apache-2.0
"""Who changes a root while somebody works in it, and who is delayed so that it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXCHANGE = Path(__file__).parents[1] / "hostile" / "exchange.py"


@contextmanager
def exchanging(*pairs: tuple[Path, Path], pause_us: int = 0) -> Iterator[None]:
    """Exchange the two paths of each pair for as long as this lasts, one process for each."""
    attackers = [
        subprocess.Popen(
            [sys.executable, EXCHANGE, one, other, str(pause_us)], stdout=subprocess.PIPE
        )
        for one, other in pairs
    ]
    try:
        for attacker in attackers:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"begun\n"
        yield
    finally:
        for attacker in attackers:
            attacker.kill()
            attacker.wait()
            assert attacker.stdout is not None
            attacker.stdout.close()


def delayed(call: str, microseconds: int, log: Path) -> list[str]:
    """Return the command that starts another with each *call* delayed."""
    inject = f"inject={call}:delay_enter={microseconds}"
    return ["strace", "-f", "-o", os.fspath(log), "-e", f"trace={call}", "-e", inject, "--"]
