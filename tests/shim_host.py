# SPDX-License-Identifier: Apache-2.0
"""Simulated hosts on which a test runs commands, such as the runtime.

The low-level runtime records its call.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import forked_cli

TREE = Path(__file__).parents[1]
LAUNCHER = str(TREE / ".venv" / "bin" / "gpu-container-runtime")
PROGRAM = str(TREE / ".venv" / "bin" / "gpuruntime")
DEADLINE_S = 60
RECORDER = """#!/bin/sh
printf '%s\\n' "$@" > "$RECORD"
"""
RUNTIMES = "nvidia-container-runtime.runtimes"


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Call:
    """The result of one call of the runtime.

    *arguments* are those of the low-level runtime, None if it was not called. *before* and
    *after* are the bytes of config.json, *records* those of the `--log` file.
    """

    returncode: int
    stderr: str
    arguments: list[str] | None
    before: bytes
    after: bytes
    records: list[dict[str, str]]

    @property
    def config(self) -> dict[str, Any]:
        """The config.json that the low-level runtime finds; asserts that it was called."""
        assert self.returncode == 0, self.stderr
        assert self.arguments is not None
        config: dict[str, Any] = json.loads(self.after)
        return config

    @property
    def error(self) -> str:
        """The error and its hint; asserts that there is no container, and the engine knows why."""
        assert self.returncode != 0
        assert self.arguments is None
        assert self.after == self.before
        (message,) = self.said("error")
        assert self.stderr == f"{message}\n"
        error, hint = message.removeprefix("gpu-container-runtime: ").split("\n")
        assert hint.startswith("hint: ")
        return f"{error}\n{hint}"

    @property
    def nodes(self) -> dict[str, tuple[int, int]]:
        """Path → numbers of the character devices that the container gets."""
        devices = self.config.get("linux", {}).get("devices", [])
        return {node["path"]: (node["major"], node["minor"]) for node in devices}

    @property
    def gpus(self) -> list[int]:
        """The minor numbers of the GPUs that the container gets."""
        paths = (path.removeprefix("/dev/nvidia") for path in self.nodes)
        return sorted(int(path) for path in paths if path.isdecimal())

    @property
    def mounted(self) -> list[str]:
        """The names of what is mounted into the container."""
        return [mount["destination"].rpartition("/")[2] for mount in self.config.get("mounts", [])]

    @property
    def environment(self) -> list[str]:
        """The container's environment."""
        variables: list[str] = self.config["process"]["env"]
        return variables

    def said(self, level: str) -> list[str]:
        """Return the messages of *level*."""
        return [record["msg"] for record in self.records if record["level"] == level]


class Host:
    """A simulated host with *options*."""

    def __init__(self, *options: str) -> None:
        self._options = options

    def __enter__(self) -> Self:
        theirs, self._requests = os.pipe()
        self._results, results = os.pipe()
        forked_cli.start_host(
            self._options, (theirs, results, 2), {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        )
        os.close(theirs)
        os.close(results)
        self._lines = open(self._results, encoding="utf-8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._requests)
        # The end of the host's processes; what they print is not for anybody.
        forked_cli.read_all([self._lines.buffer], time.monotonic() + DEADLINE_S)
        self._lines.close()

    def run(self, *arguments: str, **environment: str) -> Done:
        """Run a command on the host, with $SIMHOST_CONF and *environment*."""
        words = [*(f"{name}={value}" for name, value in environment.items()), *arguments]
        os.write(self._requests, f"{json.dumps(words)}\n".encode())
        return Done(*json.loads(self._lines.readline()))

    def shell(self, script: str) -> str:
        """Run a script that succeeds, and return what it prints."""
        done = self.run("sh", "-euc", script)
        assert done.returncode == 0, done.stderr
        return done.stdout


class ShimHost(Host):
    """A simulated host with *options*, whose bundles and logs are below *place*."""

    def __init__(self, place: Path, *options: str) -> None:
        super().__init__(*options)
        self.place = place
        self._calls = 0
        self.recorder = place / "runtime"
        self.recorder.write_text(RECORDER)
        self.recorder.chmod(0o755)

    def write_config(self, config: dict[str, Any]) -> Path:
        """Return a config file with these values by key; the recorder is the runtime."""
        # What JSON has for a value, TOML has too.
        values = {RUNTIMES: [str(self.recorder)], **config}
        path = self.place / "config.toml"
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return path

    def create(
        self,
        document: dict[str, Any],
        config: dict[str, Any] | None = None,
        *,
        arguments: tuple[str, ...] = ("create", "--bundle", "{bundle}", "id"),
        prefix: tuple[str, ...] = (),
        **environment: str,
    ) -> Call:
        """Have the runtime, behind *prefix*, do *arguments* with a bundle that has *document*.

        *config* are values of the config file. The engine's log file is in JSON.
        """
        self._calls += 1
        bundle = self.place / f"bundle{self._calls}"
        bundle.mkdir()
        before = json.dumps(document).encode()
        (bundle / "config.json").write_bytes(before)
        log, record = bundle / "log.json", bundle / "record"
        done = self.run(
            *prefix,
            *(LAUNCHER, "--log", str(log), "--log-format", "json"),
            *(word.replace("{bundle}", str(bundle)) for word in arguments),
            **{
                "GPURUNTIME_CONFIG": str(self.write_config(config or {})),
                "RECORD": str(record),
                **environment,
            },
        )
        lines = log.read_text().splitlines() if log.exists() else []
        return Call(
            done.returncode,
            done.stderr,
            record.read_text().splitlines() if record.exists() else None,
            before,
            (bundle / "config.json").read_bytes(),
            [json.loads(line) for line in lines],
        )


def asking(*env: str, **members: Any) -> dict[str, Any]:
    """Return an OCI config whose process has *env*, and other *members*."""
    return {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "env": ["PATH=/bin", *env]},
        "root": {"path": "rootfs"},
        **members,
    }
