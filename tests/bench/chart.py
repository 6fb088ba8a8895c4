# SPDX-License-Identifier: Apache-2.0
"""Start times compared with a bare runc, as a bar chart: docs/development/start-times.svg."""

from __future__ import annotations

import statistics
from html import escape

from bench.cases import BASE, EIGHT, EIGHT_ALL, NONE
from bench.targets import Results, walls

# Case of the bench → its label.
BARS = {
    BASE: "bare runc",
    NONE: "through us, no GPU",
    "1 GPU": "1 GPU",
    EIGHT: "8 GPUs",
    EIGHT_ALL: "8 GPUs, all driver capabilities",
}
WIDTH, LABELS, BAR, GAP, TOP = 720, 250, 22, 12, 44
SHADES = ("#8a8a8a", "#76b900")  # runc alone, through us
STYLE = "font-family: sans-serif; font-size: 14px; fill: #333"


def chart(results: Results) -> str:
    """Return an SVG document: the median create of each case, and its ratio to bare runc."""
    medians = {label: statistics.median(walls(results, case)) for case, label in BARS.items()}
    base = medians[BARS[BASE]]
    scale = (WIDTH - LABELS - 130) / max(medians.values())
    height = TOP + len(medians) * (BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Time of one create, beside a bare runc</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        (
            f'<text x="10" y="26" style="{STYLE}; font-weight: bold">'
            f"Time of one create, median of {results['reps']} (warm, 8 simulated GPUs)</text>"
        ),
    ]
    for row, (label, median) in enumerate(medians.items()):
        y = TOP + row * (BAR + GAP)
        width = median * scale
        parts += [
            (
                f'<text x="{LABELS - 10}" y="{y + 16}" text-anchor="end" style="{STYLE}">'
                f"{escape(label)}</text>"
            ),
            (
                f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" '
                f'fill="{SHADES[row > 0]}"/>'
            ),
            (
                f'<text x="{LABELS + width + 8:.1f}" y="{y + 16}" style="{STYLE}">'
                f"{median:.0f} ms = {median / base:.2f} of runc</text>"
            ),
        ]
    return "\n".join([*parts, "</svg>", ""])
