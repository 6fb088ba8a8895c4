# SPDX-License-Identifier: Apache-2.0
"""The config manager: a symlink by the node's label, and a signal to the plugin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node.fake_api_server import FakeApiServer
from node.ports import free_port
from node.test_agent import NODE, node

from gpunode.services.config_manager import is_called

PATIENCE_S = 30
# Writes a line for each SIGHUP.
PLUGIN = (
    "import signal, sys\n"
    "signal.signal(signal.SIGHUP, lambda *_: print('reload', flush=True))\n"
    "print('ready', flush=True)\n"
    "while True: signal.pause()\n"
)


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """Return a directory with two configs."""
    directory = tmp_path / "configs"
    directory.mkdir()
    for name in ("a", "default"):
        (directory / name).write_text("")
    return directory


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that is called as no other program is."""
    program = tmp_path / f"plugin-{os.getpid()}"
    program.write_text(PLUGIN)
    command = [sys.executable, str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def command(tmp_path: Path, configs: Path, *options: str) -> list[str]:
    """Return the command line of the config manager."""
    program = "import sys; from gpunode.cli.main import main; sys.argv[0] = 'gpu-node'; main()"
    return [
        *(sys.executable, "-c", program, "config-manager", f"--kubeconfig={tmp_path}/kube"),
        *(f"--config-file-srcdir={configs}", f"--config-file-dst={tmp_path}/config"),
        *("--fallback-strategies=named,single", *options),
    ]


def until(condition: Callable[[], object]) -> None:
    """Wait until *condition* is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_symlink_follows_the_label(
    tmp_path: Path, configs: Path, plugin: subprocess.Popen[str]
) -> None:
    """With a signal after each change; a wrong name changes nothing, and is reported."""
    server = FakeApiServer({NODE: node("a")})
    link, port = tmp_path / "config", free_port()
    name = f"--process-to-signal=plugin-{os.getpid()}"
    options = (name, "--node-name=n1", f"--healthz=127.0.0.1:{port}")

    def report() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    with server.config(tmp_path / "kube"):
        process = subprocess.Popen(command(tmp_path, configs, *options))
        try:
            assert plugin.stdout is not None
            assert plugin.stdout.readline() == "reload\n"
            assert os.readlink(link) == f"{configs}/a"
            server.change(NODE, node("b"))
            until(lambda: not report()["ready"])
            assert report()["reasons"] == [
                'the label of the node names the config "b", which does not exist'
            ]
            assert os.readlink(link) == f"{configs}/a"
            server.change(NODE, node(None))
            assert plugin.stdout.readline() == "reload\n"
            assert os.readlink(link) == f"{configs}/default"
            assert report()["ready"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("label", "options", "error"),
    [
        ("a", ("--node-name=n1",), ""),
        ("b", ("--node-name=n1",), "error: configuration: the label of the node names the config"),
        ("a", ("--node-name=n2",), 'error: kubernetes: cannot read the node "n2"'),
        ("a", (), "error: configuration: the name of the node is empty"),
        ("a", ("--node-name=n1", "--fallback-strategies=x"), '"x" is not a fallback strategy'),
        ("a", ("--node-name=n1", "--config-file-dst=/proc/x"), 'make the symlink "/proc/x"'),
    ],
)
def test_once(
    tmp_path: Path, configs: Path, label: str, options: tuple[str, ...], error: str
) -> None:
    """As an init container does, which an error ends."""
    with FakeApiServer({NODE: node(label)}).config(tmp_path / "kube"):
        done = subprocess.run(
            command(tmp_path, configs, "--oneshot", "--send-signal=false", *options),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert (done.returncode == 0) == (not error), done.stderr
    assert error in done.stderr
    assert (tmp_path / "config").is_symlink() == (not error)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "comm", "arguments", "expected"),
    [
        ("nvidia-device-plugin", "nvidia-device-p", ["x"], True),
        ("nvidia-device-plugin", "python3", ["python3", "/usr/bin/nvidia-device-plugin"], True),
        ("nvidia-device-plugin", "vim", ["vim", "-R", "nvidia-device-plugin"], False),
        ("gpu-node device-plugin", "gpu-node", ["/usr/bin/gpu-node", "device-plugin"], True),
        ("gpu-node device-plugin", "python3", ["python3", "/x/gpu-node", "device-plugin"], True),
        ("gpu-node device-plugin", "gpu-node", ["gpu-node", "exporter"], False),
        ("gpu-node device-plugin", "sh", ["sh", "-c", "gpu-node device-plugin"], False),
        ("kthreadd", "kthreadd", [], True),
    ],
)
def test_the_name_of_a_process(name: str, comm: str, arguments: list[str], expected: bool) -> None:
    """A program is also what an interpreter runs."""
    assert is_called(name, comm, arguments) == expected
