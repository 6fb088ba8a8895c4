# SPDX-License-Identifier: Apache-2.0
"""The node of the manager of MIG, in the agent: the child without rights asks the API server.

The manager is root, and has no HTTP client: its calls are requests to the child over a socket,
JSON in frames. The child answers them, and reports changes of the label of the config.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from gpunode.api.errors import ApiServerError
from gpunode.mig.node import Node, NodeView
from gpunode.services.relay import messages
from gpunode.watch import framing
from gpunode.watch.framing import FrameError
from gpuruntime.errors import GpuRuntimeError, bug

log = logging.getLogger(__name__)

# More than an object of the API server may have.
_MAX_ANSWER_BYTES = 2 << 20
# More than the child's client waits, and than the start of the child takes.
_DEADLINE_S = 30.0
_RETRY_S = 10.0
_HINT = "see the log of the agent"


class RemoteNode:
    """The agent's end: a node for one thread. To be made in the event loop that calls `serve`."""

    def __init__(self, *, deadline_s: float = _DEADLINE_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        self._connected = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._answer: asyncio.Future[Any] | None = None
        self._is_news = asyncio.Event()
        self._watch_error: ApiServerError | None = None

    async def serve(self, connection: socket.socket) -> None:
        """Pass requests on, until the child closes *connection* or sends what is not an answer."""
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._connected.set()
        try:
            async for message in messages(reader, _MAX_ANSWER_BYTES):
                self._take(message)
        except FrameError as error:
            log.error("the process without rights has sent what is not an answer: %s", error)
        finally:
            self._connected.clear()
            self._writer.close()
            self._writer = None
            self._resolve(ApiServerError("the process without rights has ended", _HINT))

    async def values(self) -> AsyncIterator[None]:
        """Yield at each change of the label; raise ApiServerError if it cannot be followed."""
        while True:
            await self._is_news.wait()
            self._is_news.clear()
            if self._watch_error is not None:
                raise self._watch_error
            yield

    def read(self) -> NodeView:
        """Return the node; raise ApiServerError."""
        answer = self._call("read")
        if isinstance(answer, dict) and answer.keys() == {"labels", "version", "uid"}:
            labels, version, uid = answer["labels"], answer["version"], answer["uid"]
            if isinstance(labels, dict) and _are_texts(*labels.values(), version, uid):
                return NodeView(labels, version, uid)
        raise _malformed()

    def set_labels(self, labels: Mapping[str, str], version: str) -> None:
        """Set *labels* of the node; raise ApiServerError, CONFLICT if it has another *version*."""
        self._call("set_labels", labels=dict(labels), version=version)

    def pods(self, apps: Sequence[str]) -> list[str]:
        """Return the pods of *apps* on the node that have not ended; raise ApiServerError."""
        answer = self._call("pods", apps=list(apps))
        if isinstance(answer, list) and _are_texts(*answer):
            return answer
        raise _malformed()

    def delete_pod(self, name: str) -> None:
        """Delete the pod *name*; raise ApiServerError."""
        self._call("delete_pod", name=name)

    def report(self, reason: str, message: str, uid: str, *, is_warning: bool = False) -> None:
        """Create an event of the node; raise ApiServerError."""
        self._call("report", reason=reason, message=message, uid=uid, is_warning=is_warning)

    def _call(self, operation: str, **arguments: Any) -> Any:  # noqa: ANN401 (JSON)
        """Return the result of *operation*, in the thread of the manager; raise ApiServerError."""
        asking = self._ask({"operation": operation, "arguments": arguments})
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop).result()
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            # The event loop ends, or has ended.
            asking.close()
            raise ApiServerError("the agent ends", "start it again") from error

    async def _ask(self, request: dict[str, Any]) -> Any:  # noqa: ANN401 (JSON)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._connected.wait()
                assert self._writer is not None
                self._number += 1
                self._answer = self._loop.create_future()
                self._writer.write(framing.encode({"number": self._number, **request}))
                return await self._answer
        except TimeoutError as error:
            raise ApiServerError("the process without rights does not answer", _HINT) from error

    def _take(self, message: object) -> None:
        """Note *message* of the child, which parses what others send; raise FrameError."""
        if not isinstance(message, dict):
            raise FrameError("not an object")
        if list(message) == ["changed"] and message["changed"] is True:
            self._note_watch(None)
        elif list(message) == ["watch_error"]:
            self._note_watch(_error(message["watch_error"]))
        elif list(message) == ["number", "error"]:
            error = _error(message["error"])
            if message["number"] == self._number:
                self._resolve(error)
        elif list(message) == ["number", "result"]:
            if message["number"] == self._number:
                self._resolve(message["result"])
        else:
            raise FrameError("an unknown message")

    def _note_watch(self, error: ApiServerError | None) -> None:
        self._watch_error = error
        self._is_news.set()

    def _resolve(self, result: object) -> None:
        """End the request that waits, if any: raise *result* there if it is an error."""
        if self._answer is None or self._answer.done():
            return
        if isinstance(result, ApiServerError):
            self._answer.set_exception(result)
        else:
            self._answer.set_result(result)


class NodeServer:
    """The child's end of *connection*.

    *node* returns the node or raises ApiServerError, and so does *values*, which yields the values
    of the label.
    """

    def __init__(
        self,
        connection: socket.socket,
        node: Callable[[], Node],
        values: Callable[[], AsyncIterator[str | None]],
    ) -> None:
        self._connection = connection
        self._node = node
        self._values = values

    async def serve(self) -> None:
        """Answer requests, and report changes of the label, until the agent ends."""
        reader, writer = await asyncio.open_connection(sock=self._connection)
        watching = asyncio.create_task(self._watch(writer))
        try:
            async for request in messages(reader):
                writer.write(framing.encode(await asyncio.to_thread(self._answer, request)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            writer.close()

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        number = request["number"]
        try:
            result = getattr(self._node(), request["operation"])(**request["arguments"])
        except GpuRuntimeError as error:
            return {"number": number, "error": _plain(error)}
        except Exception as error:  # noqa: BLE001 (the manager reports it)
            return {"number": number, "error": _plain(bug(error))}
        if isinstance(result, NodeView):
            labels = dict(result.labels)
            result = {"labels": labels, "version": result.version, "uid": result.uid}
        return {"number": number, "result": result}

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                async for _ in self._values():
                    writer.write(framing.encode({"changed": True}))
            except GpuRuntimeError as error:
                writer.write(framing.encode({"watch_error": _plain(error)}))
            await asyncio.sleep(_RETRY_S)


def _plain(error: GpuRuntimeError) -> list[Any]:
    return [error.message, error.hint or "", getattr(error, "status", 0)]


def _error(plain: object) -> ApiServerError:
    """Return the error of *plain*; raise FrameError."""
    if isinstance(plain, list) and [type(part) for part in plain] == [str, str, int]:
        message, hint, status = plain
        return ApiServerError(message, hint or None, status)
    raise FrameError("not an error")


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _malformed() -> ApiServerError:
    return ApiServerError("the process without rights has sent a wrong answer", _HINT)
