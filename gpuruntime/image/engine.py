# SPDX-License-Identifier: Apache-2.0
"""Read an image that docker or podman has, by a container that is created, exported and removed.

Nothing of the image is executed, mounted or written to a file system: the container is never
started, and its root file system is read as the stream of `export`. This works for both engines,
for all their storage drivers, and without root. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from gpuruntime.errors import GpuRuntimeError, RequestError
from gpuruntime.image import archive
from gpuruntime.image.collect import Collector
from gpuruntime.image.contents import Contents

ENGINES = ("docker", "podman")
# Identifies a container that remains if this process is killed.
LABEL = "gpuruntime.explain=1"
_TIMEOUT_S = 30
_MAX_OUTPUT_BYTES = 4 << 20
_MAX_ENVIRONMENT = 10_000
_NO_PROGRAM = "/gpuruntime-never-started"


def read(reference: str, collector: Collector) -> tuple[Contents, Sequence[str]]:
    """Return the contents of the image *reference*, and its environment.

    Raises RequestError if no engine has it, GpuRuntimeError if the engine fails.
    """
    if not reference or reference.startswith("-") or not reference.isprintable():
        raise RequestError(
            f'"{reference}" is not an image reference', "use a reference such as name:tag"
        )
    program, environment = _find(reference)
    with _container(program, reference) as name, _export(program, name) as stream:
        contents = archive.read(stream, collector)
    return contents, environment


def _find(reference: str) -> tuple[str, list[str]]:
    """Return the program of the engine that has *reference*, and the image's environment."""
    reasons = []
    for name in ENGINES:
        program = shutil.which(name)
        if program is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            output = _output_of(program, "image", "inspect", "--", reference)
            return program, _environment(output)
        except GpuRuntimeError as error:
            reasons.append(error.message)
    raise RequestError(
        f'no engine on this machine has the image "{reference}": {"; ".join(reasons)}',
        'get it with "docker pull" or "podman pull", or name a directory with "--rootfs"',
    )


def _environment(output: bytes) -> list[str]:
    """Return the variables of the image that *output*, printed by inspect, describes."""
    try:
        (image,) = json.loads(output)
        variables = (image.get("Config") or {}).get("Env") or []
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GpuRuntimeError("its description of the image is malformed", None) from error
    if not isinstance(variables, list) or len(variables) > _MAX_ENVIRONMENT:
        raise GpuRuntimeError("its description of the image has no environment", None)
    entries = [entry for entry in variables if isinstance(entry, str)]
    return [entry for entry in entries if "=" in entry[1:]]


@contextmanager
def _container(program: str, reference: str) -> Iterator[str]:
    """Yield the id of a container of *reference*, and remove it afterwards."""
    made = _output_of(
        program,
        *("create", "--pull", "never", "--label", LABEL, "--network", "none"),
        *("--entrypoint", _NO_PROGRAM, "--", reference),
    )
    name = made.decode("ascii", "replace").split()[-1] if made.strip() else ""
    if not name.isalnum():
        raise GpuRuntimeError(
            f'"{program} create" did not print the id of the container',
            'remove the container with "docker rm"',
        )
    try:
        yield name
    finally:
        # With the volumes that the image declares.
        _output_of(program, "rm", "-f", "-v", name)


@contextmanager
def _export(program: str, name: str) -> Iterator[IO[bytes]]:
    """Yield the stream of the root file system of the container *name*."""
    with _started(program, "export", name) as process:
        assert process.stdout is not None
        yield process.stdout


@contextmanager
def _started(program: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the running command, and end it afterwards: its output may not be read to the end."""
    try:
        process = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(os.environ),
        )
    except OSError as error:
        raise GpuRuntimeError(
            f'cannot start "{program}": {error.strerror}', "install the engine again"
        ) from error
    try:
        yield process
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


def _output_of(program: str, *words: str) -> bytes:
    """Return the output of the command; raise GpuRuntimeError if it fails or takes too long."""
    name = os.path.basename(program)
    shown: Any = f"{name} {words[0]}"
    try:
        done = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GpuRuntimeError(
            f'"{shown}" did not answer in {_TIMEOUT_S} s', f"check that {name} works"
        ) from error
    except OSError as error:
        raise GpuRuntimeError(
            f'cannot start "{program}": {error.strerror}', f"install {name} again"
        ) from error
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = lines[-1][:300] if lines else f"status {done.returncode}"
        raise GpuRuntimeError(f"{shown}: {why}", f"check that {name} works")
    return done.stdout[:_MAX_OUTPUT_BYTES]
