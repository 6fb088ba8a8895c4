# SPDX-License-Identifier: Apache-2.0
"""The probes of the agent, and its own metrics, served by its child without rights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpunode import exposition
from gpunode.metric_table import COUNTER, GAUGE, Metric
from gpunode.metrics import Family
from gpunode.services.agent import CHILD, usage
from gpunode.services.healthz import Report, live_answer, ready_answer
from gpunode.services.http_server import Answer, HttpServer
from gpunode.services.relay import ClientEnd
from gpunode.services.turns import Turns

_SOURCE = "gpu-node"
_READY = Metric("gpu_node_service_ready", GAUGE, "1 if the service does all of its work.", _SOURCE)
_RESTARTS = Metric(
    "gpu_node_restarts", COUNTER, "Times that a service or process was started again.", _SOURCE
)
_RELOADS = Metric("gpu_node_reloads", COUNTER, "Times that configs were read again.", _SOURCE)
_MEMORY = Metric(
    "gpu_node_resident_memory_bytes", GAUGE, "Resident memory of a process of the agent.", _SOURCE
)
_CPU = Metric("gpu_node_cpu_seconds", COUNTER, "CPU time of a process of the agent.", _SOURCE)


class AgentPage:
    """The service, at the address *healthz*: the agent's state over *link*, and that of here."""

    def __init__(
        self, healthz: str, link: ClientEnd, reports: Callable[[], Mapping[str, Report]]
    ) -> None:
        self.link = link
        self.reports = reports
        self.turns = Turns()
        self.server = HttpServer(
            healthz,
            "healthz",
            {
                "/livez": self._live,
                "/healthz": self._live,
                "/readyz": self._ready,
                "/metrics": self._metrics,
            },
        )

    async def serve(self) -> None:
        """Serve until `turns` ends; raise HttpError."""
        async with self.server:
            await self.turns.stopped()

    def report(self) -> Report:
        """Return the state of the service: it has none that its page could not show."""
        return Report()

    async def _live(self) -> Answer:
        return live_answer(merged(await self._state(), self.reports()))

    async def _ready(self) -> Answer:
        return ready_answer(merged(await self._state(), self.reports()))

    async def _metrics(self) -> Answer:
        text = exposition.text(families(await self._state(), self.reports()))
        return Answer(text, exposition.CONTENT_TYPE)

    async def _state(self) -> dict[str, Any] | None:
        """Return the state of the agent, None if it does not answer."""
        try:
            return await self.link.report()
        except TimeoutError:
            return None


def merged(state: Mapping[str, Any] | None, reports: Mapping[str, Report]) -> Report:
    """Return the report of all services; reasons begin with the name of their service.

    *state* is that of the agent, None if it does not answer; *reports* are those of the child.
    """
    all_reports = dict(reports)
    if state is None:
        reason = "the process of the agent that is root does not answer"
        return Report((reason,), {"services": _services(all_reports)}, is_live=False)
    all_reports.update(_of_agent(state))
    problem = state["config"]["problem"]
    reasons = [f"config: {problem}"] if problem else []
    for name, report in sorted(all_reports.items()):
        reasons += [f"{name}: {reason}" for reason in report.reasons]
    details = {
        "services": _services(all_reports),
        "processes": state["processes"],
        "config": state["config"],
    }
    return Report(tuple(reasons), details)


def _of_agent(state: Mapping[str, Any]) -> dict[str, Report]:
    return {
        name: Report(tuple(service["reasons"]), service["details"])
        for name, service in state["services"].items()
    }


def _services(reports: Mapping[str, Report]) -> dict[str, Any]:
    return {
        name: {"ready": report.is_ready, **report.details}
        for name, report in sorted(reports.items())
    }


def families(state: Mapping[str, Any] | None, reports: Mapping[str, Report]) -> tuple[Family, ...]:
    """Return the metrics of the agent."""
    all_reports = {**reports, **(_of_agent(state) if state else {})}
    ready = tuple(
        ({"service": name}, float(report.is_ready)) for name, report in sorted(all_reports.items())
    )
    restarts = {name: report.details.get("restarts", 0) for name, report in all_reports.items()}
    usages = {CHILD: usage()}
    result = [Family(_READY, ready)]
    if state is not None:
        restarts |= {name: process["restarts"] for name, process in state["processes"].items()}
        usages["agent"] = state["usage"]
        result.append(Family(_RELOADS, (({}, float(state["reloads"])),)))
    result.append(
        Family(_RESTARTS, tuple(({"name": n}, float(c)) for n, c in sorted(restarts.items())))
    )
    for metric, key in ((_MEMORY, "bytes"), (_CPU, "cpu_s")):
        samples = tuple(({"process": n}, float(u[key])) for n, u in sorted(usages.items()))
        result.append(Family(metric, samples))
    return tuple(result)
