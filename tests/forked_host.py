# SPDX-License-Identifier: Apache-2.0
"""A simulated host as a fork of the server of forked_cli.py, for shim_host.py.

A fork has the modules of both the simulated host and the command line, whose import costs more
than most of what is done with them. Inside, each line of standard input asks for a command, as a
JSON list of words, and a line of standard output has its status, output and errors.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import forked_cli
import simhost

PROGRAM = str(forked_cli.TREE / ".venv" / "bin" / "gpuruntime")
DEADLINE_S = 60
# Variables that an interpreter reads at its start.
READ_AT_START = ("PYTHON", "LC_", "LANG")


def run(options: Sequence[str]) -> int:
    """Have a simulated host with *options* until standard input ends; return its status."""
    return simhost.main(["run", *options, "--", "serve"], serve)


def serve() -> int:
    """Run the commands that standard input names, each in a fork."""
    # As in an interpreter that has just started.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
    return 0


def _run(words: list[str]) -> tuple[int, str, str]:
    """Return the status, output and errors of `env` with *words*."""
    count = next(i for i, word in enumerate(words) if "=" not in word)
    variables = dict(word.split("=", 1) for word in words[:count])
    if words[count] == PROGRAM and not any(n.startswith(READ_AT_START) for n in variables):
        return _fork(words[count + 1 :], variables)
    done = subprocess.run(
        ["env", *words], capture_output=True, text=True, errors="surrogateescape", check=False,
        stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def _fork(words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run the command line with *words* in a fork of this process."""
    pipes = [os.pipe() for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDONLY)
        for number, stream in enumerate([null, *(writing for _, writing in pipes)]):
            os.dup2(stream, number)
            os.close(stream)
        for reading, _ in pipes:
            os.close(reading)
        os.environ.update(variables)
        forked_cli.become_command(words)
    for _, writing in pipes:
        os.close(writing)
    files = [open(reading, "rb") for reading, _ in pipes]  # noqa: SIM115 (closed below)
    try:
        output, errors = forked_cli.read_all(files, time.monotonic() + DEADLINE_S)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        for file in files:
            file.close()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, *(text.decode(errors="surrogateescape") for text in (output, errors))
