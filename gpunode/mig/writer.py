# SPDX-License-Identifier: Apache-2.0
"""The process that changes MIG, as its parent sees it: each call has a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from typing import Any, Protocol, Self

from cdi import strictjson
from gpunode.watch import framing
from gpuruntime import remedies
from gpuruntime.errors import DriverError

_PROGRAM = (
    "import sys; from json import loads; options = loads(sys.argv[1]); "
    "sys.path = options['path']; from gpunode.mig.child import main; main(options['library'])"
)
DEADLINE_S = 60.0
_NO_PERMISSION = 4


class WriteError(DriverError):
    """An operation failed: NVML returned the error *code*, or, if that is None, none in time."""

    def __init__(self, message: str, hint: str | None = None, code: int | None = None) -> None:
        super().__init__(message, hint)
        self.code = code


class Writer(Protocol):
    """What the engine needs of NVML: `call` returns the result, or raises WriteError."""

    def call(self, operation: str, **arguments: object) -> Any:  # noqa: ANN401 (JSON)
        """Return the result of *operation*; raise WriteError."""


class ChildWriter:
    """A child process that has loaded *library*; a context manager that ends it."""

    def __init__(self, library: str, deadline_s: float = DEADLINE_S) -> None:
        """Start the child; raise WriteError if it cannot load the library."""
        self._deadline_s = deadline_s
        self._library = library
        self._frames = framing.Decoder()
        options = strictjson.dumps({"path": sys.path, "library": library})
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
        )
        try:
            self._receive("load the library")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child; one that hangs in the driver is left to end when the driver returns."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)

    def call(self, operation: str, **arguments: object) -> Any:  # noqa: ANN401 (JSON)
        """Return the result of *operation*; raise WriteError."""
        assert self._process.stdin is not None
        try:
            framing.write(
                self._process.stdin.fileno(), {"operation": operation, "arguments": arguments}
            )
        except OSError as error:
            raise self._ended(operation) from error
        return self._receive(operation.replace("_", " "))

    def _receive(self, action: str) -> Any:  # noqa: ANN401 (JSON)
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        end = time.monotonic() + self._deadline_s
        messages: list[Any] = []
        while not messages:
            left = end - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self._process.kill()
                raise WriteError(
                    f'NVML ({self._library}) did not return from "{action}" within '
                    f"{self._deadline_s:g} s",
                    remedies.CHECK_NVIDIA_SMI,
                )
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._ended(action)
            try:
                messages = self._frames.feed(data)
            except framing.FrameError as error:
                raise WriteError(f"the process that calls NVML wrote {error}") from None
        response = messages[0]
        if "error" in response:
            hint = (
                "run the command as root"
                if response["code"] == _NO_PERMISSION
                else remedies.CHECK_NVIDIA_SMI
            )
            raise WriteError(
                f'the operation "{action}" of NVML failed: {response["error"]}',
                hint,
                response["code"],
            )
        return response["result"]

    def _ended(self, action: str) -> WriteError:
        return WriteError(
            f'the process that calls NVML ended in "{action.replace("_", " ")}"',
            remedies.CHECK_NVIDIA_SMI,
        )
