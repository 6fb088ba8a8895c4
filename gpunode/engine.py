# SPDX-License-Identifier: Apache-2.0
"""Which way of delivering devices works with the engine of a node; pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gpunode.config import settings
from gpuruntime.cli.checks import kubelet_checks

CONTAINERD, CRIO = "containerd", "cri-o"
# From these versions on, CDI names of the CRI's own field are honoured.
_CRI_FIELD = {CONTAINERD: (1, 7), CRIO: (1, 28)}
# From these on, those of annotations. CRI-O has CDI switched on, containerd has a setting.
_ANNOTATIONS = {CONTAINERD: (1, 7), CRIO: (1, 23)}
# Our OCI runtime and the incumbent's: both read the environment, and mounts if configured.
_OUR_RUNTIME = "gpu-container-runtime"
GPU_RUNTIMES = (_OUR_RUNTIME, "nvidia-container-runtime")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, its version, whether CDI is on, and the OCI runtimes that it is configured with.

    *has_cdi* is None if the engine does not report it. *runtimes* are names of programs.
    """

    name: str
    version: str
    has_cdi: bool | None = None
    runtimes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"

    def is_from(self, versions: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether the version is the one of *versions*, or a later one."""
        numbers = re.findall(r"[0-9]{1,9}", self.version)[:2]
        first = versions.get(self.name)
        return first is not None and tuple(map(int, numbers)) >= first

    @property
    def reads_cri_names(self) -> bool:
        """Whether containers get the CDI devices of the CRI's own field."""
        return bool(self.has_cdi) and self.is_from(_CRI_FIELD)

    @property
    def gpu_runtime(self) -> str:
        """The OCI runtime for GPUs that the engine is configured with, "" if there is none."""
        programs = (posixpath.basename(path) for path in self.runtimes)
        return next((name for name in programs if name.startswith(GPU_RUNTIMES)), "")


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategies in force, and the sentence that says why; *works*: pods get their GPUs."""

    strategies: tuple[str, ...]
    reason: str
    works: bool = True


def engine_of(name: str, version: str, config: Mapping[str, Any]) -> Engine:
    """Return the engine by its answers; *config* is that of its verbose status."""
    has_cdi = config.get("enableCDI")
    if name == CRIO:
        has_cdi = True
    containerd = config.get("containerd")
    runtimes = containerd.get("runtimes") if isinstance(containerd, dict) else None
    programs = []
    for runtime in runtimes.values() if isinstance(runtimes, dict) else ():
        options = runtime.get("options") if isinstance(runtime, dict) else None
        program = options.get("BinaryName") if isinstance(options, dict) else None
        if isinstance(program, str) and program:
            programs.append(program)
    return Engine(
        name,
        version.removeprefix("v"),
        has_cdi if isinstance(has_cdi, bool) else None,
        tuple(programs),
    )


def choose(engine: Engine | None, *, accepts_mounts: bool) -> Choice:
    """Return what reaches containers of *engine*, None if it does not answer.

    *accepts_mounts*: our OCI runtime is configured to read device lists in mounts.
    """
    if engine is None:
        return Choice((settings.ENVVAR,), "the engine does not answer", works=False)
    if engine.reads_cri_names:
        return Choice((settings.CDI_CRI,), f"{engine.title} has CDI on")
    if engine.has_cdi and engine.is_from(_ANNOTATIONS):
        return Choice((settings.CDI_ANNOTATIONS,), f"{engine.title} reads CDI annotations")
    runtime = engine.gpu_runtime
    if not runtime:
        reason = f"{engine.title} has CDI off and no OCI runtime for GPUs: pods get no GPU"
        return Choice((settings.ENVVAR,), reason, works=False)
    strategy = settings.VOLUME_MOUNTS if accepts_mounts else settings.ENVVAR
    reason = f"{engine.title} has CDI off, and the OCI runtime {runtime}"
    return Choice((strategy,), reason)


def hides_nodes(strategies: Collection[str]) -> bool:
    """Return whether the engine does not know the device nodes of a container."""
    return any(strategy in (settings.ENVVAR, settings.VOLUME_MOUNTS) for strategy in strategies)


def lost_by_updates(
    strategies: Collection[str], cpu_manager_state: str, *, passes_specs: bool
) -> tuple[str, str]:
    """Return a sentence about GPUs that containers lose, and what helps; "" and "" if they do not.

    *cpu_manager_state* is the text of the kubelet's file.
    """
    policy = kubelet_checks.cpu_manager_policy(cpu_manager_state)
    if passes_specs or not hides_nodes(strategies) or policy != kubelet_checks.STATIC:
        return "", ""
    sentence = (
        f"the kubelet's CPU manager is static and devices are delivered by "
        f"{', '.join(strategies)}: when it updates a container, the container loses its GPU"
    )
    return sentence, "use --pass-device-specs, or --device-list-strategy=cdi-cri"


def overwritten(strategies: Collection[str], resources: Collection[str]) -> str:
    """Return a sentence if a container with units of two *resources* sees those of one, or ""."""
    if len(resources) < 2 or set(strategies) != {settings.ENVVAR}:
        return ""
    return (
        f"devices are delivered by envvar: a container that requests two of "
        f"{', '.join(sorted(resources))} sees the devices of one of them; use "
        "--device-list-strategy=cdi-cri or volume-mounts"
    )


def problems(strategies: Collection[str], engine: Engine) -> list[str]:
    """Return sentences about *strategies* that cannot work with *engine*."""
    sentences = []
    for strategy, versions, what in (
        (settings.CDI_CRI, _CRI_FIELD, "CDI names of the kubelet"),
        (settings.CDI_ANNOTATIONS, _ANNOTATIONS, "CDI annotations"),
    ):
        if strategy not in strategies:
            continue
        is_read_by_runtime = strategy == settings.CDI_ANNOTATIONS and engine.gpu_runtime
        if not is_read_by_runtime and not (engine.is_from(versions) and engine.has_cdi):
            sentences.append(
                f"{engine.title} ignores {what}: pods start without their GPUs; switch CDI on in "
                f"the engine, or use another --device-list-strategy than {strategy}"
            )
    return sentences
