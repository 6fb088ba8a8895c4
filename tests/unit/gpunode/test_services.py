# SPDX-License-Identifier: Apache-2.0
"""Probes, log lines, and where the driver is here and on the host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from node.ports import free_port

from gpunode import service_log
from gpunode.config.effective import Config
from gpunode.plugin_spec import Roots
from gpunode.services import spec_files, standalone
from gpunode.services.healthz import Report, probe_server
from gpunode.services.http_server import HttpError, address
from gpunode.services.turns import Turns
from gpuruntime.errors import ArgumentError


def _replies(report: Report, *requests: bytes) -> list[tuple[str, str]]:
    """Return status and body of the reply to each of *requests*; "" if there is none."""

    async def ask() -> list[tuple[str, str]]:
        server = probe_server("127.0.0.1:0", lambda: report)
        await server.start()
        replies = []
        for request in requests:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request)
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
            replies.append((head.split("\r\n")[0].removeprefix("HTTP/1.1 "), body))
            writer.close()
        await server.close()
        return replies

    return asyncio.run(ask())


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def test_a_service_that_is_not_ready_says_why() -> None:
    """The kubelet looks at the status, people at the body."""
    report = Report(("the driver is absent",), {"driver": "absent"})
    paths = ("/livez", "/healthz", "/readyz", "/readyz?verbose", "/other")
    replies = _replies(report, *map(_get, paths))
    assert [status for status, _ in replies] == [
        *("200 OK", "200 OK", "503 Service Unavailable", "503 Service Unavailable"),
        "404 Not Found",
    ]
    assert json.loads(replies[2][1]) == {
        "live": True,
        "ready": False,
        "reasons": ["the driver is absent"],
        "driver": "absent",
    }


def test_a_service_that_is_ready() -> None:
    """Without a reason against it."""
    ((status, body),) = _replies(Report(), _get("/readyz"))
    assert (status, json.loads(body)["ready"]) == ("200 OK", True)


def test_requests_that_are_none() -> None:
    """They get a status or nothing, and the next request an answer."""
    replies = _replies(
        Report(),
        b"POST /readyz HTTP/1.1\r\n\r\n",
        b"x" * 20000,
        b"\r\n\r\n",
        _get("/livez"),
        b"HEAD /livez HTTP/1.1\r\n\r\n",
    )
    assert [status for status, _ in replies] == [
        *("405 Method Not Allowed", "", "405 Method Not Allowed", "200 OK", "200 OK"),
    ]
    assert replies[4][1] == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":8081", ("", 8081)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    """The forms of other programs."""
    assert address(text, "--healthz") == expected


@pytest.mark.parametrize("text", ["", "8081", "a:b", ":99999", "[::1", "::1:80", "a:1 "])
def test_what_is_no_address(text: str) -> None:
    """A wrong use of the option."""
    with pytest.raises(ArgumentError, match="not an address"):
        address(text, "--healthz")


def test_an_address_that_is_in_use() -> None:
    """Two services with one address."""

    async def start() -> None:
        first = probe_server("127.0.0.1:0", Report)
        await first.start()
        try:
            await probe_server(f"127.0.0.1:{first.port}", Report).start()
        finally:
            await first.close()

    with pytest.raises(HttpError, match="cannot listen on"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        (
            "text",
            'time="1970-01-01T00:00:01Z" level=warning msg="a \\"b\\"; hint: \\\\xc3\\\\xa9"',
        ),
        (
            "json",
            r"""{"level":"warning","msg":"a \"b\"; hint: \\xc3\\xa9","time":"1970-01-01T00:00:01Z"}""",  # noqa: E501
        ),
    ],
)
def test_a_record_is_one_line_of_ascii(format_: str, expected: str) -> None:
    """What a pod sends must not forge a line."""
    record = logging.LogRecord("gpunode", logging.WARNING, "", 0, 'a "%s"\nhint: é', ("b",), None)
    record.created = 1.0
    line = service_log.LineFormatter(format_).format(record)
    assert line.replace(": ", ":").replace(", ", ",") == expected.replace(": ", ":")


def test_a_record_of_an_exception_names_it() -> None:
    """A traceback would be many lines."""
    try:
        raise ValueError("x")  # noqa: TRY301
    except ValueError as error:
        record = logging.LogRecord(
            "gpunode", logging.ERROR, "", 0, "failed", (), (type(error), error, None)
        )
    assert "failed: ValueError('x')" in service_log.LineFormatter("text").format(record)


@pytest.mark.parametrize(
    ("config", "existing", "expected"),
    [
        (Config(), (), Roots("/", "/", "/", "/")),
        (Config(), ("/driver-root",), Roots("/driver-root", "/", "/", "/")),
        (
            Config(),
            ("/driver-root", "/driver-root/dev/nvidiactl"),
            Roots("/driver-root", "/", "/driver-root", "/"),
        ),
        (
            Config(nvidia_driver_root="/run/d", nvidia_dev_root="/"),
            (),
            Roots("/run/d", "/run/d", "/", "/"),
        ),
        (
            Config(
                nvidia_driver_root="/run/d", nvidia_dev_root="/run/d", container_driver_root="/x"
            ),
            ("/x/dev/nvidiactl",),
            Roots("/x", "/run/d", "/x", "/run/d"),
        ),
    ],
)
def test_the_roots_here_and_on_the_host(
    config: Config, existing: Collection[str], expected: Roots
) -> None:
    """In a container and beside the kubelet."""
    assert spec_files.roots(config, existing.__contains__) == expected


@pytest.mark.parametrize(
    ("config", "existing", "expected"),
    [
        (Config(nvidia_cdi_hook_path="/h"), (), "/h"),
        (Config(), (), "/usr/bin/gpu-cdi-hook"),
        (Config(), ("/opt/bin/gpu-cdi-hook",), "/opt/bin/gpu-cdi-hook"),
        # In a container, what is beside this program is not on the host.
        (Config(), ("/driver-root", "/opt/bin/gpu-cdi-hook"), "/usr/bin/gpu-cdi-hook"),
    ],
)
def test_the_hook_on_the_host(
    config: Config,
    existing: Collection[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The spec names it by the path that the engine uses."""
    monkeypatch.setattr("sys.argv", ["/opt/bin/gpu-node"])
    assert spec_files.hook_path(config, existing.__contains__) == expected


class _Service:
    """A service that serves until its turns end."""

    def __init__(self) -> None:
        self.turns = Turns()

    async def serve(self) -> None:
        await self.turns.stopped()

    def report(self) -> Report:
        return Report(("it waits",))


def test_a_service_alone_has_probes_until_a_signal() -> None:
    """Afterwards nothing listens at the address."""
    port = free_port()

    async def play() -> bytes:
        running = asyncio.create_task(standalone.run(_Service(), f"127.0.0.1:{port}"))
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                await asyncio.sleep(0.01)
            writer.write(_get("/readyz"))
            reply = await reader.read()
            writer.close()
            os.kill(os.getpid(), signal.SIGTERM)
            await running
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        return reply

    reply = asyncio.run(play())
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b'"it waits"' in reply


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["device-plugin"],
        ["mps-daemon"],
        ["feature-discovery", "--use-node-feature-api=false"],
        ["exporter", "--kubernetes=false"],
    ],
)
def test_a_command_hands_on_the_address_of_its_probes(command: list[str], tmp_path: Path) -> None:
    """The driver is not asked before the address is checked."""
    program = "from gpunode.cli.main import main; main()"
    options = [f"--nvidia-driver-root={tmp_path}", "--healthz=nowhere"]
    done = subprocess.run(
        [sys.executable, "-c", program, *command, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert '--healthz is "nowhere", not an address' in done.stderr
