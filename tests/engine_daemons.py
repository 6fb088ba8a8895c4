# SPDX-License-Identifier: Apache-2.0
"""Real engines on configs of a test, and our command on the same files.

Each daemon runs on sockets of its own, in a PID and a mount namespace that end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[1]
PROGRAM = str(Path(sys.prefix, "bin", "gpu-container-runtime"))
DEADLINE_S = 30.0
# Whatever an engine leaves in these directories is gone with it.
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
COVERED = ("/run", "/etc/docker", "/etc/containers", "/var/lib/containers")
COVER_SCRIPT = (
    f"for name in {' '.join(COVERED)}; do "
    'test ! -d $name || mount -t tmpfs none $name; done; exec "$@"'
)
COVER = ("sh", "-ec", COVER_SCRIPT, "sh")


def configure(work: Path, *words: object, check: bool = True) -> None:
    """Run the command, with its records in *work*."""
    subprocess.run(
        [
            *(sys.executable, "-m", "gpuruntime", "runtime", "configure"),
            *("--state-dir", work / "state", "--runtime-path", PROGRAM, *map(str, words)),
        ],
        check=check,
        cwd=TREE,
        timeout=60,
        stderr=subprocess.PIPE,
    )


def output(*command: object, **environment: str) -> str:
    """Return what *command* prints; its error fails the test."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def daemon(log: Path, *command: object) -> Iterator[None]:
    """Run *command* while in the context, and all that it starts."""
    words = [*ALONE, *COVER, *map(str, command)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def until_it_answers(log: Path, *command: object) -> str:
    """Return what *command* prints as soon as it succeeds."""
    words = [str(word) for word in command]
    end = time.monotonic() + DEADLINE_S
    while True:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0:
            return done.stdout
        assert time.monotonic() < end, f"{done.stderr}\n{log.read_text()[-4000:]}"
        time.sleep(0.1)


def docker_info(work: Path, name: str) -> dict[str, Any]:
    """Start dockerd on the config in *work*, with what it keeps in *name*; return its answer."""
    own = work / name
    own.mkdir()
    socket = f"unix://{own}/docker.sock"
    command = (
        *("dockerd", "--config-file", work / "daemon.json", "-H", socket),
        *("--data-root", own / "data", "--exec-root", own / "exec"),
        *("--pidfile", own / "pid", "--iptables=false", "--ip6tables=false", "--bridge=none"),
    )
    log = own / "log"
    with daemon(log, *command):
        text = until_it_answers(log, "docker", "-H", socket, "info", "--format", "{{json .}}")
    document: dict[str, Any] = json.loads(text)
    return document
