# SPDX-License-Identifier: Apache-2.0
"""For every config.json that the launcher passes on, the shim would have changed nothing.

What the shim would do is asked of its decision itself: the words that are looked for before it
would only say again what the launcher says.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from effort import tries
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher.bundles import write_bundle, write_companion

from gpuruntime.config import Config
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.launcher import companion
from gpuruntime.plan import injection

if TYPE_CHECKING:
    from launcher.conftest import Bench

RECORDED = sorted((Path(__file__).parents[1] / "data" / "configs").glob("*.json"))
RUNTIME = "nvidia-container-runtime"


class Untouchable:
    """A machine whose every query raises AskedError."""

    def __getattr__(self, name: str) -> None:
        """Fail: somebody wants to know something."""
        raise AskedError(name)


class AskedError(Exception):
    """The decision queried the machine."""


def changes(document: dict[str, Any], config: Config) -> bool:
    """Return whether the shim would change *document*, or fail, or want to know more."""
    before = copy.deepcopy(document)
    try:
        decided = injection.decide(document, config, Untouchable())  # type: ignore[arg-type]
        done = decided.apply(document)
    except (GpuRuntimeError, AskedError):
        return True
    assert done or document == before
    return done


def passes(bench: Bench, data: bytes, config: Config, name: str = "gpu-container-runtime") -> bool:
    """Return whether the launcher passes on the create of a bundle with *data*."""
    content = companion.content(config, None)
    assert content is not None
    write_companion(bench, content.decode())
    bundle = write_bundle(bench, data)
    started = bench.runtime("create", "--bundle", str(bundle), "c1", name=name).who
    assert started in ("python", "lowlevel/runc")
    return started == "lowlevel/runc"


# Parts of requests, and strings that resemble them.
NAMES = st.sampled_from(
    [
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "PATH"),
        *("CUDA_VERSION", "DOCKER_RESOURCE_GPU", "NVIDIA", "VIDIA_VISIBLE_DEVICES", "é"),
    ]
)
DEVICES = st.sampled_from(
    ["", "all", "none", "void", "0", "nvidia.com/gpu=0", "vendor.com/net=1", "runtime.x/gpu=0"]
)
KEYS = st.sampled_from(
    ["cdi.k8s.io/x", "cdi.k8s.io", "x.io/gpu", "nvidia.com/a", "cdi.k8s.ioé/x", "other", "é.io/x"]
)
PATHS = st.sampled_from(
    [
        *("/var/run/nvidia-container-devices/all", "/var/run//nvidia-container-devices/0"),
        *("/var/run/./nvidia-container-devices/imex/0", "/var/run/nvidia-container-device/0"),
        *("/usr/bin/nvidia-container-runtime-hook", "/x/gpu-container-runtime-hook", "/usr/bin/x"),
        *("/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-container-toolkit", "/dev/null"),
    ]
)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "process": st.fixed_dictionaries(
            {"env": st.lists(st.builds("{}={}".format, NAMES, DEVICES), max_size=4)},
            optional={"capabilities": st.just({"bounding": ["CAP_SYS_ADMIN"]})},
        ),
        "annotations": st.dictionaries(KEYS, DEVICES, max_size=3),
        "mounts": st.lists(
            st.fixed_dictionaries({"source": PATHS, "destination": PATHS}), max_size=3
        ),
        "hooks": st.dictionaries(
            st.sampled_from(["prestart", "createContainer", "poststop"]),
            st.lists(st.fixed_dictionaries({"path": PATHS}), max_size=2),
            max_size=3,
        ),
        "linux": st.fixed_dictionaries({"devices": st.just([])}),
    },
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "swarm-resource": st.sampled_from(["DOCKER_RESOURCE_GPU", "PATH", "é", "VIDIA"]),
        f"{RUNTIME}.mode": st.sampled_from(["auto", "cdi", "jit-cdi", "legacy", "csv"]),
        f"{RUNTIME}.modes.cdi.annotation-prefixes": st.lists(
            st.sampled_from(["cdi.k8s.io/", "x.io/", "", "é.io/", "oth"]), max_size=2
        ),
        f"{RUNTIME}.modes.cdi.default-kind": st.sampled_from(["nvidia.com/gpu", "x.io/gpu"]),
        "accept-nvidia-visible-devices-as-volume-mounts": st.booleans(),
        "accept-nvidia-visible-devices-envvar-when-unprivileged": st.booleans(),
    },
)


def spelled(document: dict[str, Any], how: int) -> bytes:
    """Return *document* as JSON, in one of several spellings."""
    text = json.dumps(document, ensure_ascii=bool(how & 1), indent=how & 2 or None)
    if how & 4:
        text = text.replace("/", "\\/")
    if how & 8:
        text = text.replace("N", "\\u004e").replace("a", "\\u0061")
    return text.encode()


@pytest.mark.property
@settings(
    max_examples=tries(500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(document=DOCUMENTS, values=CONFIGS, how=st.integers(0, 15))
def test_what_is_passed_on_would_not_have_been_changed(
    document: dict[str, Any], values: dict[str, Any], how: int, bench: Bench
) -> None:
    """The property that holds the two together."""
    data = spelled(document, how)
    assert json.loads(data) == document
    config = Config(values, None)
    if passes(bench, data, config):
        assert not changes(document, config)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["gpu-container-runtime", f"{RUNTIME}.cdi", f"{RUNTIME}.legacy"])
def test_what_engines_write_is_passed_on_if_nothing_is_asked_for(
    name: str, path: Path, bench: Bench
) -> None:
    """A word that is in each of their files would make each container slow."""
    data = path.read_bytes()
    config = Config({}, None)
    asks = path.stem.endswith("-gpu")
    assert passes(bench, data, config, name) is not asks
    assert changes(json.loads(data), config) is asks


def test_each_engine_has_been_recorded() -> None:
    """With a container that asks, as the control, and some that do not."""
    names = {path.stem for path in RECORDED}
    for engine in ("docker", "containerd", "podman", "cri"):
        recorded_names = {name for name in names if name.startswith(f"{engine}-")}
        assert f"{engine}-gpu" in recorded_names
        assert len(recorded_names) >= 2
