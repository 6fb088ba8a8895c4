# SPDX-License-Identifier: Apache-2.0
"""Validate components of this node: run their checks, again while they fail, and leave files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpunode.config.effective import Config
from gpunode.engine import Engine
from gpunode.kubelet import engine_client
from gpunode.services.delivery_choice import DeliveryChoice
from gpunode.validation import (
    cluster_checks,
    container_checks,
    delivery_checks,
    node_checks,
    ready_files,
)
from gpunode.validation.cluster_checks import Cluster
from gpunode.validation.delivery_checks import Plan
from gpunode.validation.ready_files import ReadyFileError, ReadyFiles
from gpuruntime.cli.checks import run as check_runner
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import FAIL, Finding, Note
from gpuruntime.cli.checks.run import Check

DRIVER, TOOLKIT, CUDA, PLUGIN = "driver", "toolkit", "cuda", "plugin"
DELIVERY, DRA, RUNTIME_CLASS = "delivery", "dra", "runtime-class"
COMPONENTS = (
    *(DRIVER, TOOLKIT, CUDA, DELIVERY, PLUGIN, DRA, RUNTIME_CLASS),
    *node_checks.FEATURES,
)
# Those that ask the API server, and those of them that every node has.
OF_CLUSTER = (PLUGIN, DRA, RUNTIME_CLASS)
_USUAL_OF_CLUSTER = (PLUGIN, DRA)
# More than the deadlines within the checks, so that their own messages are printed.
_DEADLINE_S = 110.0


def default_components(*, has_node: bool) -> tuple[str, ...]:
    """Return the components that every node has; *has_node*: the name of the node is set."""
    components = (DRIVER, TOOLKIT, CUDA, DELIVERY)
    return (*components, *_USUAL_OF_CLUSTER) if has_node else components


def checks_of(names: Sequence[str], cluster: Cluster | None, config: Config) -> dict[str, Check]:
    """Return the checks of the components *names*.

    *cluster* is not None if one of OF_CLUSTER is among them. *config* is that of the device
    plugin.
    """
    table: dict[str, Check] = {
        DRIVER: node_checks.driver,
        TOOLKIT: container_checks.toolkit,
        CUDA: container_checks.cuda,
        DELIVERY: lambda machine: delivery_checks.delivery(machine, _plan(machine, config)),
    }
    table |= {name: node_checks.feature(name) for name in node_checks.FEATURES}
    if cluster is not None:
        table[PLUGIN] = lambda _: cluster_checks.plugin(cluster)
        table[DRA] = lambda machine: cluster_checks.dra(cluster, _engine(machine, config))
        table[RUNTIME_CLASS] = lambda machine: _runtime_class(machine, cluster)
    return {name: table[name] for name in names}


def _runtime_class(machine: ExaminedMachine, cluster: Cluster) -> Iterator[Note]:
    """Check the RuntimeClasses against the engine that a kubelet uses."""
    engine = container_checks.kubernetes_engine(machine)
    if engine is None:
        return cluster_checks.runtime_class(cluster, "", (), "")
    names = container_checks.names_of_gpu_runtimes(engine)
    return cluster_checks.runtime_class(cluster, engine.name, names, engine.default)


class Validation:
    """The *checks* by component on *machine*; *files* is None if no ready files are written."""

    def __init__(
        self, checks: Mapping[str, Check], machine: ExaminedMachine, files: ReadyFiles | None
    ) -> None:
        self.checks = checks
        self.machine = machine
        self.files = files

    def run(
        self,
        wait_s: float = 0.0,
        interval_s: float = 5.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> list[Finding]:
        """Return the findings of all components, in the order of the checks.

        A component that fails is checked again for *wait_s* seconds; one that is valid is not.
        """
        end = clock() + wait_s
        findings: dict[str, Finding] = {}
        pending = dict(self.checks)
        try:
            while True:
                for finding in check_runner.run(pending, self.machine, _DEADLINE_S):
                    findings[finding.check] = self._noted(finding)
                pending = {
                    name: self.checks[name]
                    for name, finding in findings.items()
                    if finding.status == FAIL
                }
                if not pending or clock() + interval_s > end:
                    return [findings[name] for name in self.checks]
                sleep(interval_s)
        finally:
            container_checks.remove_cgroups(os.getpid())

    def _noted(self, finding: Finding) -> Finding:
        """Write or remove the ready file of *finding*, and return it, or what failed."""
        if self.files is None:
            return finding
        try:
            if finding.status == FAIL:
                self.files.remove(finding.check)
            elif finding.check == DRIVER:
                variables = ready_files.driver_variables(self.machine)
                text = "".join(f"{name}={value}\n" for name, value in variables.items())
                self.files.write(finding.check, text)
            else:
                self.files.write(finding.check)
        except ReadyFileError as error:
            return Finding(finding.check, FAIL, error.message, error.hint or "")
        return finding


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return *findings* as the document of `--json`."""
    return {
        "ok": all(finding.status != FAIL for finding in findings),
        "components": [
            {
                "name": finding.check,
                "status": finding.status,
                "sentence": finding.what,
                "action": finding.action,
            }
            for finding in findings
        ],
    }


def _plan(machine: ExaminedMachine, config: Config) -> Plan:
    """Return how the device plugin with *config* delivers devices here; asks the engine."""
    choice = DeliveryChoice(replace(config, cri_socket=_socket(machine, config)))
    asyncio.run(choice.make())
    return Plan(choice.strategies, choice.reason, choice.problems, config.pass_device_specs)


def _engine(machine: ExaminedMachine, config: Config) -> Engine | None:
    socket = _socket(machine, config)
    try:
        return asyncio.run(engine_client.ask([socket] if socket else []))
    except engine_client.EngineError:
        return None


def _socket(machine: ExaminedMachine, config: Config) -> str:
    """Return the socket of the configured engine, or the first of the host's; "" for none."""
    if config.cri_socket:
        return config.cri_socket
    return next(iter(engine_client.sockets_of(map(machine.path, engine_client.SOCKETS))), "")
