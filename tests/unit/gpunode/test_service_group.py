# SPDX-License-Identifier: Apache-2.0
"""Services of one process: the end of one, its restart, and the state of all."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from gpunode.services import agent_page
from gpunode.services.back_off import BackOff
from gpunode.services.config_choice import NotChosenError
from gpunode.services.healthz import Report
from gpunode.services.service_group import Service, ServiceGroup
from gpunode.services.turns import Turns
from gpuruntime.errors import ConfigError, GpuRuntimeError


class Steady:
    """A service that ends with *error* as soon as it is served, or when it is stopped."""

    def __init__(self, error: Exception | None = None) -> None:
        self.turns = Turns()
        self.error = error

    async def serve(self) -> None:
        """Serve."""
        if self.error is not None:
            raise self.error
        await self.turns.stopped()

    def report(self) -> Report:
        """Return a state of its own."""
        return Report((), {"own": 1})


async def until(condition: Callable[[], object]) -> None:
    """Wait until *condition* is true."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError


def play(group: ServiceGroup, scenario: Callable[[], Any]) -> None:
    """Run *scenario* while the group serves."""

    async def run() -> None:
        task = asyncio.create_task(group.serve())
        await scenario()
        group.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(run())


def test_a_service_that_ends_does_not_end_the_others() -> None:
    """It is named with its error, a bug too; a reload starts it again at once."""
    services: list[Service] = [Steady(GpuRuntimeError("no")), Steady(ValueError("x")), Steady()]
    group = ServiceGroup({"ends": lambda: services.pop(0), "steady": Steady})

    def names(problem: str) -> bool:
        return any(problem in reason for reason in group.reports()["ends"].reasons)

    async def scenario() -> None:
        for problem in ("runtime: no", "this is a bug: ValueError"):
            await until(functools.partial(names, problem))
            assert group.reports()["steady"] == Report((), {"own": 1, "restarts": 0})
            group.reload()
        await until(lambda: not (group.reports()["ends"].reasons))
        details = group.reports()["ends"].details
        assert (details["own"], details["restarts"]) == (1, 2)
        assert "ValueError" in details["last_end"]

    play(group, scenario)


def test_a_service_without_a_config_waits_for_its_choice() -> None:
    """Which is no failure: it is not counted as a restart."""
    errors = [NotChosenError("not yet"), None]

    def make() -> Service:
        error = errors.pop(0)
        if error is not None:
            raise error
        return Steady()

    group = ServiceGroup({"waits": make})

    async def scenario() -> None:
        await until(lambda: group.reports()["waits"].reasons == ("configuration: not yet",))
        group.reload()
        await until(lambda: not (group.reports()["waits"].reasons))
        assert group.reports()["waits"].details == {"own": 1, "restarts": 0}

    play(group, scenario)


def test_an_error_at_start_is_raised() -> None:
    """Before a service is served."""

    def make() -> Service:
        raise ConfigError("a key")

    with pytest.raises(ConfigError, match="a key"):
        ServiceGroup({"a": make}).prepare()


def test_delays_grow_and_begin_again() -> None:
    """What has worked for a while is started again soon."""
    back_off = BackOff(1, 4, 60)
    assert [back_off.delay(0) for _ in range(4)] == [1, 2, 4, 4]
    assert [back_off.delay(60), back_off.delay(1)] == [1, 2]


def test_the_page_of_the_agent_names_the_service() -> None:
    """Of both processes; an agent that does not answer is not live."""
    services = {"plugin": {"reasons": ["no kubelet"], "details": {"restarts": 3}}}
    state = {
        "services": services,
        "processes": {"unprivileged": {"restarts": 2, "last_end": "signal 9"}},
        "config": {"path": "/c", "problem": "a name"},
        "reloads": 1,
        "usage": {"bytes": 5, "cpu_s": 0.5},
    }
    reports = {"exporter": Report(("no pods",), {"restarts": 1})}
    report = agent_page.merged(state, reports)
    assert report.reasons == ("config: a name", "exporter: no pods", "plugin: no kubelet")
    assert report.details["services"]["plugin"] == {"ready": False, "restarts": 3}
    assert report.details["processes"]["unprivileged"]["last_end"] == "signal 9"
    values = {family.metric.name: family.samples for family in agent_page.families(state, reports)}
    assert {labels["name"]: value for labels, value in values["gpu_node_restarts"]} == {
        "exporter": 1,
        "plugin": 3,
        "unprivileged": 2,
    }
    assert values["gpu_node_reloads"] == (({}, 1.0),)

    silent = agent_page.merged(None, reports)
    assert not silent.is_live
    assert silent.reasons == ("the process of the agent that is root does not answer",)
