# SPDX-License-Identifier: Apache-2.0
"""The programs that a change of MIG runs: the hooks of a file, and the reset of GPUs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from gpunode.config import file
from gpuruntime.errors import RequestError, escape

_SCHEMA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "mig_hooks_schema.json")
_DEADLINE_S = 300
_MAX_TEXT = 300


class CommandError(RequestError):
    """A program failed, or did not end in time."""


class HookFile:
    """The hooks of the file *path*, none if it is "", with *variables* beside the environment."""

    def __init__(self, path: str, variables: Mapping[str, str]) -> None:
        """Read the file; raise ConfigError."""
        self._hooks = file.read(path, _SCHEMA).get(("hooks",)) if path else {}
        self._variables = variables

    def run(self, point: str) -> None:
        """Run the hooks of *point* one after the other; raise CommandError."""
        for hook in self._hooks.get(point, ()):
            _run(
                f"the hook {point}",
                [hook["command"], *hook.get("args", ())],
                {**os.environ, **self._variables, **hook.get("envs", {})},
                hook.get("workdir"),
            )


def reset_by(program: str, bus_ids: Sequence[str]) -> None:
    """Reset the GPUs *bus_ids* by nvidia-smi at *program*; raise CommandError."""
    run("the reset of GPUs", [program, "-r", "-i", ",".join(bus_ids)])


def run(subject: str, command: Sequence[str]) -> str:
    """Return the output of *command*, which *subject* names in errors; raise CommandError."""
    return _run(subject, command, {**os.environ}, None)


def _run(
    subject: str, command: Sequence[str], environment: Mapping[str, str], directory: str | None
) -> str:
    try:
        end = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(
            f'{subject} failed: "{command[0]}" did not end within {_DEADLINE_S} s',
            "correct the program",
        ) from None
    except (OSError, ValueError) as error:
        raise CommandError(
            f'{subject} failed: cannot run "{escape(command[0])}": {escape(str(error))}',
            "check the path of the program",
        ) from error
    output = end.stdout.decode("utf-8", "replace")
    if end.returncode:
        text = escape(output.strip()[-_MAX_TEXT:])
        raise CommandError(
            f'{subject} failed: "{escape(command[0])}" ended with {end.returncode}: {text}',
            "correct what the program reports",
        )
    return output
