# SPDX-License-Identifier: Apache-2.0
"""How many requests a node makes, by the real clients, and what 5,000 nodes make of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from node.fake_api_server import FakeApiServer
from node.fake_kubelet import until
from node.virtual_time import VirtualLoop, run
from unit.gpunode.nodes import gpu

from gpunode.api import node_watch
from gpunode.api.client import connect, connect_async
from gpunode.api.errors import ApiServerError
from gpunode.api.node_labels import NodeFeature, NodeLabels
from gpunode.api.node_view import NodeView
from gpunode.config.effective import Config
from gpunode.labels import Machine
from gpunode.model import DriverState, DriverStatus, NodeModel, Update
from gpunode.services.back_off import BackOff
from gpunode.services.feature_discovery import FeatureDiscovery

NODES, HOUR_S = 5000, 3600
PATIENCE_S = 20
PAGE = Path(__file__).resolve().parents[3] / "docs/kubernetes/scale.md"
NODE = "/api/v1/nodes/one"
FEATURE = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gpu-node/nodefeatures/nvidia-features-for-one"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
EMPTY = {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": []}
KINDS = {
    NODE: "nodes",
    FEATURE: "nodefeatures",
    SLICES: "resourceslices",
    CLASSES: "runtimeclasses",
}
OBJECTS: dict[str, Any] = {
    NODE: {"kind": "Node", "metadata": {"name": "one", "resourceVersion": "1"}, "status": {}},
    FEATURE: {"kind": "NodeFeature", "metadata": {"name": "nvidia-features-for-one"}},
    SLICES: EMPTY,
    CLASSES: EMPTY,
}
BUSY = {"kind": "Status", "message": "too many requests", "code": 429, "retryAfter": "1"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[FakeApiServer, str]]:
    """Yield an API server and a file that names it."""
    server = FakeApiServer(OBJECTS)
    with server.config(tmp_path / "kubeconfig") as path:
        yield server, str(path)


@dataclass
class Script:
    """A driver whose GPUs change at *times*, in seconds."""

    loop: VirtualLoop
    times: tuple[float, ...] = ()
    current: Update = field(default_factory=lambda: of_gpus(2))

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the state, and the next one at each time."""
        yield self.current
        for number, at in enumerate(self.times):
            await asyncio.sleep(at - self.loop.time())
            self.current = of_gpus(1 + number % 2)
            yield self.current
        await asyncio.Event().wait()


def of_gpus(number: int) -> Update:
    """Return the state of a driver with so many GPUs."""
    model = NodeModel("550.1", "12.4", tuple(gpu(index) for index in range(number)))
    return Update(DriverStatus(DriverState.READY, 0.0), model)


def discover(
    publisher: NodeLabels | NodeFeature,
    *,
    times: tuple[float, ...] = (),
    calls: Mapping[float, Callable[[], object]] | None = None,
) -> None:
    """Run feature discovery for an hour of virtual time; *calls* are by their times."""

    async def work(loop: VirtualLoop) -> None:
        @contextlib.asynccontextmanager
        async def watch(_: object) -> AsyncIterator[Script]:
            yield Script(loop, times)

        service = FeatureDiscovery(
            Config,
            [publisher],
            watch=watch,
            read_machine=Machine,
            clock=loop.time,
            back_off=BackOff(10, 600, draw=random.Random(1).random),
        )
        for time, call in (calls or {}).items():
            loop.call_at(time, call)
        loop.call_at(HOUR_S, service.turns.stop)
        await service.serve()

    run(work)


def kinds(server: FakeApiServer) -> dict[str, int]:
    """Return the numbers of requests, by method and kind of object."""
    paths = (path.partition("?")[0] for _, path, _ in server.requests)
    methods = (method for method, _, _ in server.requests)
    return Counter(f"{method} {KINDS[path]}" for method, path in zip(methods, paths, strict=True))


def documented(event: str) -> list[str]:
    """Return the cells of the row *event* of the page, after its first."""
    rows = re.findall(rf"(?m)^\| {re.escape(event)} \|(.*)\|$", PAGE.read_text())
    (row,) = rows
    return [cell.strip() for cell in row.split("|")]


def row(requests: Mapping[str, int]) -> list[str]:
    """Return the cells of the page for the *requests* of one node."""
    each = ", ".join(f"{number} {kind}" for kind, number in sorted(requests.items()))
    return [each or "0", f"{NODES * sum(requests.values()):,}"]


def test_an_hour_of_feature_discovery_is_one_request(
    server: tuple[FakeApiServer, str],
) -> None:
    """The labels of each minute are the same, and what is the same is not published again."""
    fake, config = server
    discover(NodeLabels(connect(config), "one"))
    assert row(kinds(fake)) == documented("start of feature discovery, and an hour")


def test_node_features_cost_the_same(server: tuple[FakeApiServer, str]) -> None:
    """One request for the object, by which it is created too."""
    fake, config = server
    discover(NodeFeature(connect(config), "one", "gpu-node"))
    assert row(kinds(fake)) == documented("the same with NodeFeature objects")


def test_each_change_of_the_gpus_is_one_request(server: tuple[FakeApiServer, str]) -> None:
    """Besides that of the start."""
    fake, config = server
    discover(NodeLabels(connect(config), "one"), times=(100, 200, 300))
    changes = {kind: number - 1 for kind, number in kinds(fake).items()}
    assert changes == {"PATCH nodes": 3}
    assert documented("a change of the GPUs or MIG devices") == row({"PATCH nodes": 1})


def test_a_validation(server: tuple[FakeApiServer, str]) -> None:
    """What the components ask of the API server."""
    fake, config = server
    view = NodeView(lambda: connect(config), "one")
    # plugin; dra, which asks for both; runtime-class.
    for ask in (view.units, view.units, view.dra_devices, view.runtime_classes):
        ask()
    assert row(kinds(fake)) == documented("`gpu-node validate`, all components of the cluster")


def test_an_outage_is_repeated_with_growing_delays(server: tuple[FakeApiServer, str]) -> None:
    """The server refuses for ten minutes, and takes the labels at the next attempt."""
    fake, config = server
    fake.objects[NODE] = BUSY
    attempts = []

    def recover() -> None:
        attempts.append(len(fake.requests))
        fake.objects[NODE] = OBJECTS[NODE]

    discover(NodeLabels(connect(config), "one"), calls={600: recover})
    assert 5 <= attempts[0] <= 8
    assert len(fake.requests) == attempts[0] + 1


def fleet(draw: Callable[[int], Callable[[], float]]) -> list[float]:
    """Return the times of all requests of the nodes in ten minutes in which the server refuses."""
    times = []
    for node in range(NODES):
        back_off = BackOff(10, 600, draw=draw(node))
        time = 0.0
        while time < 600:
            times.append(time)
            time += 1.0 + back_off.delay(0.0)
    return times


def busiest(times: list[float], span_s: float) -> int:
    """Return the most requests within a span, of those after the first."""
    return max(Counter(int(time // span_s) for time in times if time > 0).values())


def test_a_fleet_is_spread_after_a_failure() -> None:
    """All nodes fail at the same time, and never come back at the same time."""
    times = fleet(lambda node: random.Random(node).random)
    assert busiest(times, 1) < NODES / 4
    a_minute = busiest(times, 60)
    budget = int(documented("refused by the server, the busiest minute")[1].replace(",", ""))
    assert a_minute <= budget < 1.2 * a_minute
    # The control: without randomness, all of them in one second.
    assert busiest(fleet(lambda _: lambda: 1.0), 1) == NODES


@pytest.mark.parametrize(
    ("document", "seconds"),
    [
        (BUSY, 1.0),
        ({**BUSY, "retryAfter": "99999"}, 300.0),
        ({**BUSY, "retryAfter": "Sun, 29 Nov"}, 0.0),
        ({"kind": "Status", "message": "down", "code": 503}, 0.0),
        ({**BUSY, "type": "text/plain"}, 1.0),
    ],
)
def test_what_the_server_asks_for_is_kept(
    server: tuple[FakeApiServer, str], document: dict[str, Any], seconds: float
) -> None:
    """As far as it is a number of seconds; an overloaded server answers with plain text."""
    fake, config = server
    fake.objects[NODE] = document
    with pytest.raises(ApiServerError) as raised:
        NodeLabels(connect(config), "one").publish({})
    assert (raised.value.status, raised.value.retry_after_s) == (document["code"], seconds)


def test_a_success_makes_the_delays_short_again() -> None:
    """And they never exceed the longest, however long the outage is."""
    back_off = BackOff(10, 600)
    delays = [back_off.delay(0.0) for _ in range(2000)]
    assert delays[:4] == [10, 20, 40, 80]
    assert delays[-1] == 600
    back_off.reset()
    assert back_off.delay(0.0) == 10


# The client is cancelled wherever it is, also while it connects.
@pytest.mark.filterwarnings("ignore:coroutine 'connect_tcp:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_following_the_label_of_the_node(server: tuple[FakeApiServer, str]) -> None:
    """One read, and a watch after the other, each ended at a time that is another on each node."""
    fake, config = server
    fake.ends_watches = True
    spans = set()

    async def follow() -> None:
        async for _ in node_watch.label_values(connect_async(config), "one", "nvidia.com/a"):
            pass

    def methods() -> list[str]:
        return [method for method, _, _ in list(fake.requests)]

    async def follow_two_watches() -> None:
        task = asyncio.create_task(follow())
        await until(lambda: "GET" in methods() and methods().count("WATCH") > 1, PATIENCE_S)
        task.cancel()
        await asyncio.wait({task})

    for _ in range(3):
        # A watch of the turn before may still arrive.
        fake.requests.clear()
        asyncio.run(follow_two_watches())
        assert methods().count("GET") == 1
        assert set(methods()) == {"GET", "WATCH"}
        watches = [path for method, path, _ in fake.requests if method == "WATCH"]
        spans |= {int(re.findall(r"timeoutSeconds=(\d+)", path)[0]) for path in watches}
    assert len(spans) > 1
    assert min(spans) >= 300
    assert max(spans) <= 600
    requests = row({"GET nodes": 1, "WATCH nodes": HOUR_S // 450})
    assert requests == documented("following the label of the node, an hour")
