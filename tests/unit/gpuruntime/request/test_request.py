# SPDX-License-Identifier: Apache-2.0
"""What a container asks for: the grammar of NVIDIA_VISIBLE_DEVICES, and who asks nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuruntime.config import Config
from gpuruntime.errors import RequestError
from gpuruntime.request import parse
from gpuruntime.request.container import MAX_VALUE_CHARS
from gpuruntime.request.parse import from_oci, may_ask

KIND = "nvidia.com/gpu"
UUID = "GPU-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00"

# The names that are asked for, and whether it is the driver alone.
Asked = tuple[tuple[str, ...], bool]
NOTHING: Asked = ((), False)
DRIVER: Asked = ((), True)


def policy(
    kind: str = KIND,
    *,
    mounts: bool = False,
    env_when_unprivileged: bool = True,
    swarm: tuple[str, ...] = (),
    annotations: tuple[str, ...] = ("cdi.k8s.io/",),
) -> Config:
    """Return an operator's config of the mode cdi."""
    accept, runtime = "accept-nvidia-visible-devices", "nvidia-container-runtime"
    values = {
        f"{accept}-as-volume-mounts": mounts,
        f"{accept}-envvar-when-unprivileged": env_when_unprivileged,
        "swarm-resource": ",".join(swarm),
        f"{runtime}.mode": "cdi",
        f"{runtime}.modes.cdi.default-kind": kind,
        f"{runtime}.modes.cdi.annotation-prefixes": list(annotations),
    }
    return Config(values, None)


def of(config: dict[str, object], operator: Config) -> Asked:
    """Return what a container asks for."""
    found = from_oci(config, operator)
    return found.devices, found.driver_only


def asked(*entries: str) -> Asked:
    """Return what a container with these environment entries asks for."""
    return of({"process": {"env": list(entries)}}, policy())


def gpus(*names: str) -> Asked:
    """Return a request for GPUs of the default kind."""
    return tuple(f"{KIND}={name}" for name in names), False


def named(*names: str) -> Asked:
    """Return a request for devices by their qualified names."""
    return names, False


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", NOTHING),
        (",", NOTHING),
        (" , ,\t", NOTHING),
        ("void", NOTHING),
        ("0,void", NOTHING),
        ("all,void", NOTHING),
        ("none", DRIVER),
        ("none,all", DRIVER),
        ("0,none", DRIVER),
        ("all", gpus("all")),
        ("all,none", gpus("all")),
        ("0,all,7", gpus("all")),
        ("0", gpus("0")),
        ("0,1", gpus("0", "1")),
        ("1,0", gpus("1", "0")),
        (" 0 , 1 ", gpus("0", "1")),
        (",0,,1,", gpus("0", "1")),
        ("0,0,1,0", gpus("0", "1")),
        (UUID, gpus(UUID)),
        ("0:1", gpus("0:1")),
        ("ALL", gpus("ALL")),
        ("Void", gpus("Void")),
        ("nvidia.com/gpu=0", gpus("0")),
        ("0,nvidia.com/gpu=0", gpus("0")),
        ("0,example.com/class=device", named(f"{KIND}=0", "example.com/class=device")),
        ("example.com/class=all", named("example.com/class=all")),
        ("../../dev/sda", gpus("../../dev/sda")),
        ("/dev/nvidia0", gpus("/dev/nvidia0")),
        ("a=b", gpus("a=b")),
        ("example.com/class=*", gpus("example.com/class=*")),
    ],
)
def test_the_grammar_of_visible_devices(value: str, expected: Asked) -> None:
    """The values that images and users write."""
    assert asked(f"NVIDIA_VISIBLE_DEVICES={value}") == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"process": None},
        {"process": {}},
        {"process": {"env": None}},
        {"process": {"env": []}},
        {"process": {"env": ["NVIDIA_VISIBLE_DEVICES"]}},
        {"process": {"env": ["nvidia_visible_devices=0", "XNVIDIA_VISIBLE_DEVICES=0"]}},
        {"process": {"env": ["NVIDIA_VISIBLE_DEVICES =0", "A=NVIDIA_VISIBLE_DEVICES=0"]}},
    ],
)
def test_unset_asks_for_nothing(config: dict[str, object]) -> None:
    """An ordinary container must stay one."""
    assert not from_oci(config, policy())


def test_of_repeats_the_last_counts() -> None:
    """As the low-level runtime reads the list: the image's entry comes first."""
    assert asked("NVIDIA_VISIBLE_DEVICES=all", "A=b", "NVIDIA_VISIBLE_DEVICES=3") == gpus("3")
    assert asked("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=void") == NOTHING


def test_the_default_kind_is_the_configured_one() -> None:
    """Another vendor's spec can serve bare names."""
    config = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}
    assert of(config, policy("example.com/card")) == named("example.com/card=0")


def test_a_driver_only_request_is_one() -> None:
    """`none` asks for the driver's files, so it is not nothing."""
    assert from_oci({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=none"]}}, policy())


def test_none_of_the_machine_s_devices_needs_no_spec() -> None:
    """Where the operator's kind is theirs, all of them are had without one."""
    document = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=none"]}}
    found = from_oci(document, policy(parse.AUTOMATIC_KIND))
    assert found.devices == (f"{parse.AUTOMATIC_KIND}=none",)
    assert found.is_automatic


def test_an_entry_that_is_no_variable_is_not_shown() -> None:
    """LOG-03: it may be the second line of a secret."""
    with pytest.raises(RequestError) as caught:
        asked("NVIDIA_VISIBLE_DEVICES=0", "KEY=first line", "s3cr3t-second-line", "")
    text = caught.value.lines()
    assert "s3cr3t" not in text
    assert "process.env[2], of 18 characters" in text


def test_an_endless_value_is_refused() -> None:
    """A mebibyte of names is an attack or a mistake, and must not cost a start."""
    assert asked(f"NVIDIA_VISIBLE_DEVICES={'x' * MAX_VALUE_CHARS}") != NOTHING
    with pytest.raises(RequestError, match=f"has {1 << 20} characters"):
        asked(f"NVIDIA_VISIBLE_DEVICES={'x' * (1 << 20)}")


@pytest.mark.property
# Without a slash no name is a qualified one.
@given(st.lists(st.text("abc019, \t-:=.", max_size=6), max_size=6))
def test_each_name_is_asked_for_once_and_in_order(tokens: list[str]) -> None:
    """Whatever the blanks and repeats, no device is injected twice."""
    found = asked(f"NVIDIA_VISIBLE_DEVICES={','.join(tokens)}")[0]
    assert len(set(found)) == len(found)
    words = [word.strip() for token in tokens for word in token.split(",")]
    expected = dict.fromkeys(f"{KIND}={word}" for word in words if word)
    assert list(found) == list(expected)


def escaped(text: str, *positions: int) -> bytes:
    """Return *text* as JSON string content with the characters at *positions* escaped."""
    characters = [f"\\u{ord(c):04x}" if i in positions else c for i, c in enumerate(text)]
    return f'["{"".join(characters)}=0"]'.encode()


@pytest.mark.parametrize(
    "data",
    [
        b'{"process":{"env":["NVIDIA_VISIBLE_DEVICES=0"]}}',
        b"NVIDIA_",
        escaped("NVIDIA_VISIBLE_DEVICES", 0),
        escaped("NVIDIA_VISIBLE_DEVICES", 6),
        escaped("NVIDIA_VISIBLE_DEVICES", *range(22)),
        rb'["\u004EVIDIA\u005FVISIBLE_DEVICES=0"]',
        rb'["\u004eVIDIA\u005fVISIBLE_DEVICES=0"]',
        rb'["nvidia.com\/gpu=0"]',
        # Of two backslashes the second is escaped: harmless, but towards Python.
        rb'["\\u004e"]',
    ],
)
def test_what_may_be_a_request_is_read(data: bytes) -> None:
    """An escape must not hide the variable from us and show it to runc."""
    assert may_ask(data, policy())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"process":{"env":["PATH=/bin","NVIDIAN=1"]}}',
        rb'["\u003c\u003e\u0026\u2028\u00e9\u0007\u4e00"]',
        rb'["\u0020\u0021"]',
        '["é 漢字"]'.encode(),
        b"\xff\xfe",
    ],
)
def test_what_asks_for_nothing_is_not_parsed(data: bytes) -> None:
    """Go's habitual escapes must not make every container slow."""
    assert not may_ask(data, policy())


@pytest.mark.property
@given(st.sets(st.integers(0, 21)), st.booleans())
def test_no_spelling_of_the_variable_is_missed(positions: set[int], upper: bool) -> None:
    """Whatever JSON decodes to our variable is noticed in the bytes."""
    data = escaped("NVIDIA_VISIBLE_DEVICES", *positions)
    if upper:
        data = data.replace(b"\\u004e", b"\\u004E").replace(b"\\u005f", b"\\u005F")
    assert json.loads(data) == ["NVIDIA_VISIBLE_DEVICES=0"]
    assert may_ask(data, policy())


def test_every_trigger_is_part_of_a_word() -> None:
    """A trigger with another character could be spelled with an escape that we let pass."""
    operator = policy(mounts=True, swarm=("DOCKER_RESOURCE_GPU",))
    triggers = list(parse.triggers(operator))
    assert len(triggers) > 2
    assert all(set(word) <= parse._WORD for word in triggers)


PRIVILEGED = {"capabilities": {"bounding": ["CAP_CHOWN", "CAP_SYS_ADMIN"]}}


def config(
    *env: str,
    mounts: tuple[str, ...] = (),
    annotations: dict[str, str] | None = None,
    **process: object,
) -> dict[str, object]:
    """Return an OCI config; each of *mounts* is the destination of a mount of /dev/null."""
    return {
        "process": {"env": list(env), **process},
        "mounts": [{"destination": place, "source": "/dev/null"} for place in mounts],
        "annotations": annotations or {},
    }


ALL_GPUS = gpus("all")
MOUNT = "/var/run/nvidia-container-devices"
BY_MOUNT = policy(mounts=True)
MOUNT_ONLY = policy(mounts=True, env_when_unprivileged=False)
SWARM = policy(swarm=("RES_A", "RES_B"))
CDI = {"cdi.k8s.io/plugin_1": f"{KIND}=3,{KIND}=4"}


@pytest.mark.parametrize(
    ("given", "operator", "expected"),
    [
        # Images of old CUDA ask by having no variable of ours (toolkit.md 4.2).
        (config("CUDA_VERSION=7.5"), policy(), ALL_GPUS),
        (config("CUDA_VERSION="), policy(), NOTHING),
        (config("CUDA_VERSION=9", "NVIDIA_REQUIRE_CUDA=cuda>=9.0"), policy(), NOTHING),
        (config("CUDA_VERSION=9", "NVIDIA_REQUIRE_CUDA="), policy(), ALL_GPUS),
        (config("CUDA_VERSION=9", "NVIDIA_VISIBLE_DEVICES="), policy(), NOTHING),
        (config("CUDA_VERSION=9", "NVIDIA_VISIBLE_DEVICES=1"), policy(), gpus("1")),
        # The bounding set decides who is privileged (REQ-02).
        (config("NVIDIA_VISIBLE_DEVICES=1", **PRIVILEGED), MOUNT_ONLY, gpus("1")),
        # A resource of swarm takes the place of the variable (4.3).
        (config("NVIDIA_VISIBLE_DEVICES=all", "RES_A=1"), SWARM, gpus("1")),
        (config("NVIDIA_VISIBLE_DEVICES=all", "RES_A="), SWARM, NOTHING),
        (config("RES_B=2", "RES_A=1, 0"), SWARM, gpus("1", "0", "2")),
        (config("NVIDIA_VISIBLE_DEVICES=1", "RES_C=0"), SWARM, gpus("1")),
        (config("CUDA_VERSION=7", "RES_A="), SWARM, NOTHING),
        # Mounts (4.4, quirk 8, REQ-04); no name is special there.
        (config("NVIDIA_VISIBLE_DEVICES=all", mounts=(f"{MOUNT}/1",)), BY_MOUNT, gpus("1")),
        (config(mounts=(f"{MOUNT}/1", f"{MOUNT}/0/", f"{MOUNT}//1")), BY_MOUNT, gpus("1", "0")),
        (config(mounts=(f"{MOUNT}/all",)), BY_MOUNT, gpus("all")),
        (config(mounts=(f"{MOUNT}/void",)), BY_MOUNT, gpus("void")),
        (config(mounts=(f"{MOUNT}/{KIND}=all",)), BY_MOUNT, gpus("all")),
        (config(mounts=(f"{MOUNT}/cdi/{KIND}=1",)), BY_MOUNT, gpus("1")),
        (config(mounts=(f"{MOUNT}/cdi/{KIND}/1",)), BY_MOUNT, gpus("1")),
        (config(mounts=(f"{MOUNT}/cdi/x",)), BY_MOUNT, NOTHING),
        (config(mounts=(f"{MOUNT}/imex/0",)), BY_MOUNT, NOTHING),
        (config(mounts=(f"{MOUNT}-other/1", MOUNT, f"{MOUNT}/", "/x")), BY_MOUNT, NOTHING),
        # Annotations go before both (4.1); keys are sorted, values are not trimmed.
        (config("NVIDIA_VISIBLE_DEVICES=all", annotations=CDI), policy(), gpus("3", "4")),
        (config(mounts=(f"{MOUNT}/1",), annotations=CDI), BY_MOUNT, gpus("3", "4")),
        (
            config(annotations={"cdi.k8s.io/b": "1", "cdi.k8s.io/a": "0,0", "x/cdi.k8s.io/": "7"}),
            policy(),
            gpus("0", "1"),
        ),
        (config(annotations={"CDI.k8s.io/a": "1"}), policy(), NOTHING),
        (config(annotations={"cdi.k8s.io/a": ""}), policy(), NOTHING),
        (config(annotations=CDI), policy(annotations=()), NOTHING),
        (
            config(annotations={"my.org/a": "1"}),
            policy(annotations=("my.org/",)),
            gpus("1"),
        ),
        # Of another vendor, also beside an injection that has been (design 5).
        (
            config("NVIDIA_VISIBLE_DEVICES=void", annotations={"cdi.k8s.io/a": "v.org/c=d"}),
            policy(),
            named("v.org/c=d"),
        ),
        # Every device of the host, for who may have it (REQ-03).
        (
            config("NVIDIA_VISIBLE_DEVICES=management.nvidia.com/gpu=all", **PRIVILEGED),
            policy(),
            named("management.nvidia.com/gpu=all"),
        ),
        (
            config("NVIDIA_VISIBLE_DEVICES=all"),
            policy("management.nvidia.com/gpu"),
            named("management.nvidia.com/gpu=all"),
        ),
    ],
)
def test_what_counts_and_in_which_order(
    given: dict[str, object], operator: Config, expected: Asked
) -> None:
    """Each row with the section that decides it."""
    assert of(given, operator) == expected
    assert may_ask(json.dumps(given).encode(), operator) or expected == NOTHING


@pytest.mark.parametrize(
    ("given", "operator", "expected", "why"),
    [
        # REQ-01: neither device nor driver, and a warning.
        (config("NVIDIA_VISIBLE_DEVICES=all"), MOUNT_ONLY, NOTHING, "unprivileged container"),
        (
            config(
                "NVIDIA_VISIBLE_DEVICES=all",
                capabilities={"effective": ["CAP_SYS_ADMIN"], "bounding": ["sys_admin"]},
            ),
            MOUNT_ONLY,
            NOTHING,
            "unprivileged container",
        ),
        (config(mounts=(f"{MOUNT}/1",)), policy(), NOTHING, "as-volume-mounts"),
        (
            config("NVIDIA_VISIBLE_DEVICES=0", mounts=(f"{MOUNT}/1",)),
            policy(),
            gpus("0"),
            "as-volume-mounts",
        ),
        # Injecting twice equals once (B086, B132).
        (
            config("NVIDIA_VISIBLE_DEVICES=void", annotations=CDI),
            policy(),
            NOTHING,
            "added already",
        ),
        (
            config("NVIDIA_VISIBLE_DEVICES=void", mounts=(f"{MOUNT}/1",)),
            BY_MOUNT,
            NOTHING,
            "added already",
        ),
    ],
)
def test_what_is_ignored_is_said(
    given: dict[str, object], operator: Config, expected: Asked, why: str
) -> None:
    """A container that starts without its GPU has a reason in the log."""
    assert of(given, operator) == expected
    ignored = from_oci(given, operator).ignored
    assert len(ignored) == 1
    assert why in str(ignored[0])


@pytest.mark.parametrize(
    "given",
    [
        config("NVIDIA_VISIBLE_DEVICES=management.nvidia.com/gpu=all"),
        config(annotations={"cdi.k8s.io/a": "management.nvidia.com/gpu=all"}),
        config(annotations={"cdi.k8s.io/a": "x" * (1 << 20)}),
        config(annotations={"cdi.k8s.io/a": 7}),
        # toolkit.md 4.1
        config("NVIDIA_VISIBLE_DEVICES=0", "BROKEN"),
        config("NVIDIA_VISIBLE_DEVICES=" + ",".join(map(str, range(11_000)))),
        config(mounts=(f"{MOUNT}/{'x' * (1 << 20)}",)),
    ],
)
def test_what_is_not_to_be_had_by_asking(given: dict[str, object]) -> None:
    """Closed, not open: the container does not start."""
    with pytest.raises(RequestError):
        from_oci(given, BY_MOUNT)
