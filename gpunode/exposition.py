# SPDX-License-Identifier: Apache-2.0
"""Metrics in the text format of Prometheus; escaping is that of prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from gpunode.metric_table import COUNTER, GAUGE
from gpunode.metrics import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(families: Sequence[Family]) -> bytes:
    """Return *families* in the text format, version 0.0.4."""
    written = generate_latest(_Collection(families))
    for family in families:
        if family.metric.type == COUNTER:
            # prometheus-client appends `_total` to the names of counters, and dcgm-exporter does
            # not: so they are written as gauges first. Line breaks in help texts and label values
            # are escaped, so that the line is the only one.
            head = f"\n# TYPE {family.metric.name} ".encode()
            written = written.replace(head + b"gauge\n", head + b"counter\n", 1)
    return written


class _Collection:
    """A collector of prometheus-client that has *families*."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Yield each family as prometheus-client has it."""
        for family in self._families:
            metric = Metric(family.metric.name, family.metric.help, GAUGE)
            for labels, value in family.samples:
                metric.add_sample(family.metric.name, labels, value)
            yield metric
