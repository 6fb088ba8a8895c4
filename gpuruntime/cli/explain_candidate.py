# SPDX-License-Identifier: Apache-2.0
"""The containers that a file describes, and which of them is explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cdi.wire import OciConfig
from gpuruntime.cli import explain_docker
from gpuruntime.cli.explain_docker import EngineContainer
from gpuruntime.errors import RequestError
from gpuruntime.request.container import shortened

IMAGE_NOTE = (
    "the variables of the image are not in the file: add those that matter with "
    '"--image-env NAME=VALUE"'
)
_MAX_NAMES = 20
# Runtimes that add no GPU by themselves.
_LOW_LEVEL = ("runc", "crun", "io.containerd.runc.v2", "youki", "runsc")


@dataclass(slots=True)
class Described:
    """The OCI config that an engine makes of a description.

    *devices* are the CDI names that the engine adds to it, *notes* sentences about it.
    """

    config: OciConfig
    devices: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_engine(cls, container: EngineContainer) -> Described:
        """Return *container* as the runtime sees it."""
        notes = [*container.notes, *_runtime_notes(container)]
        return cls(explain_docker.oci_config(container), list(container.devices), notes)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A container of a file: its *name* there, what it is, and what makes its OCI config.

    *describe* raises RequestError. *aliases* are other names by which it can be chosen.
    """

    name: str
    title: str
    describe: Callable[[], Described]
    aliases: tuple[str, ...] = ()


def choose(candidates: Sequence[Candidate], name: str | None, path: str) -> Candidate:
    """Return the candidate *name*, or the only one if that is None; raise RequestError."""
    names = ", ".join(f'"{shortened(one.name)}"' for one in candidates[:_MAX_NAMES])
    more = len(candidates) - _MAX_NAMES
    names += f" and {more} more" if more > 0 else ""
    if name is None:
        if len(candidates) > 1:
            raise RequestError(
                f'"{path}" has {len(candidates)} containers: {names}',
                f'choose one, such as "--container {shortened(candidates[0].name)}"',
            )
        return candidates[0]
    exact = [one for one in candidates if one.name == name]
    matches = exact or [one for one in candidates if name in one.aliases]
    if not matches:
        raise RequestError(
            f'"{path}" has no container "{shortened(name)}"', f"choose one of {names}"
        )
    if len(matches) > 1:
        several = ", ".join(f'"{shortened(one.name)}"' for one in matches[:_MAX_NAMES])
        raise RequestError(
            f'"{path}" has several containers "{shortened(name)}"', f"choose one of {several}"
        )
    return matches[0]


def _runtime_notes(container: EngineContainer) -> list[str]:
    name = container.runtime.rpartition("/")[2]
    if not name:
        return ["no runtime is named: this is what it gets if gpu-container-runtime starts it"]
    if name not in _LOW_LEVEL:
        return [f'the engine starts it with the runtime "{shortened(container.runtime)}"']
    if container.gpu_env is not None or container.devices:
        return []
    note = f'the engine starts it with the runtime "{name}", which adds no GPU'
    return [f"{note}: this is what it would get from gpu-container-runtime"]
