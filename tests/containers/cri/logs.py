# SPDX-License-Identifier: Apache-2.0
"""The log files of Kubernetes' containers."""

from __future__ import annotations

from pathlib import Path


def output(log: Path) -> str:
    """Return the output in *log*: lines of a time, a stream, whether it is Full, and the text."""
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    return "".join(
        text + ("\n" if tag == "F" else "") for _, stream, tag, text in lines if stream == "stdout"
    )
