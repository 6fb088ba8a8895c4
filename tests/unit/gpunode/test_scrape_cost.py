# SPDX-License-Identifier: Apache-2.0
"""What a scrape of a full node costs, and that the exporter does not grow."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

from node import full_node
from prometheus_client.parser import text_string_to_metric_families

# The limit of the project; a scrape takes about a third of it.
CPU_S = 0.030
WARM_UP, SCRAPES, PERIODS = 50, 40, 2
# One name that is kept of each scrape would be more blocks than there are scrapes.
GROWTH_BLOCKS = SCRAPES


def test_a_scrape_of_a_full_node_costs_little(tmp_path: Path) -> None:
    """8 GPUs with 7 MIG devices each, and 56 pods: in processor time."""
    service = full_node.exporter(tmp_path)
    full_node.observe(service, 1)
    text = service.scrape().decode()
    pods = {
        sample.labels["pod"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "pod" in sample.labels
    }
    assert len(pods) == full_node.GPUS * full_node.MIGS
    times = []
    for _ in range(10):
        begin = time.process_time()
        service.scrape()
        times.append(time.process_time() - begin)
    assert min(times) < CPU_S


def test_memory_is_steady(tmp_path: Path) -> None:
    """Though pods and processes come and go between scrapes."""
    service = full_node.exporter(tmp_path)

    def polls(first: int, last: int) -> None:
        for number in range(first, last):
            full_node.observe(service, number)
            service.scrape()

    # Numbers of equal length, so that the names of the pods need the same memory.
    end = 1000 + WARM_UP
    polls(1000, end)
    growth = []
    for _ in range(PERIODS):
        gc.collect()
        before = sys.getallocatedblocks()
        polls(end, end + SCRAPES)
        gc.collect()
        growth.append(sys.getallocatedblocks() - before)
        end += SCRAPES
    # What grows does so in each period; a cache that is filled by chance does not.
    assert min(growth) < GROWTH_BLOCKS
