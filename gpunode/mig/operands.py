# SPDX-License-Identifier: Apache-2.0
"""The operands of the GPU operator that are paused during a change of MIG; pure, but for a file.

An operand runs on a node while its label `nvidia.com/gpu.deploy.<operand>` is `true`. The values
of the labels are in a file from before the first pause until they are restored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpunode.mig import journal
from gpuruntime.errors import ArgumentError, ConfigError

PREFIX = "nvidia.com/gpu.deploy."
PAUSED = "paused-for-mig-change"
_RUNNING = "true"
_NOT_RUNNING = ("false", "", PAUSED)
# Operand → the label `app` of its pods.
OPERANDS = {
    "device-plugin": "nvidia-device-plugin-daemonset",
    "gpu-feature-discovery": "gpu-feature-discovery",
    "dcgm-exporter": "nvidia-dcgm-exporter",
    "dcgm": "nvidia-dcgm",
    "nvsm": "nvidia-nvsm",
}
VALIDATOR_APP = "nvidia-operator-validator"


def parse(text: str) -> tuple[str, str]:
    """Return operand and app of *text*, `OPERAND` or `OPERAND=APP`; raise ArgumentError."""
    operand, _, app = text.partition("=")
    if not operand or "/" in text or text.endswith("="):
        raise ArgumentError(
            f'--operand is "{text}", not OPERAND or OPERAND=APP',
            f"name the end of the label {PREFIX}OPERAND, and the label app of its pods",
        )
    return operand, app or operand


def pauses(labels: Mapping[str, str], operands: Iterable[str]) -> dict[str, str]:
    """Return the labels of *operands* that are to be paused, with their values in *labels*."""
    names = (f"{PREFIX}{operand}" for operand in operands)
    return {name: labels[name] for name in names if labels.get(name, "") not in _NOT_RUNNING}


def restored(
    labels: Mapping[str, str], operands: Iterable[str], values: Mapping[str, str]
) -> dict[str, str]:
    """Return the labels to set so that no operand is paused any more.

    Those in *values* get their value from there, others `true`. A label that another program has
    changed since the pause keeps its value.
    """
    names = dict.fromkeys([*(f"{PREFIX}{operand}" for operand in operands), *values])
    return {name: values.get(name, _RUNNING) for name in names if labels.get(name) == PAUSED}


@dataclass(frozen=True, slots=True)
class Pause:
    """What the file has: the *values* of paused labels, and the *services* that were stopped.

    *rebooted_from* is the boot in which a reboot began.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    services: tuple[str, ...] = ()
    rebooted_from: str = ""

    def save(self, path: str) -> None:
        """Write this to *path*; raise ConfigError."""
        document = {
            "version": "v1",
            "labels": dict(self.values),
            "services": list(self.services),
            "rebooted-from": self.rebooted_from,
        }
        try:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f'cannot write "{path}": {error.strerror}', "name another file: --pause-file"
            ) from error
        journal.write(path, document)


def load(path: str) -> Pause | None:
    """Return what *path* has, None without the file; raise ConfigError."""
    document = journal.read(path)
    if document is None:
        return None
    match document:
        case {
            "labels": dict(values),
            "services": list(services),
            "rebooted-from": str(boot),
        } if all(isinstance(text, str) for text in (*values, *values.values(), *services)):
            return Pause(values, tuple(services), boot)
    raise ConfigError(
        f'"{path}" does not have the labels of paused operands',
        "operands that are paused are set to true",
    )
