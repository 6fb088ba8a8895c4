# SPDX-License-Identifier: Apache-2.0
"""The messages on `docs/kubernetes/sharing.md` are those of the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nodes import gpu, model

from gpunode import delivery, devices
from gpunode.cli import agent
from gpunode.config import file as files
from gpunode.config.effective import effective
from gpunode.delivery import Delivery
from gpunode.kubelet.backend import AllocationError
from gpunode.plugin_spec import Names
from gpuruntime.errors import GpuRuntimeError

TREE = Path(__file__).resolve().parents[3]
PAGE = TREE / "docs" / "kubernetes" / "sharing.md"
SCHEMA = str(TREE / "gpunode" / "config" / "agent_schema.json")
MPS = "sharing: {{mps: {{resources: [{{name: {0}, replicas: {1}}}]}}}}"
ROOT = "flags: {mpsRoot: /run/nvidia/mps}\n"
SLICES = "resources: [{name: gpu, replicas: 2}]"
WHOLE, SLICED = gpu(0), gpu(0, mig=["1g.5gb"])
PAIRS = [
    (f"sharing: {{timeSlicing: {{{SLICES}}}, mps: {{{SLICES}}}}}", WHOLE),
    ("flags: {mpsRoot: /m, migStrategy: mixed}\n" + MPS.format("gpu", 2), WHOLE),
    (ROOT + MPS.format("mig-1g.5gb", 2), WHOLE),
    ("flags: {mpsRoot: /m, migStrategy: single}\n" + MPS.format("gpu", 2), SLICED),
    (MPS.format("gpu", 2), WHOLE),
    (ROOT + MPS.format("gpu", 49), WHOLE),
    (f"sharing: {{timeSlicing: {{{SLICES[:-1]}, {{name: gpu, replicas: 3}}]}}}}", WHOLE),
    ("flags: {plugin: {deviceListStrategy: [auto, envvar]}}", WHOLE),
]


def refusals() -> list[str]:
    """Return the messages that refuse PAIRS, and the config of the agent, in order."""
    messages = []
    for text, node in PAIRS:
        with pytest.raises(GpuRuntimeError) as refusal:
            devices.offer(model(node), effective({}, files.parse(text, "c.yaml")))
        messages.append(refusal.value.message)
    text = "config-file: /a\nnode-config: {directory: /b}\nservices: {exporter: {}}"
    with pytest.raises(GpuRuntimeError) as refusal:
        agent.choice_of(files.parse(text, "c.yaml", SCHEMA))
    return [*messages, refusal.value.message]


def test_the_pairs_that_exclude_each_other_are_refused_by_these_messages() -> None:
    """People search for them."""
    text = PAGE.read_text().partition("## What excludes each other")[2]
    table = text.partition("These are not refused")[0]
    rows = re.findall(r"^\| .* \| `(.*)` \|$", table, re.MULTILINE)
    messages = refusals()
    assert len(rows) == len(messages)
    for row, message in zip(rows, messages, strict=True):
        assert row in message


def test_a_request_for_two_units_is_refused_by_this_message() -> None:
    """It is the message of the pod's status."""
    config = effective({}, files.parse(f"sharing: {{timeSlicing: {{{SLICES}}}}}", "c.yaml"))
    (resource,) = devices.offer(model(WHOLE), config).resources
    with pytest.raises(AllocationError) as refusal:
        delivery.response(
            resource,
            [unit.id for unit in resource.units],
            Delivery(config, ("envvar",), Names()),
            "1",
        )
    sentences = [line.strip() for line in PAGE.read_text().splitlines() if "maximum" in line]
    assert sentences[0] in str(refusal.value)
