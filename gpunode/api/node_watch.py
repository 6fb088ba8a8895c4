# SPDX-License-Identifier: Apache-2.0
"""Follow a label of the node in the API server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

from lightkube import AsyncClient
from lightkube.resources.core_v1 import Node

from gpunode.api import client as api
from gpunode.api.errors import GoneError

# The API server ends a watch after this time to twice of it, so that watches that began together
# do not end together. One that is silent for longer is dead.
_WATCH_S = 300
_SILENCE_S = 2 * _WATCH_S + 30.0
# Between two watches, should the server end them at once.
_PAUSE_S = 1.0


async def label_values(client: AsyncClient, name: str, label: str) -> AsyncIterator[str | None]:
    """Yield the value of *label* of the node *name* now and after each change, None without it.

    Raises ApiServerError.
    """
    what = f'read the node "{name}"'
    last: tuple[str | None] | None = None
    while True:
        with api.request(what, api.NODE_HINT):
            node = await client.get(Node, name)
        version = node.metadata.resourceVersion if node.metadata else None
        events = client.watch(
            Node,
            fields={"metadata.name": name},
            resource_version=version,
            server_timeout=round(_WATCH_S * (1 + random.random())),  # noqa: S311 (no secret)
        )
        watch = aiter(events)
        while True:
            value = _value(node, label)
            if last != (value,):
                last = (value,)
                yield value
            try:
                with api.request(what, api.NODE_HINT):
                    next_node = await _next(watch)
            except GoneError:
                break
            if next_node is None:
                break
            node = next_node
        await asyncio.sleep(_PAUSE_S)


async def _next(watch: AsyncIterator[tuple[str, Node]]) -> Node | None:
    """Return the node after its next change, None at the end of the watch."""
    try:
        async with asyncio.timeout(_SILENCE_S):
            _, node = await anext(watch)
    except (TimeoutError, StopAsyncIteration):
        return None
    return node


def _value(node: Node, label: str) -> str | None:
    labels = (node.metadata.labels if node.metadata else None) or {}
    return labels.get(label)
