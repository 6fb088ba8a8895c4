# SPDX-License-Identifier: Apache-2.0
"""What a container asks for: the grammar of NVIDIA_VISIBLE_DEVICES, and who asks nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuruntime import request
from gpuruntime.errors import RequestError
from gpuruntime.request import MAX_REQUEST_CHARS, Request, from_oci, may_ask

KIND = "nvidia.com/gpu"
NOTHING = Request(())
UUID = "GPU-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00"


def asked(*entries: str) -> Request:
    """Return what a container with these environment entries asks for."""
    return from_oci({"process": {"env": list(entries)}}, KIND)


def gpus(*names: str) -> Request:
    """Return a request for GPUs of the default kind."""
    return Request(tuple(f"{KIND}={name}" for name in names))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", NOTHING),
        (",", NOTHING),
        (" , ,\t", NOTHING),
        ("void", NOTHING),
        ("0,void", NOTHING),
        ("all,void", NOTHING),
        ("none", Request((), driver_only=True)),
        ("none,all", Request((), driver_only=True)),
        ("0,none", Request((), driver_only=True)),
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
        ("0,example.com/class=device", Request((f"{KIND}=0", "example.com/class=device"))),
        ("example.com/class=all", Request(("example.com/class=all",))),
        ("../../dev/sda", gpus("../../dev/sda")),
        ("/dev/nvidia0", gpus("/dev/nvidia0")),
        ("a=b", gpus("a=b")),
        ("example.com/class=*", gpus("example.com/class=*")),
    ],
)
def test_the_grammar_of_visible_devices(value: str, expected: Request) -> None:
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
    request_ = from_oci(config, KIND)
    assert request_ == NOTHING
    assert not request_


def test_of_repeats_the_last_counts() -> None:
    """As the low-level runtime reads the list: the image's entry comes first."""
    assert asked("NVIDIA_VISIBLE_DEVICES=all", "A=b", "NVIDIA_VISIBLE_DEVICES=3") == gpus("3")
    assert asked("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=void") == NOTHING
    assert asked("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES") == gpus("0")


def test_the_default_kind_is_the_configured_one() -> None:
    """Another vendor's spec can serve bare names."""
    config = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}
    assert from_oci(config, "example.com/card").devices == ("example.com/card=0",)


def test_a_driver_only_request_is_one() -> None:
    """`none` asks for the driver's files, so it is not nothing."""
    assert asked("NVIDIA_VISIBLE_DEVICES=none")


def test_an_endless_value_is_refused() -> None:
    """A mebibyte of names is an attack or a mistake, and must not cost a start."""
    assert asked(f"NVIDIA_VISIBLE_DEVICES={'x' * MAX_REQUEST_CHARS}")
    with pytest.raises(RequestError, match=f"has {1 << 20} characters"):
        asked(f"NVIDIA_VISIBLE_DEVICES={'x' * (1 << 20)}")


@pytest.mark.property
@given(st.lists(st.text("abc019, \t-:=./", max_size=6), max_size=6))
def test_each_name_is_asked_for_once_and_in_order(tokens: list[str]) -> None:
    """Whatever the blanks and repeats, no device is injected twice."""
    found = asked(f"NVIDIA_VISIBLE_DEVICES={','.join(tokens)}").devices
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
        # Of two backslashes the second is escaped: harmless, but towards Python.
        rb'["\\u004e"]',
    ],
)
def test_what_may_be_a_request_is_read(data: bytes) -> None:
    """An escape must not hide the variable from us and show it to runc."""
    assert may_ask(data)


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
    assert not may_ask(data)


@pytest.mark.property
@given(st.sets(st.integers(0, 21)), st.booleans())
def test_no_spelling_of_the_variable_is_missed(positions: set[int], upper: bool) -> None:
    """Whatever JSON decodes to our variable is noticed in the bytes."""
    data = escaped("NVIDIA_VISIBLE_DEVICES", *positions)
    if upper:
        data = data.replace(b"\\u004e", b"\\u004E").replace(b"\\u005f", b"\\u005F")
    assert json.loads(data) == ["NVIDIA_VISIBLE_DEVICES=0"]
    assert may_ask(data)


def test_every_trigger_is_part_of_a_word() -> None:
    """A trigger with another character could be spelled with an escape that we let pass."""
    assert all(set(word) <= request._WORD for word in request.TRIGGERS)
