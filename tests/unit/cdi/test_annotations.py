# SPDX-License-Identifier: Apache-2.0
"""Annotations: what a container asks for by them, and which ones a spec may have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi import annotations as rules
from cdi import names
from cdi.errors import CdiError

KEY = "cdi.k8s.io/vendor.class_one"
DEVICES = ["vendor.test/class=a", "vendor.test/class=b"]
GOOD_NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,10}[A-Za-z0-9])?", fullmatch=True)


def category(function: Any, *arguments: Any) -> str:
    """Return the category for which a call is refused."""
    with pytest.raises(CdiError) as error:
        function(*arguments)
    return error.value.category


def test_devices_come_in_the_order_of_keys() -> None:
    """The same container gets the same config, whatever the order of its annotations."""
    found = {"cdi.k8s.io/z": DEVICES[0], "other": "x", "cdi.k8s.io/a": ",".join(DEVICES)}
    assert rules.parse(found) == (
        ["cdi.k8s.io/a", "cdi.k8s.io/z"],
        [*DEVICES, DEVICES[0]],
    )
    assert rules.parse(None) == rules.parse({}) == ([], [])


@pytest.mark.parametrize(
    "value", ["", ",", "bare", f"{DEVICES[0]},", f"{DEVICES[0]}, {DEVICES[1]}", None, 7, [], {}]
)
def test_one_bad_value_spoils_all(value: object) -> None:
    """Half of what was asked for is not what was asked for."""
    found: dict[Any, Any] = {KEY: value, "cdi.k8s.io/z": DEVICES[0]}
    assert category(rules.parse, found) == "device"
    foreign: dict[Any, Any] = {"other": value, 7: value}
    assert rules.parse(foreign) == ([], [])


@pytest.mark.parametrize("found", [[], "x", 7, [("a", "b")]])
def test_what_is_no_map_is_refused(found: Any) -> None:
    """Annotations come from a config that somebody else wrote."""
    assert category(rules.parse, found) == "wrong-type"
    assert category(rules.update, found, "p", "1", []) == "wrong-type"
    assert category(rules.check, found) == "wrong-type"


def test_an_update_is_a_new_map() -> None:
    """What is there stays, also in case of an error."""
    before = {"other": "x"}
    after = rules.update(before, "vendor.class", "pier/4", DEVICES)
    assert after == {"other": "x", "cdi.k8s.io/vendor.class_pier_4": ",".join(DEVICES)}
    assert before == {"other": "x"}
    assert rules.update(None, "p", "1", []) == {"cdi.k8s.io/p_1": ""}
    assert category(rules.update, after, "vendor.class", "pier_4", []) == "key-used"
    assert category(rules.update, before, "p", "1", [DEVICES[0], "x"]) == "device"
    assert category(rules.update, before, "p", "1", [None]) == "device"
    assert before == {"other": "x"}


@pytest.mark.parametrize(
    ("plugin", "device_id", "expected"),
    [
        ("", "1", "plugin-empty"),
        ("", "", "plugin-empty"),
        ("p", "", "device-id-empty"),
        ("p" * 31, "1" * 32, "key-too-long"),
        ("\u00e9" * 16, "1" * 31, "key-too-long"),
        (".p", "1", "key-ends"),
        ("\u00e9", "1", "key-ends"),
        ("p", "/", "key-ends"),
        ("p", "1\u00e9", "key-character"),
        ("p", "1\n", "key-ends"),
        ("p\n", "1", "key-character"),
        ("p/q", "1", "key-character"),
        ("p", "sea:4", "key-character"),
        ("p", "\ud800", "key-character"),
        (None, "1", "key-character"),
        ("p", 7, "key-character"),
    ],
)
def test_keys_that_are_refused(plugin: Any, device_id: Any, expected: str) -> None:
    """In the order in which the reference looks."""
    assert category(rules.request_key, plugin, device_id) == expected


@pytest.mark.property
@given(plugin=GOOD_NAMES, device_id=GOOD_NAMES, devices=st.lists(st.sampled_from(DEVICES)))
def test_what_is_asked_for_is_read_back(plugin: str, device_id: str, devices: list[str]) -> None:
    """But for nothing at all: an empty value fails the reading, in the reference as here."""
    found = rules.update({}, plugin, device_id, devices)
    if devices:
        assert rules.parse(found) == (list(found), devices)
    else:
        assert category(rules.parse, found) == "device"


@pytest.mark.property
@given(st.dictionaries(st.text() | st.integers(), st.text() | st.none() | st.lists(st.text())))
def test_any_map_is_read_or_refused(found: Any) -> None:
    """No other exception, and only qualified names come back."""
    prefixed = {f"{rules.PREFIX}{key}": value for key, value in found.items()}
    for these in (found, prefixed):
        try:
            _, devices = rules.parse(these)
        except CdiError:
            continue
        assert all(names.is_qualified(device) for device in devices)
    list(rules.annotation_problems(found))


@pytest.mark.parametrize(
    "key",
    [
        "name",
        "A",
        "vendor.test/Na-me_1.2",
        "VENDOR.test/x",
        f"{'a' * 63}.b/{'n' * 63}",
        f"{'a' * 253}/x",
        "1/2",
    ],
)
def test_keys_that_a_spec_may_have(key: str) -> None:
    """Kubernetes' rule, letter case aside."""
    rules.check_key(key)
    rules.check({key: "\u00e9\n"})


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "/x",
        "x/",
        "a/b/c",
        "a b",
        "-a",
        "a-",
        "\u00e9",
        "a\n",
        "n" * 64,
        f"{'a' * 254}/x",
        "a..b/x",
        "a_b/x",
        "-a/x",
        "a./x",
        "a\n/x",
        7,
        None,
    ],
)
def test_keys_that_a_spec_may_not_have(key: Any) -> None:
    """Consumers that check would refuse the spec."""
    assert category(rules.check_key, key) == "annotation"
    assert category(rules.check, {key: "x"}) == "annotation"


def test_the_size_is_that_of_keys_and_values_in_bytes() -> None:
    """256 KiB, and not one more."""
    rules.check({"k": "\u00e9" * 131071 + "x"})
    assert category(rules.check, {"k": "\u00e9" * 131072}) == "annotation"
    assert category(rules.check, {"k": 7}) == "annotation"
