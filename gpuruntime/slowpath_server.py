# SPDX-License-Identifier: Apache-2.0
"""What the start path asks of the full interpreter: JSON on stdin, JSON on stdout.

gpuruntime/slowpath.py runs it; by hand: `python -m gpuruntime.slowpath_server QUESTION [SECONDS]`.
Each question imports what it needs: a container waits, and the imports are most of what it waits
for.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import gc
import os
import sys

from cdi import strictjson
from gpuruntime.errors import ConfigError, DriverError, GpuRuntimeError
from gpuruntime.slowpath import DEADLINE_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuruntime import probes

# What discovery opens at the same time, and much to spare.
MIN_DESCRIPTORS = 64
MODPROBE = "usr/bin/nvidia-modprobe"


def config(path: str) -> dict[str, object]:
    """Return the values of the config file *path* and what to warn of, or an error and hint."""
    from gpuruntime.configfile.compilation import compile_file  # noqa: PLC0415

    try:
        values, warnings = compile_file(path)
    except ConfigError as error:
        return {"error": error.message, "hint": error.hint}
    return {"values": values, "warnings": warnings}


def yaml(texts: dict[str, str]) -> dict[str, object]:
    """Return path → {"document": …} or {"error": text, "category": word} for each of *texts*."""
    from cdi import yamlio  # noqa: PLC0415
    from cdi.errors import CdiError  # noqa: PLC0415

    return {
        path: {"error": found.message, "category": found.category}
        if isinstance(found, CdiError)
        else {"document": found}
        for path, found in yamlio.decode_all(texts).items()
    }


def discover(argument: dict[str, float | str]) -> dict[str, object]:
    """Return {"inventory", "state"} of the machine below the driver root, or {"error", "state"}.

    The state is that from before: what changes meanwhile is noticed by the next who looks. And
    "shared" with either: whether the same would be answered to another process, which other limits
    and another cgroup may hold.
    """
    from gpuruntime import probes  # noqa: PLC0415
    from gpuruntime.discover import (  # noqa: PLC0415
        fingerprint,
        inventory,
        nvml,
        platforms,
        tegra,
    )
    from gpuruntime.snapshots import inventory_json  # noqa: PLC0415

    root = str(argument["driver root"])
    state: probes.State | None = None
    own_limits: list[None] = []
    is_shared = _has_descriptors()
    try:
        # A driver root may have files alone.
        has_nodes = any(os.path.exists(f"{root}{path}") for path in platforms.NODES)
        dev_root = root if has_nodes else "/"
        csv = tegra.CsvOptions(directory=str(argument["CSV files"]))
        state = probes.read(fingerprint.plan(root, dev_root, environment=False, csv=csv))
        found = inventory.discover(
            root,
            dev_root,
            mode=str(argument["mode"]),
            csv=csv,
            strict=False,
            environment=False,
            deadline_s=float(argument["deadline_s"]),
            on_own_limits=lambda: own_limits.append(None),
        )
    except GpuRuntimeError as error:
        kind = DriverError if isinstance(error, DriverError) else type(error)
        failure = {
            "class": kind.__name__,
            "message": error.message,
            "hint": error.hint,
        }
        is_shared = is_shared and not isinstance(error, nvml.NoAnswerError)
        return {"error": failure, "state": state, "shared": is_shared}
    is_shared = is_shared and not own_limits
    return {"inventory": inventory_json.encode(found), "state": state, "shared": is_shared}


def _has_descriptors() -> bool:
    """Return whether this process may have descriptors enough to see each file.

    A directory that cannot be opened for want of one looks as if it were not there.
    """
    if os.sysconf("SC_OPEN_MAX") >= MIN_DESCRIPTORS:
        return True
    import resource  # noqa: PLC0415 (hardly any caller has such a limit)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = min(hard, MIN_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
    return enough == MIN_DESCRIPTORS


def make_nodes(argument: dict[str, Any]) -> bool:
    """Have the driver load its modules and make their nodes; return whether it could.

    Also the nodes of GPUs of the "minors". What it makes is looked at by whoever asked.
    """
    import subprocess  # noqa: PLC0415

    program = os.path.join(argument["driver root"], MODPROBE)
    minors = sorted({0, *map(int, argument["minors"])})
    if not os.access(program, os.X_OK):
        return False
    # It is the host's own program, of a root that the operator named.
    subprocess.run(
        [program, "-u", *(word for minor in minors for word in ("-c", str(minor)))],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    return True


QUESTIONS: dict[str, Callable[[Any], object]] = {
    "config": config,
    "yaml": yaml,
    "discover": discover,
    "make-nodes": make_nodes,
}


def main() -> None:
    """Answer the question named on the command line."""
    # A container waits, and nothing that is worth a search for cycles is dropped.
    gc.disable()
    question, seconds = (*sys.argv[1:], str(DEADLINE_S))[:2]
    # One that is asked of the driver ends before, by its own deadline, and says so.
    _signal.setitimer(_signal.ITIMER_REAL, float(seconds) + 1)
    # Descriptors of the engine that lack O_CLOEXEC are not for this process.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    argument = strictjson.loads(sys.stdin.buffer.read())
    answer = QUESTIONS[question](argument)
    sys.stdout.write(strictjson.dumps(answer, allow_nan=True, default=str))
    sys.stdout.flush()
    # Nothing is left to do, and the interpreter takes its time to free what it has.
    os._exit(0)


if __name__ == "__main__":
    main()
