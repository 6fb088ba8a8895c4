# SPDX-License-Identifier: Apache-2.0
"""The ways in which the containers of the scenarios request GPUs, and the expected GPUs.

Shared by the scenarios, which run on the simulated host, and the tests, which do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

MODE = "nvidia-container-runtime.mode"
HOOK_PATH = "nvidia-container-runtime-hook.path"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
UUID_OF_3 = "GPU-5f1e0003-9a3c-4d27-8b60-0c1d2e3f4a03"
# A requirement that no host satisfies.
REQUIREMENT = "NVIDIA_REQUIRE_CUDA=cuda>=99.0"


@dataclass(frozen=True)
class Way:
    """A container that requests *devices* by its variable; None: without the variable.

    It gets *gpus*; None: it is the same as without our runtime. *more* are further variables,
    *config* is in config.toml, by key. *spec* are the options with which a CDI spec is generated
    first; None: the host has no spec.
    """

    devices: str | None
    gpus: frozenset[int] | None
    more: tuple[str, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    spec: tuple[str, ...] | None = None

    @property
    def toml(self) -> str:
        """Return the text of config.toml."""
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.config.items())


_TWO, _ONE = frozenset({1, 3}), frozenset({0})
CDI = {MODE: "cdi"}
LEGACY = {MODE: "legacy"}
WAYS = {
    "auto": Way("1,3", _TWO),
    "auto, one": Way("0", _ONE),
    "auto, all": Way("all", frozenset(range(8))),
    "auto, a UUID": Way(UUID_OF_3, frozenset({3})),
    "auto, none": Way("none", frozenset()),
    "auto, every capability": Way("1,3", _TWO, (f"{CAPABILITIES}=all",)),
    "auto, automatic": Way("runtime.nvidia.com/gpu=1,runtime.nvidia.com/gpu=3", _TWO),
    "auto, qualified": Way("nvidia.com/gpu=1,nvidia.com/gpu=3", _TWO, spec=()),
    "jit-cdi": Way("1,3", _TWO, config={MODE: "jit-cdi"}),
    "cdi": Way("1,3", _TWO, config=CDI, spec=()),
    "cdi, one": Way("0", _ONE, config=CDI, spec=()),
    "cdi, all": Way("all", frozenset(range(8)), config=CDI, spec=()),
    "cdi, a UUID": Way(UUID_OF_3, frozenset({3}), config=CDI, spec=()),
    "cdi, none": Way("none", frozenset(), config=CDI, spec=()),
    "cdi, qualified": Way("nvidia.com/gpu=0", _ONE, config=CDI, spec=()),
    "cdi, one hook a step": Way("1,3", _TWO, config=CDI, spec=("--separate-hooks",)),
    "requirement not asked for": Way("0", _ONE, (REQUIREMENT, "NVIDIA_DISABLE_REQUIRE=1")),
    "void": Way("void", None),
    "empty": Way("", None),
    "unasked": Way(None, None),
}
# With our prestart hook, or with a prestart hook of the engine.
LEGACY_WAYS = {
    "legacy": Way("1,3", _TWO, config=LEGACY),
    "legacy, none": Way("none", frozenset(), config=LEGACY),
    "legacy, unasked": Way(None, None, config=LEGACY),
    "auto": Way("1,3", _TWO),
    "cdi": Way("1,3", _TWO, config=CDI, spec=()),
    "unasked": Way(None, None),
}
CRUN = ("auto", "cdi", "auto, qualified", "unasked")
# For an engine that other scenarios cover in full.
FEW = ("auto", "cdi, one", "unasked")
# Fewer ways: docker starts and stops a container more slowly than the others.
DOCKER = (
    *("auto", "auto, one", "auto, every capability", "auto, automatic", "auto, qualified"),
    *("cdi", "requirement not asked for", "void", "unasked"),
)
# Requests that docker must refuse, and controls that it must start.
REFUSED = {
    "none-such": Way("9", None),
    "none-such-spec": Way("9", None, config=CDI, spec=()),
    "no-spec": Way("nvidia.com/gpu=0", None),
    "requirement": Way("0", None, (REQUIREMENT,)),
    "good": Way("0", _ONE),
    "plain": Way(None, None),
}
