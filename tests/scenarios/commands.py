# SPDX-License-Identifier: Apache-2.0
"""Every command of an installation with arguments that work on any host with a GPU, run once.

A command of the command line without a row here fails test_commands.py of tests/unit.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

WORK = "/run/commands"
OURS = "gpuruntime"
CONFIG = {"ociVersion": "1.0.2", "process": {"args": ["true"], "cwd": "/"}, "root": {"path": "r"}}
# Words, in an order in which each has what it needs.
COMMANDS: tuple[tuple[str, ...], ...] = (
    (OURS, "cdi", "generate"),
    (OURS, "cdi", "generate", "--output", f"{WORK}/one.json"),
    (OURS, "cdi", "refresh", "--output", f"{WORK}/two.yaml"),
    (OURS, "cdi", "refresh", "--output", f"{WORK}/two.yaml"),
    (OURS, "cdi", "refresh", "--check", "--output", f"{WORK}/two.yaml"),
    (OURS, "cdi", "list", "--spec-dir", WORK, "--verbose"),
    (OURS, "cdi", "validate"),
    (OURS, "cdi", "validate", f"{WORK}/one.json"),
    (OURS, "cdi", "diff", f"{WORK}/one.json", f"{WORK}/one.json"),
    (OURS, "cdi", "inject", "--device", "nvidia.com/gpu=0"),
    (OURS, "cdi", "transform", "root", "--input", f"{WORK}/one.json", "--to", "/host"),
    (OURS, "driver", "list"),
    (OURS, "doctor"),
    (OURS, "doctor", "--check", "files"),
    (OURS, "explain", "-e", "NVIDIA_VISIBLE_DEVICES=0"),
    (OURS, "explain", "--gpus", "all", "--json"),
    (OURS, "info"),
    (OURS, "info", "--json"),
    *(
        (OURS, "runtime", "configure", "--runtime", engine, "--dry-run")
        for engine in ("containerd", "crio", "docker", "podman")
    ),
    (OURS, "runtime", "list"),
    (OURS, "system", "create-device-nodes", "--all", "--dry-run"),
    (OURS, "system", "create-device-nodes", "--all"),
    (OURS, "system", "create-dev-char-symlinks", "--create-all"),
    (OURS, "system", "create-dev-char-symlinks"),
    (OURS, "config", "default"),
    (OURS, "config", "show"),
    (OURS, "config", "check"),
    (OURS, "config", "set", "nvidia-container-runtime.log-level=debug"),
    (OURS, "config", "compile"),
    (OURS, "hook", "noop"),
    *(
        (OURS, "hook", name, "--help")
        for name in (
            *("chmod", "create-symlinks", "disable-device-node-modification"),
            *("enable-cuda-compat", "update-application-profile", "update-container"),
            "update-ldcache",
        )
    ),
    ("nvidia-ctk", "--version"),
    ("nvidia-ctk", "hook", "noop", "--help"),
    ("nvidia-ctk", "cdi", "list"),
    ("nvidia-ctk", "system", "create-dev-char-symlinks", "--dry-run"),
    ("nvidia-container-cli", "--version"),
    ("nvidia-container-cli", "info"),
    ("nvidia-container-cli", "list"),
    ("gpu-container-runtime", "--version"),
    ("gpu-cdi-hook", "--help"),
)
# Their exit status describes the host, not the installation.
_ANY_STATUS = ("doctor",)
_TRACEBACK = "Traceback (most recent call last)"


def run_all() -> dict[str, str]:
    """Run COMMANDS and return command → output of each that failed."""
    Path(WORK).mkdir(exist_ok=True)
    failed = {}
    for words in COMMANDS:
        done = subprocess.run(
            words,
            input=json.dumps(CONFIG),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        output = done.stdout + done.stderr
        is_good = done.returncode == 0 or words[1] in _ANY_STATUS
        if (
            not is_good
            or _TRACEBACK in output
            or "did not answer" in output
            or "No module" in output
        ):
            failed[" ".join(words)] = f"status {done.returncode}: {output[-500:]}"
    return failed
