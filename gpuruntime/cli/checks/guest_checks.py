# SPDX-License-Identifier: Apache-2.0
"""Check of a virtual machine whose GPUs are vGPUs: the daemon and the files of its licence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuruntime.cli.checks import processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, ok, warn
from gpuruntime.cli.checks.platform_checks import GPUS

DAEMON = "nvidia-gridd"
CONFIG = "/etc/nvidia/gridd.conf"
TOKENS = "/etc/nvidia/ClientConfigToken"
# The profile at the end of a vGPU's name: "NVIDIA A16-4Q", "GRID T4-8C", "NVIDIA A100-3-20C".
_MODEL = re.compile(r"^Model:\s*(.*\S-[0-9]{1,3}(?:Q|C|B|A|CME))\s*$", re.MULTILINE)
_SERVER = re.compile(r"^\s*ServerAddress\s*=\s*\S", re.MULTILINE)
_TOKEN_DIRECTORY = re.compile(r'^\s*ClientConfigTokenPath\s*=\s*"?(/[^"\s]+)', re.MULTILINE)


def licence(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the vGPUs of a guest can have a licence, without which they become slow."""
    models = [
        match[1]
        for bus_id in machine.names(GPUS)
        if (match := _MODEL.search(machine.read(f"{GPUS}/{bus_id}/information") or ""))
    ]
    if not models:
        yield ok("no vGPU")
        return
    name = f"the vGPU {models[0]}"
    text = machine.read(CONFIG) or ""
    directory = _TOKEN_DIRECTORY.search(text)
    tokens = directory[1].rstrip("/") if directory else TOKENS
    if not (_SERVER.search(text) or machine.glob(tokens, "*.tok")):
        yield warn(
            f'{name} cannot get a licence: no token in "{tokens}", and no ServerAddress in '
            f'"{CONFIG}"',
            f'copy the client configuration token to "{tokens}", then run '
            f'"systemctl restart {DAEMON}"',
        )
    elif not processes.running(machine, DAEMON):
        yield warn(
            f"{name} cannot get a licence: {DAEMON} does not run",
            f'run "systemctl enable --now {DAEMON}"',
        )
    else:
        yield ok(f"{DAEMON} runs for {name}")
