# SPDX-License-Identifier: Apache-2.0
"""The log files of containers in Kubernetes."""

from __future__ import annotations

from pathlib import Path


def output(log: Path) -> str:
    """Return the output in *log*: lines of a time, a stream, a tag (F: a full line) and text."""
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    return "".join(
        text + ("\n" if tag == "F" else "") for _, stream, tag, text in lines if stream == "stdout"
    )
