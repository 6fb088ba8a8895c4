# SPDX-License-Identifier: Apache-2.0
"""Laws of what a container may ask for, whatever it writes and the operator configured."""

from __future__ import annotations

import copy
import json
import posixpath
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuruntime.config import Config
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.oci import bundle
from gpuruntime.request.parse import Request, from_oci

pytestmark = pytest.mark.property

# A create waits for the answer. Measured are fractions of a millisecond; the rest is for CI.
SLOWEST = timedelta(seconds=2)
RUNTIME = "nvidia-container-runtime"
DIRECTORY = "/var/run/nvidia-container-devices"
DEVICES = "NVIDIA_VISIBLE_DEVICES"
SWARM = "DOCKER_RESOURCE_GPU"
ENV_ACCEPTED = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS_ACCEPTED = "accept-nvidia-visible-devices-as-volume-mounts"
DEFAULT_KIND = f"{RUNTIME}.modes.cdi.default-kind"
CAPABILITIES = {"compat32", "compute", "display", "graphics", "ngx", "utility", "video"}
OUR_VENDORS = ("nvidia.com/", "runtime.nvidia.com/", "management.nvidia.com/")

NAMES = [
    *("0", "1", "7", "0:1", "0/1", "all", "none", "void", "ALL", "..", "../0", "-1", " 0 ", ""),
    *("GPU-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00", "GPU-5f1e", "0000:3b:00.0", "3B:00.0"),
    *("MIG-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00", "MIG-GPU-5f1e/1/0"),
    *("nvidia.com/gpu=0", "nvidia.com/gpu=all", "nvidia.com/mig=0:1", "example.com/card=0"),
    *("runtime.nvidia.com/gpu=0", "runtime.nvidia.com/gpu=all", "management.nvidia.com/gpu=all"),
    *("management.nvidia.com/mig=0", "nvidia.com/gpu", "example.com/card=", "a/b=c", "=", "/"),
]
WORDS = ["", "all", "none", "void", "enabled", "1", "true", "x", "0,1", "channel3", "1048576"]
SETTINGS = {
    "CUDA_VERSION": ["", "9.0", "v11.6", "foo", "9."],
    "NVIDIA_REQUIRE_CUDA": ["", "cuda>=11.0", "(("],
    "NVIDIA_DRIVER_CAPABILITIES": ["", "all", "compute,utility", "video", "foo", " compute ,"],
    **dict.fromkeys(
        [
            *("NVIDIA_DISABLE_REQUIRE", "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS", "NVIDIA_MOFED"),
            *("NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES", "NVIDIA_REQUIRE_ARCH"),
        ],
        WORDS,
    ),
}
MODES = ["auto", "cdi", "jit-cdi", "legacy", "csv", "", "nonsense"]

TEXT = st.text(st.characters(exclude_characters=","), max_size=5)
NAME = st.one_of(st.sampled_from(NAMES), TEXT)
LIST = st.lists(NAME, max_size=4).map(",".join)
VALUES = {
    ENV_ACCEPTED: st.booleans(),
    MOUNTS_ACCEPTED: st.booleans(),
    "disable-require": st.booleans(),
    "features.ignore-imex-channel-requests": st.booleans(),
    "supported-driver-capabilities": st.sampled_from(["all", "compute", "compute,utility", "foo"]),
    "swarm-resource": st.sampled_from(["", SWARM, f"{SWARM}, OTHER"]),
    f"{RUNTIME}.mode": st.sampled_from(MODES),
    f"{RUNTIME}.modes.cdi.annotation-prefixes": st.sampled_from(
        [[], ["cdi.k8s.io/"], ["c", "x/"]]
    ),
    DEFAULT_KIND: st.sampled_from(
        [
            "nvidia.com/gpu",
            "example.com/card",
            "runtime.nvidia.com/gpu",
            "management.nvidia.com/gpu",
        ]
    ),
    f"{RUNTIME}.modes.jit-cdi.driver-capabilities": st.sampled_from(["env", "all"]),
}
CONFIG = st.fixed_dictionaries({}, optional=VALUES)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, NAME),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def environments(draw: st.DrawFn) -> list[str]:
    """Return entries: what asks for devices, and what says more about it."""
    entries = [f"{DEVICES}={value}" for value in draw(st.lists(LIST, max_size=2))]
    entries += [f"{SWARM}={value}" for value in draw(st.lists(LIST, max_size=1))]
    for name in draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=3)):
        entries.append(f"{name}={draw(st.sampled_from(SETTINGS[name]))}")
    return draw(st.permutations(entries))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Return an OCI config that asks in any of the ways, or in several."""
    bounding = draw(st.sampled_from([[], ["CAP_CHOWN"], ["CAP_SYS_ADMIN"], ["cap_sys_admin"]]))
    names = draw(st.lists(st.one_of(NAME, st.builds("cdi/{}".format, NAME)), max_size=2))
    names += draw(st.lists(st.sampled_from(["imex/0", "imex/x", "imex/1048576"]), max_size=1))
    return {
        "ociVersion": "1.0.2",
        "process": {"env": draw(environments()), "capabilities": {"bounding": bounding}},
        "mounts": [{"destination": f"{DIRECTORY}/{n}", "source": "/dev/null"} for n in names],
        "annotations": draw(
            st.dictionaries(
                st.sampled_from(["cdi.k8s.io/a", "x/b", "cdi.k8s.iox"]), LIST, max_size=2
            )
        ),
    }


@st.composite
def broken_documents(draw: st.DrawFn) -> dict[str, Any]:
    """Return a document with a value of any type in one place."""
    document = draw(documents())
    mount = document["mounts"][0] if document["mounts"] else document
    place, key = draw(
        st.sampled_from(
            [
                *((document, key) for key in document),
                *((document["process"], key) for key in document["process"]),
                (document["process"]["capabilities"], "bounding"),
                *((mount, key) for key in ("destination", "source")),
                (document["annotations"], "cdi.k8s.io/a"),
            ]
        )
    )
    place[key] = draw(JSON)
    return document


def ask(document: dict[str, Any], values: dict[str, Any]) -> Request | None:
    """Return the request, or None if it is refused."""
    try:
        return from_oci(document, Config(values, None))
    except GpuRuntimeError:
        return None


def answer(document: dict[str, Any], values: dict[str, Any]) -> Request | tuple[str, str]:
    """Return the request, or the error."""
    try:
        return from_oci(document, Config(values, None))
    except GpuRuntimeError as error:
        return type(error).__name__, error.message


def written(document: dict[str, Any]) -> set[str]:
    """Return every name that the container wrote, by whichever way."""
    texts = [entry.partition("=")[2] for entry in document["process"]["env"]]
    texts += document["annotations"].values()
    found = {name for text in texts for name in text.split(",")}
    for mount in document["mounts"]:
        name = mount["destination"][len(DIRECTORY) + 1 :]
        found |= {name, name.removeprefix("cdi/")}
        # cdi/VENDOR/CLASS/NAME is VENDOR/CLASS=NAME.
        found.add("=".join(name.removeprefix("cdi/").rsplit("/", 1)))
        # Slashes at the end, and dots between slashes, say nothing.
        found.add("/".join(p for p in name.split("/") if p not in ("", ".")))
        # A path is a name after its dots are resolved: cdi/../0 is 0.
        found.add(posixpath.normpath(name))
    return found | {name.strip() for name in found}


def is_privileged(document: dict[str, Any]) -> bool:
    """Whether the bounding set has the capability that makes a container privileged."""
    return "CAP_SYS_ADMIN" in document["process"]["capabilities"]["bounding"]


@given(broken_documents(), CONFIG)
@settings(deadline=SLOWEST)
def test_bad_types_end_in_our_own_errors(document: dict[str, Any], values: dict[str, Any]) -> None:
    """Between the file's bytes and the request: nothing else escapes, and soon."""
    try:
        config, doubt = bundle.parse(json.dumps(document).encode())
    except ValueError:
        return
    if doubt is None:
        ask(config, values)


@given(documents(), CONFIG)
@settings(deadline=SLOWEST)
def test_a_request_is_whole(document: dict[str, Any], values: dict[str, Any]) -> None:
    """Each device once, each field in its domain, and nothing beside nothing."""
    before = copy.deepcopy(document)
    request = ask(document, values)
    assert document == before
    if request is None:
        return
    extras = request.extras
    assert len(set(request.devices)) == len(request.devices)
    assert not (request.driver_only and request.devices)
    assert bool(request) == bool(request.devices or request.driver_only)
    assert set(extras.capabilities) <= CAPABILITIES
    assert list(extras.capabilities) == sorted(set(extras.capabilities))
    assert list(extras.requirements) == sorted(extras.requirements)
    assert len(set(extras.imex)) == len(extras.imex)
    assert all(0 <= channel <= 1048575 for channel in extras.imex)
    assert all(entry.what and entry.why for entry in request.ignored)
    if request:
        assert request.mode in ("cdi", "csv", "jit-cdi", "legacy")
        assert request.source in ("annotations", "mounts", "environment", "image")
    else:
        assert (request.mode, request.source) == ("", "")
        assert not any(getattr(extras, name) for name in extras.__slots__)


@given(documents(), CONFIG)
def test_every_name_is_one_that_the_container_wrote(
    document: dict[str, Any], values: dict[str, Any]
) -> None:
    """Except `all`, which an old image stands for."""
    request = ask(document, values)
    if request is None:
        return
    kinds = ("", "runtime.nvidia.com/gpu=", f"{Config(values, None).default_kind}=")
    allowed = {kind + name for kind in kinds for name in written(document)}
    if request.source == "image":
        allowed |= {f"{kind}all" for kind in kinds}
    assert set(request.devices) <= allowed


@given(st.lists(NAME.filter(lambda name: name.strip() not in ("all", "none", "void")), max_size=6))
@example(["1", "0", "1"])
def test_the_order_is_that_of_the_variable(names: list[str]) -> None:
    """Of repeats the first counts."""
    document: dict[str, Any] = {"process": {"env": [f"{DEVICES}={','.join(names)}"]}}
    request = ask(document, {f"{RUNTIME}.mode": "legacy"})
    if request is not None:
        tokens = [name.strip() for name in names]
        assert request.devices == tuple(dict.fromkeys(name for name in tokens if name))


@given(documents(), CONFIG, st.randoms(use_true_random=False))
def test_unrelated_variables_and_their_order_change_nothing(
    document: dict[str, Any], values: dict[str, Any], random: Any
) -> None:
    """Only the order of entries of one name does."""
    expected = answer(document, values)
    other = copy.deepcopy(document)
    by_name: dict[str, list[str]] = {}
    for entry in document["process"]["env"]:
        by_name.setdefault(entry.partition("=")[0], []).append(entry)
    names = [name for name, entries in by_name.items() for _ in entries]
    names += ["PATH", "HOME", "NVIDIA", "VISIBLE_DEVICES"]
    random.shuffle(names)
    unrelated = {name: iter([f"{name}=all"]) for name in names if name not in by_name}
    sources = {name: iter(entries) for name, entries in by_name.items()} | unrelated
    other["process"]["env"] = [next(sources[name]) for name in names]
    assert answer(other, values) == expected


@given(documents(), CONFIG, st.sampled_from(["void", " void ", "0,void", "void,all"]))
def test_after_void_no_device_of_our_kinds_is_left(
    document: dict[str, Any], values: dict[str, Any], value: str
) -> None:
    """Somebody has injected already: injecting twice is injecting once."""
    document["process"]["env"].append(f"{DEVICES}={value}")
    request = ask(document, values)
    if request is not None:
        kinds = (*OUR_VENDORS, f"{Config(values, None).default_kind}=")
        assert not request.driver_only
        assert all("/" in name and "=" in name for name in request.devices)
        assert not any(name.startswith(kinds) for name in request.devices)


@given(documents(), CONFIG)
def test_without_a_grant_there_is_nothing(
    document: dict[str, Any], values: dict[str, Any]
) -> None:
    """Both keys false, no annotation, no privilege: nothing, and no error for the variable."""
    document["process"]["capabilities"]["bounding"] = ["CAP_CHOWN"]
    document["annotations"] = {}
    values = {**values, ENV_ACCEPTED: False, MOUNTS_ACCEPTED: False}
    values["supported-driver-capabilities"] = "all"
    values[f"{RUNTIME}.mode"] = "auto"
    request = ask(document, values)
    assert request is not None
    assert not request


@given(documents(), CONFIG)
def test_management_needs_privilege(document: dict[str, Any], values: dict[str, Any]) -> None:
    """Or the operator's word."""
    request = ask(document, values)
    kind = Config(values, None).default_kind
    if request is not None and not is_privileged(document):
        vendor = "management.nvidia.com/"
        assert kind.startswith(vendor) or not any(n.startswith(vendor) for n in request.devices)


@given(documents(), CONFIG)
def test_privilege_and_acceptance_only_add(
    document: dict[str, Any], values: dict[str, Any]
) -> None:
    """What a container gets under the strict policy it is not refused under the lax one."""
    strict = {**values, ENV_ACCEPTED: False, MOUNTS_ACCEPTED: False}
    request = ask(document, strict)
    if request and request.source in ("environment", "image"):
        assert is_privileged(document)
        assert ask(document, {**strict, ENV_ACCEPTED: True}) == request


@given(documents(), CONFIG)
def test_mig_settings_need_privilege(document: dict[str, Any], values: dict[str, Any]) -> None:
    """Who sets up MIG devices can take them from others."""
    request = ask(document, values)
    if request is not None and request.extras.mig:
        assert is_privileged(document)
