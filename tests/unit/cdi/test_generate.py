# SPDX-License-Identifier: Apache-2.0
"""The producer: canonical form, the lowest version, text that every reader takes the same."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest
import yaml
from effort import tries
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from property import cdi_documents

from cdi import annotations as rules
from cdi import document, generate, version, yamlio
from cdi.errors import CdiError

# Whatever some reader of YAML or JSON takes for something else, breaks a line at, or refuses.
ODD = (
    *("y", "N", "no", "On", "off", "yes", "TRUE", "~", "null", "Null", "", " ", "<<", "="),
    *("1e3", "1E3", "0o7", "017", "0x1f", "0b1", "1_000", "1:30", "1.0", "-1", "+1", ".5"),
    *(".inf", "-.Inf", ".nan", "2026-01-02", "2026-01-02T03:04:05Z", "---", "...", "- a", "?"),
    *("a: b", "#a", "a #b", "'", '"', "\\", "/", "\\/", "&a", "*a", "!a", "|", ">", "%", "@", "`"),
    *("{", "}", "[", "]", ",", "\t", "\n", "\r\n", " a ", "\x00", "\x07", "\x1b", "\x7f", "\x80"),
    *("\x85", "\x9f", "\xa0", "\u2028", "\u2029", "\ufeff", "\ufffe", "\uffff", "\u00e9"),
    *("\ud7ff", "\ue000", "\U0001f600", "\U0010ffff", "e\u0301", "\u202e"),
)
STRINGS = st.sampled_from(ODD) | st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("".join(ODD)), max_size=20
)
VALID = st.integers(0, 2**32).map(lambda seed: cdi_documents.valid(random.Random(seed)))
FULL: Any = {
    "containerEdits": {
        "additionalGids": [0],
        "intelRdt": {
            "enableMonitoring": True,
            "schemata": ["L3:0=f"],
            "memBwSchema": "m",
            "l3CacheSchema": "l",
            "closID": "c",
        },
        "mounts": [{"type": "bind", "options": ["ro"], "containerPath": "/b", "hostPath": "/a"}],
        "hooks": [
            {
                "timeout": 0,
                "env": ["A=b"],
                "args": ["h"],
                "path": "/h",
                "hookName": "prestart",
            }
        ],
        "netDevices": [{"name": "net0", "hostInterfaceName": "eth0"}],
        "deviceNodes": [
            {
                "gid": 0,
                "uid": 0,
                "permissions": "rw",
                "fileMode": 0,
                "minor": 2,
                "major": 1,
                "type": "c",
                "hostPath": "/dev/y",
                "path": "/dev/x",
            }
        ],
        "env": ["A=b"],
    },
    "devices": [
        {"containerEdits": {"env": ["A=b"]}, "annotations": {"b": "1", "a": "2"}, "name": "d"}
    ],
    "annotations": {"b": "1", "a": "2"},
    "kind": "vendor.test/class",
    "cdiVersion": "1.1.0",
}


def orders(value: Any, path: str = "") -> dict[str, str]:
    """Return where → member names in order of each object in *value*."""
    found: dict[str, str] = {}
    if isinstance(value, dict):
        found[path] = " ".join(value)
        for member, item in value.items():
            found |= orders(item, f"{path}.{member}")
    elif isinstance(value, list):
        for item in value:
            found |= orders(item, path)
    return found


def with_strings(texts: list[str]) -> dict[str, Any]:
    """Return a document that has *texts* wherever any text may be."""
    paths = [text for text in texts if text] or ["/"]
    return {
        "cdiVersion": "1.1.0",
        "kind": "vendor.test/class",
        "annotations": {text: text for text in texts},
        "devices": [
            {
                "name": "d",
                "annotations": {text: text[::-1] for text in texts},
                "containerEdits": {
                    "env": [f"{text.replace('=', '')}_={text}" for text in texts],
                    "deviceNodes": [{"path": path, "hostPath": path} for path in paths],
                    "hooks": [{"hookName": "poststop", "path": f"/{paths[0]}", "args": texts}],
                    "mounts": [
                        {
                            "hostPath": paths[0],
                            "containerPath": paths[0],
                            "options": texts,
                            "type": texts[0],
                        }
                    ],
                    "intelRdt": {"l3CacheSchema": texts[0], "schemata": texts},
                },
            }
        ],
    }


def category(function: Any, *arguments: Any) -> str:
    """Return the category for which a call is refused."""
    with pytest.raises(CdiError) as error:
        function(*arguments)
    return error.value.category


def test_every_part_is_in_canonical_order() -> None:
    """That of the reference's writer, so that a comparison of two files shows what differs."""
    edits = ".containerEdits"
    assert orders(generate.canonical(document.check(FULL))) == {
        "": "cdiVersion kind annotations devices containerEdits",
        ".annotations": "a b",
        ".devices": "name annotations containerEdits",
        ".devices.annotations": "a b",
        ".devices.containerEdits": "env",
        edits: "env deviceNodes netDevices hooks mounts intelRdt additionalGids",
        f"{edits}.deviceNodes": "path hostPath type major minor fileMode permissions uid gid",
        f"{edits}.netDevices": "hostInterfaceName name",
        f"{edits}.hooks": "hookName path args env timeout",
        f"{edits}.mounts": "hostPath containerPath options type",
        f"{edits}.intelRdt": "closID l3CacheSchema memBwSchema schemata enableMonitoring",
    }


def test_what_is_empty_is_left_out_and_what_is_set_stays() -> None:
    """A zero that a reader in Go tells from nothing is something."""
    lists = ("env", "deviceNodes", "netDevices", "hooks", "mounts", "additionalGids")
    spec = {
        "cdiVersion": "1.1.0",
        "kind": "vendor.test/class",
        "annotations": {},
        "containerEdits": {member: [] for member in lists},
        "devices": [
            {
                "name": "d",
                "annotations": {},
                "containerEdits": {
                    "env": [],
                    "intelRdt": {"closID": "", "schemata": [], "enableMonitoring": False},
                    "additionalGids": [0],
                    "deviceNodes": [
                        {"path": "/a", "hostPath": "", "type": "", "permissions": ""},
                        {"path": "/b", "major": 0, "minor": 0, "fileMode": 0, "uid": 0, "gid": 0},
                    ],
                    "mounts": [
                        {"hostPath": "/a", "containerPath": "/b", "options": [], "type": ""},
                    ],
                    "hooks": [
                        {
                            "hookName": "poststop",
                            "path": "/h",
                            "args": [],
                            "env": [],
                            "timeout": 0,
                        },
                        {"hookName": "poststop", "path": "/h", "args": [""]},
                    ],
                },
            }
        ],
    }
    assert generate.canonical(document.check(spec)) == {
        "cdiVersion": "1.1.0",
        "kind": "vendor.test/class",
        "devices": [
            {
                "name": "d",
                "containerEdits": {
                    "deviceNodes": [
                        {"path": "/a"},
                        {"path": "/b", "fileMode": 0, "uid": 0, "gid": 0},
                    ],
                    "hooks": [
                        {"hookName": "poststop", "path": "/h", "timeout": 0},
                        {"hookName": "poststop", "path": "/h", "args": [""]},
                    ],
                    "mounts": [{"hostPath": "/a", "containerPath": "/b"}],
                    "intelRdt": {},
                    "additionalGids": [0],
                },
            }
        ],
    }
    # An empty list alone would have needed a newer version than what is written of it.
    assert generate.produce(spec)["cdiVersion"] == "0.7.0"


def test_json_has_the_edits_of_the_spec_also_if_there_are_none() -> None:
    """Byte by byte what the reference writes, but for the line's end."""
    spec = generate.spec("vendor.test/class", [("d", {"env": ["A=b"]})], {})
    as_json = generate.encode(spec, "json")
    assert as_json == (
        '{"cdiVersion":"0.3.0","kind":"vendor.test/class",'
        '"devices":[{"name":"d","containerEdits":{"env":["A=b"]}}],"containerEdits":{}}\n'
    )
    as_yaml = generate.encode(spec, "yaml")
    assert as_yaml.startswith('---\ncdiVersion: "0.3.0"\nkind: "vendor.test/class"\n')
    assert as_yaml.count("containerEdits") == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "0.3.0"),
        ({"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]}, "0.4.0"),
        ({"deviceNodes": [{"path": "/a", "hostPath": "/a"}]}, "0.5.0"),
        ({"additionalGids": [0]}, "0.7.0"),
        ({"intelRdt": {}}, "0.7.0"),
        ({"netDevices": [{"hostInterfaceName": "a", "name": "a"}]}, "1.1.0"),
    ],
)
def test_the_lowest_version_is_claimed(change: Any, expected: str) -> None:
    """Every newer claim only loses readers."""
    spec = generate.spec("vendor.test/class", [("d", {"env": ["A=b"]})], change)
    assert spec["cdiVersion"] == expected
    claimed = generate.produce({**spec, "cdiVersion": "0.1.0", "DEVICES": spec["devices"]})
    assert claimed == spec


def test_devices_are_sorted_and_annotations_are_checked() -> None:
    """The same machine gives the same bytes; nobody checks annotations but us."""
    devices: Any = [("b", {"env": ["A=b"]}), ("a", {"env": ["A=b"]})]
    spec = generate.spec("vendor.test/class", devices, {}, annotations={"a/b": "c"})
    assert [device["name"] for device in spec["devices"]] == ["a", "b"]
    assert spec["cdiVersion"] == "0.6.0"
    for bad in ({"a b": ""}, {"a": "x" * (256 << 10)}):
        with pytest.raises(CdiError) as error:
            generate.spec("vendor.test/class", devices, {}, annotations=bad)
        assert error.value.category == "annotation"
    spec["devices"][0]["annotations"] = {"-": ""}
    assert category(generate.produce, spec) == "annotation"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("a/bc", "vendor"), ("ab/c", "class"), ("ab/c.", "class"), ("ab", "vendor")],
)
def test_no_name_that_crashes_a_consumer(kind: str, expected: str) -> None:
    """A vendor or class of one character ends docker's daemon, and makes podman and ctr panic."""
    assert category(generate.spec, kind, [("d", {"env": ["A=b"]})], {}) == expected


@pytest.mark.parametrize("bad", [None, [], "x", {}, {"devices": 7}, {"devices": [None]}])
def test_no_document_of_junk(bad: object) -> None:
    """A library's caller gets our error, too."""
    category(generate.produce, bad)


@pytest.mark.parametrize(
    ("kind", "transient_id", "expected"),
    [
        ("vendor.test/class", None, "vendor.test-class"),
        ("vendor.test/class", "", "vendor.test-class_"),
        ("vendor.test/class", "ns/pod/7", "vendor.test-class_ns_pod_7"),
        ("-a/b-", None, "-a-b-"),
        ("a/b/c", None, "a-b/c"),
    ],
)
def test_names_of_files(kind: str, transient_id: str | None, expected: str) -> None:
    """One file for a kind, or one for a kind and, say, a container."""
    assert generate.spec_name(kind, transient_id) == expected


@pytest.mark.parametrize("kind", ["", "/", "a/", "/a", "ab"])
def test_no_name_without_vendor_and_class(kind: str) -> None:
    """There is nothing to name it by."""
    assert category(generate.spec_name, kind) == "kind"


def test_lone_surrogates_are_refused() -> None:
    """UTF-8 has none, and no reader takes the escape."""
    spec: Any = {**FULL, "annotations": {"a": "\ud83d"}}
    for format_ in ("json", "yaml"):
        assert category(generate.encode, spec, format_) == "syntax"
    assert category(generate.encode_json, {"\udc80": 1}) == "syntax"


@pytest.mark.slow
@pytest.mark.property
@settings(max_examples=tries(300))
@given(st.lists(STRINGS, min_size=1, max_size=6), st.sampled_from(["json", "yaml"]))
@example(list(ODD), "json")
@example(list(ODD), "yaml")
def test_strings_stay_strings_in_every_reader(texts: list[str], format_: str) -> None:
    """Ours, PyYAML's as a reader of YAML 1.1, and a strict one of JSON."""
    spec = document.check(with_strings(texts))
    wanted = generate.canonical(spec)
    text = generate.encode(spec, format_)
    assert generate.canonical(document.check(yamlio.decode(text))) == wanted
    loaded = [yaml.load(text, yaml.CSafeLoader), yaml.safe_load(text)]
    if format_ == "json":
        assert text.count("\n") == 1
        loaded.append(json.loads(text))
    else:
        assert text.startswith("---\n")
    for found in loaded:
        if not found.get("containerEdits", True):
            del found["containerEdits"]
        assert found == wanted
    check_bytes(text)


def check_bytes(text: str) -> None:
    """Look for what readers in Go refuse, or take for a line break."""
    escapes = re.findall(r"\\(?:u(....)|.)", text, re.DOTALL)
    assert not any(0xD800 <= int(escape, 16) < 0xE000 for escape in escapes if escape)
    assert "/" not in re.findall(r"\\(.)", text, re.DOTALL)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", text)
    assert text.encode().decode() == text


@pytest.mark.property
@settings(max_examples=tries(300))
@given(VALID, st.sampled_from(["json", "yaml"]))
def test_what_is_written_loads_as_what_it_was(spec: Any, format_: str) -> None:
    """load(save(x)) is x, for x in canonical form; and writing it again changes no byte."""
    before = copy.deepcopy(spec)
    checked = document.check(spec)
    text = generate.encode(checked, format_)
    loaded = document.check(yamlio.decode(text))
    assert generate.canonical(loaded) == generate.canonical(checked)
    assert generate.encode(loaded, format_) == text
    assert spec == before
    check_bytes(text)


def test_what_is_dropped_for_an_older_version_is_said() -> None:
    """One line for each thing, with the version that would have it."""
    old, dropped = generate.lower(FULL, "1.1.0")
    assert (old, dropped) == (generate.canonical(FULL), [])
    old, dropped = generate.lower(FULL, "v1.0.0")
    assert dropped == [
        'the spec: network device "eth0" (needs 1.1.0)',
        'the spec: intelRdt schemata ["L3:0=f"] (needs 1.1.0)',
        "the spec: intelRdt enableMonitoring true (needs 1.1.0)",
    ]
    assert old["cdiVersion"] == "0.7.0"
    rest = {"closID": "c", "l3CacheSchema": "l", "memBwSchema": "m"}
    old, dropped = generate.lower(FULL, "0.6.0")
    assert dropped[3:] == [
        f"the spec: intelRdt {json.dumps(rest)} (needs 0.7.0)",
        "the spec: group 0 (needs 0.7.0)",
    ]
    old, dropped = generate.lower(FULL, "0.5.0")
    assert dropped[5:] == [
        'the spec: annotation "a" (needs 0.6.0)',
        'the spec: annotation "b" (needs 0.6.0)',
        'device "d": annotation "a" (needs 0.6.0)',
        'device "d": annotation "b" (needs 0.6.0)',
    ]
    assert old["cdiVersion"] == "0.5.0"
    assert list(old) == ["cdiVersion", "kind", "devices", "containerEdits"]


def of(edits: Any, name: str = "d", kind: str = "vendor.test/class") -> Any:
    """Return a document with one device."""
    return generate.produce({"kind": kind, "devices": [{"name": name, "containerEdits": edits}]})


def test_what_says_nothing_is_dropped() -> None:
    """A host path that is the path; the type of a bind mount; RDT with nothing left in it."""
    spec = of(
        {
            "deviceNodes": [{"path": "/a", "hostPath": "/a"}],
            "mounts": [
                {"hostPath": "/a", "containerPath": "/b", "type": "bind", "options": ["rbind"]}
            ],
            "intelRdt": {"schemata": ["x"]},
        }
    )
    assert generate.lower(spec, "1.0.0")[0]["cdiVersion"] == "0.5.0"
    old, dropped = generate.lower(spec, "0.3.0")
    assert dropped[1:] == [
        'device "d": the host path of device node "/a", which is the same (needs 0.5.0)',
        'device "d": the type "bind" of the mount on "/b" (needs 0.4.0)',
    ]
    assert old["cdiVersion"] == "0.3.0"
    assert old["devices"][0]["containerEdits"] == {
        "deviceNodes": [{"path": "/a"}],
        "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["rbind"]}],
    }


TMPFS = {"hostPath": "tmpfs", "containerPath": "/t", "type": "tmpfs"}


@pytest.mark.parametrize(
    ("spec", "limit", "text"),
    [
        (of({"env": ["A=b"]}, "0"), "0.4.0", 'device "0": its name begins with a digit'),
        (
            of({"deviceNodes": [{"path": "/a", "hostPath": "/b"}]}),
            "0.4.0",
            'device "d": device node "/a" has another path, "/b", on the host',
        ),
        (of({"env": ["A=b"]}, kind="vendor.test/a.b"), "0.5.0", "the spec: a dot"),
        (of({"mounts": [TMPFS]}), "0.3.0", 'device "d": the type "tmpfs" of the mount on "/t"'),
        (of({"env": ["A=b"]}), "0.2.0", "no spec is of a version before 0.3.0"),
    ],
)
def test_what_cannot_be_dropped_is_an_error(spec: Any, limit: str, text: str) -> None:
    """Without it, the containers would be others, or not start."""
    before = copy.deepcopy(spec)
    with pytest.raises(CdiError) as error:
        generate.lower(spec, limit)
    assert error.value.category == "version-too-low"
    assert text in error.value.message
    assert spec == before


def test_a_device_is_never_left_without_edits() -> None:
    """No loader takes it, and whoever asks for it wants something."""
    assert category(generate.lower, of({"additionalGids": [7]}), "0.6.0") == "empty-edits"
    assert (
        category(generate.lower, of({"intelRdt": {"schemata": ["x"]}}), "1.0.0") == "empty-edits"
    )
    for unknown in ("", "0.9.0", "latest", "vv1.0.0"):
        assert category(generate.lower, of({"env": ["A=b"]}), unknown) == "version-unknown"


@pytest.mark.property
@settings(max_examples=tries(400))
@given(VALID, st.sampled_from(version.KNOWN[2:]))
def test_a_lowered_document_is_one_of_the_older_version(spec: Any, limit: str) -> None:
    """It loads, claims no more than asked for, and nothing is missing that nobody told of."""
    before = copy.deepcopy(spec)
    checked = document.check(spec)
    try:
        old, dropped = generate.lower(checked, limit)
    except CdiError as error:
        refused = error.category
        event(f"refused: {refused}")
    else:
        refused = ""
    if refused:
        assert refused in ("version-too-low", "empty-edits")
        assert version.minimum(generate.canonical(checked)) > limit
        return
    event("something dropped" if dropped else "nothing dropped")
    assert document.check(old) == old == generate.canonical(old)
    assert version.KNOWN.index(old["cdiVersion"]) <= version.KNOWN.index(limit)
    wanted = {**generate.canonical(checked), "cdiVersion": old["cdiVersion"]}
    assert (old == wanted) == (not dropped)
    assert generate.lower(old, limit) == (old, [])
    assert spec == before


@pytest.mark.property
@settings(max_examples=tries(200))
@given(VALID)
def test_what_is_produced_loads_and_is_of_the_lowest_version(spec: Any) -> None:
    """Or it is refused for something that only a reader puts up with."""
    try:
        made = generate.produce(spec)
    except CdiError as error:
        refused = error.category
    else:
        refused = ""
    if refused:
        assert refused in ("vendor", "class", "annotation")
        return
    assert document.check(made) == made
    assert made["cdiVersion"] == version.minimum(made)
    for owner in (made, *made["devices"]):
        rules.check(owner.get("annotations"))
