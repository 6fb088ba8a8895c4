# SPDX-License-Identifier: Apache-2.0
"""Every problem of a spec in one run: errors as the loader has them, warnings, and lines."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from conformance.cases import REFUSED

from cdi import document, validate
from cdi.validate import SpecFinding

TREE = Path(__file__).parents[3]
CASES = [json.loads(p.read_text()) for p in sorted((TREE / "tests/data/cdi").glob("*.json"))]
LOAD_ERRORS = [case for case in CASES if case.get("expect", {}).get("stage") == "load"]


def edits(**members: Any) -> dict[str, Any]:
    """Return a spec whose one device has edits of *members*."""
    return {
        "cdiVersion": "0.3.0",
        "kind": "vendor.test/class",
        "devices": [{"name": "d", "containerEdits": {"env": ["A=b"], **members}}],
    }


def node(**members: Any) -> dict[str, Any]:
    """Return a spec with a device node of *members*."""
    return edits(deviceNodes=[{"path": "/dev/n", "permissions": "rw", **members}])


def mount(**members: Any) -> dict[str, Any]:
    """Return a spec with a mount of *members*."""
    options = ["ro", "bind"]
    return edits(mounts=[{"hostPath": "/h", "containerPath": "/c", "options": options, **members}])


def hook(**members: Any) -> dict[str, Any]:
    """Return a spec with a hook of *members*."""
    return edits(hooks=[{"hookName": "poststop", "path": "/h", "env": ["A=b"], **members}])


def told(spec: Any, **arguments: Any) -> list[tuple[str, str, str]]:
    """Return (severity, category, where) of what there is to say about *spec*."""
    text = spec if isinstance(spec, str) else json.dumps(spec, ensure_ascii=False)
    found = validate.validate(text, **arguments)
    return [(finding.severity, finding.category, finding.where) for finding in found]


@pytest.mark.parametrize("case", LOAD_ERRORS, ids=lambda case: case["name"])
def test_what_does_not_load_has_that_error_and_a_line(case: dict[str, Any]) -> None:
    """The first error is the loader's; whatever text there is has lines to point to."""
    (spec,) = case["specs"]
    found = validate.validate(spec["text"])
    errors = [finding for finding in found if finding.severity == "error"]
    assert case["expect"]["error"] in {finding.category for finding in errors}
    assert all(finding.line for finding in found if finding.category != "no-data")


@pytest.mark.slow
def test_what_loads_has_no_error() -> None:
    """Of the files in the corpus that the reference loads, but for those that we do not."""
    count = 0
    for case in CASES:
        broken = case.get("cache", {}).get("spec_errors", {})
        for spec in case.get("specs", ()):
            name = f"{spec['dir']}/{spec['filename']}"
            if name.endswith((".json", ".yaml")) and name not in broken and "cache" in case:
                if case["name"] in REFUSED:
                    continue
                found = validate.validate(spec["text"])
                assert not [f for f in found if f.severity == "error"], case["name"]
                count += 1
    assert count >= 200


def test_every_error_is_found_in_one_run_with_its_line() -> None:
    """YAML, in which members are missing, misspelt in case, merged and wrong."""
    text = """\
cdiVersion: "0.2.0"
KIND: vendor.test
devices:
- name: y
  containerEdits: &edits
    Env: [A]
- name: d d
  containerEdits:
    <<: *edits
    mounts:
    - hostPath: ""
- name: e
extra: 1
"""
    found = validate.validate(text)
    assert [(f.line, f.category, f.where) for f in found if f.severity == "error"] == [
        (1, "version-too-low", "cdiVersion"),
        (2, "vendor", "kind"),
        (6, "env", "devices[0].containerEdits.env[0]"),
        (7, "device-name", "devices[1].name"),
        (8, "env", "devices[1].containerEdits.env[0]"),
        (11, "mount-host-path", "devices[1].containerEdits.mounts[0].hostPath"),
        (11, "mount-container-path", "devices[1].containerEdits.mounts[0].containerPath"),
        (12, "empty-edits", "devices[2].containerEdits"),
        (13, "unknown-field", "extra"),
    ]
    assert SpecFinding(
        4,
        "warning",
        "converted-scalar",
        "devices[0].name",
        'without quotes it is no string, and is read as "true"',
    ) in validate.validate(text)


def test_json_has_lines_too() -> None:
    """Even indented with tabs, as only YAML's flow style may be."""
    text = json.dumps(node(path=""), indent="\t")
    (found,) = validate.validate(text)
    assert (found.category, found.line) == (
        "device-path",
        text[: text.index('"path"')].count("\n") + 1,
    )


@pytest.mark.parametrize(
    ("text", "category", "line"),
    [
        ('{"a": 1,\n"a": 2}', "duplicate-key", 2),
        ("a: 1\nb: 2\na: 3\n", "duplicate-key", 3),
        ('{"a": 1,\n"b": ]\n}', "syntax", 2),
        ("a:\n\tb: 1\n", "syntax", 2),
        ("a: !!python/object/apply:os.system ['true']\n", "syntax", 1),
        ("a: &a [*a]\n", "syntax", 1),
        ("a: 1\nb: \0\n", "syntax", 2),
        ("[" * 200_000, "syntax", 1),
        ("{a: " * 200_000, "syntax", 1),
        ("", "no-data", None),
    ],
)
def test_what_does_not_decode_is_one_error(text: str, category: str, line: int | None) -> None:
    """With the line, whoever the decoder was; an empty file has none."""
    found = validate.validate(text)
    assert [(f.severity, f.category) for f in found] == [("error", category)]
    assert found[0].line == line


def test_json_that_readers_in_go_refuse_is_refused() -> None:
    """They take it for YAML, which has neither surrogate escapes nor an escaped slash."""
    for text in (json.dumps(edits(env=["A=\U0001f600"])), r'{"kind": "a\/b"}'):
        assert told(text) == [("error", "syntax", "")]
    assert told(json.dumps(edits(env=["A=\\/"]))) == []


ENV = "devices[0].containerEdits.env"
NODE = "devices[0].containerEdits.deviceNodes[0]"
MOUNT = "devices[0].containerEdits.mounts[0]"
HOOK = "devices[0].containerEdits.hooks[0]"


@pytest.mark.parametrize(
    ("spec", "category", "where"),
    [
        (edits(env=["A=1", "B=2", "A=3"]), "env-repeated", f"{ENV}[2]"),
        (edits(env=["LD_PRELOAD=/x"]), "env-loader", f"{ENV}[0]"),
        (edits(env=["A=\0"]), "control-character", f"{ENV}[0]"),
        (node(path="dev/n"), "relative-path", f"{NODE}.path"),
        (node(path="/dev/../etc"), "unclean-path", f"{NODE}.path"),
        (node(path="/dev/a\nb"), "control-character", f"{NODE}.path"),
        (node(path="/dev/a\0"), "control-character", f"{NODE}.path"),
        (node(permissions="none"), "permissions-none", f"{NODE}.permissions"),
        (node(permissions=""), "permissions-implied", NODE),
        (mount(hostPath="h"), "relative-path", f"{MOUNT}.hostPath"),
        (mount(hostPath="/"), "broad-path", f"{MOUNT}.hostPath"),
        (mount(hostPath="/a/../b"), "unclean-path", f"{MOUNT}.hostPath"),
        (mount(hostPath="/sys"), "kernel-path", f"{MOUNT}.hostPath"),
        (mount(hostPath="/a\n"), "control-character", f"{MOUNT}.hostPath"),
        (mount(containerPath="c"), "relative-path", f"{MOUNT}.containerPath"),
        (mount(containerPath="//."), "broad-path", f"{MOUNT}.containerPath"),
        (mount(containerPath="/c/.."), "unclean-path", f"{MOUNT}.containerPath"),
        (mount(containerPath="/./proc/sys"), "kernel-path", f"{MOUNT}.containerPath"),
        (mount(containerPath="/a\0"), "control-character", f"{MOUNT}.containerPath"),
        (mount(options=["bind"]), "mount-writable", MOUNT),
        (mount(options=["rbind", "rw"]), "mount-writable", MOUNT),
        (mount(options=["ro"]), "mount-not-bind", MOUNT),
        (mount(options=[]), "mount-not-bind", MOUNT),
        (mount(options=["bind", "ro", "a,b"]), "mount-option", f"{MOUNT}.options[2]"),
        (hook(path="/a/../h"), "unclean-path", f"{HOOK}.path"),
        (hook(timeout=0), "hook-timeout", f"{HOOK}.timeout"),
        (hook(timeout=-5), "hook-timeout", f"{HOOK}.timeout"),
        (hook(args=["h", "a\0"]), "control-character", f"{HOOK}.args[1]"),
        (hook(env=[]), "hook-without-env", HOOK),
        (hook(env=["LD_LIBRARY_PATH=/x"]), "env-loader", f"{HOOK}.env[0]"),
        ({**edits(), "kind": "v/class"}, "short-name", "kind"),
        ({**edits(), "kind": "vendor/c"}, "short-name", "kind"),
        ({**edits(), "kind": f"{'v' * 254}/class"}, "long-name", "kind"),
        ({**edits(), "kind": f"vendor/{'c' * 64}"}, "long-name", "kind"),
        ({**edits(), "cdiVersion": "0.5.0"}, "version-high", "cdiVersion"),
        ({**edits(), "cdiVersion": "v0.3.0"}, "version-prefix", "cdiVersion"),
    ],
)
def test_a_warning_is_given_with_its_place(
    spec: dict[str, Any], category: str, where: str
) -> None:
    """Only this one, on specs that all loaders take."""
    assert told(spec) == [("warning", category, where)]
    assert not list(document.problems(document.normalise(spec)))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            edits(additionalGids=[5]),
            [("additional-gids", "devices[0].containerEdits.additionalGids")],
        ),
        (
            {**mount(type="bind", options=["ro"]), "cdiVersion": "0.4.0"},
            [("mount-not-bind", MOUNT)],
        ),
        (
            {**mount(type="tmfps", options=["ro"]), "cdiVersion": "0.4.0"},
            [("mount-not-bind", MOUNT)],
        ),
        ({**node(hostPath="n"), "cdiVersion": "0.5.0"}, [("relative-path", f"{NODE}.hostPath")]),
        (
            {**edits(), "annotations": {"bad key": "", "a/b/c": ""}},
            [("annotation", "annotations.bad key"), ("annotation", "annotations.a/b/c")],
        ),
        ({**edits(), "annotations": {"k": "v" * (256 << 10)}}, [("annotation", "annotations")]),
        (
            edits(deviceNodes=[{"path": "/dev/n", "permissions": "r"}] * 2),
            [("path-repeated", "devices[0].containerEdits.deviceNodes[1].path")],
        ),
        (
            edits(
                mounts=[{"hostPath": "/h", "containerPath": "/c", "options": ["bind", "ro"]}] * 2
            ),
            [("path-repeated", "devices[0].containerEdits.mounts[1].containerPath")],
        ),
    ],
)
def test_warnings_on_newer_members(spec: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """Under the version that has them."""
    versions = {"additional-gids": "0.7.0", "annotation": "0.6.0"}
    spec = {**spec, "cdiVersion": versions.get(expected[0][0], spec["cdiVersion"])}
    assert told(spec) == [("warning", *one) for one in expected]


@pytest.mark.parametrize(
    "spec",
    [
        node(),
        mount(),
        hook(args=["h"], timeout=5),
        {**mount(type="tmpfs", hostPath="tmpfs", options=["size=1m"]), "cdiVersion": "0.4.0"},
        {**mount(type="fuse.sshfs", hostPath="x", options=[]), "cdiVersion": "0.4.0"},
        {**node(hostPath="/dev/m"), "cdiVersion": "0.5.0"},
        {**edits(), "kind": f"{'v' * 253}/{'c' * 63}"},
    ],
)
def test_a_good_spec_has_no_warning(spec: dict[str, Any]) -> None:
    """Else nobody would read them."""
    assert told(spec) == []


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        *(("h", True), ("bin/h", True), ("./h", True), ("../h", True), ("~/h", True)),
        *(("/proc/self/exe", True), ("//proc/1/root/h", True), ("/./proc/h", True)),
        *(("/usr/../proc/h", True), ("/../proc", True), ("/a/../b/.././proc/x", True)),
        *(
            ("/dev/fd/3", True),
            ("/dev//fd/3", True),
            ("/dev/stdin", True),
            ("/usr/../dev/fd", True),
        ),
        *(("/dev/../proc/h", True), ("/link/../dev/./stderr", True)),
        *(("/process/h", False), ("/usr/proc/h", False), ("/usr/bin/h", False)),
        *(("/dev/shm/h", False), ("/dev/fdx", False), ("/a/../b/proc/h", False)),
    ],
)
def test_a_hook_that_the_image_could_choose_is_an_error(path: str, *, is_refused: bool) -> None:
    """Low-level runtimes run it as root of the host, where the container's root is."""
    found = [one for one in told(hook(path=path)) if one[0] == "error"]
    assert found == ([("error", "hook-path", f"{HOOK}.path")] if is_refused else [])


def test_warnings_are_given_on_what_does_not_load_too() -> None:
    """Whatever the shape of the rest, all is said in one run."""
    spec = node(path="dev", type="char")
    spec["devices"].append(7)
    spec["devices"][0]["containerEdits"]["mounts"] = "x"
    assert sorted(told(spec)) == [
        ("error", "device-type", f"{NODE}.type"),
        ("error", "wrong-type", "devices[0].containerEdits.mounts"),
        ("error", "wrong-type", "devices[1]"),
        ("warning", "relative-path", f"{NODE}.path"),
    ]


def test_a_member_that_does_not_count_is_named() -> None:
    """Of two names that differ in case only, readers in Go take one."""
    spec = {**edits(), "CdiVersion": "9"}
    assert told(spec) == [("warning", "shadowed-member", "CdiVersion")]
    assert told({**edits(), "ANNOTATIONS": None}) == []


def test_a_deep_document_is_refused() -> None:
    """Deeper than any reader needs to follow."""
    deep = "[" * 900 + "]" * 900
    text = '{"KIND": "v", "x": ' + deep + ', "devices": [{"name": ' + deep + "}]}"
    assert told(text) == [("error", "syntax", "")]


def host(path: str) -> os.stat_result:
    """Return what a host with two programs and a socket would."""
    modes = {
        "/program": stat.S_IFREG | 0o755,
        "/writable": stat.S_IFREG | 0o757,
        "/text": stat.S_IFREG | 0o644,
        "/directory": stat.S_IFDIR | 0o755,
        "/socket": stat.S_IFSOCK | 0o666,
    }
    if path not in modes:
        raise FileNotFoundError(2, "No such file or directory")
    return os.stat_result((modes[path], *[0] * 9))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/program", []),
        ("/writable", [("warning", "hook-program", f"{HOOK}.path")]),
        ("/text", [("warning", "hook-program", f"{HOOK}.path")]),
        ("/directory", [("warning", "hook-program", f"{HOOK}.path")]),
        ("/absent", [("warning", "hook-program", f"{HOOK}.path")]),
    ],
)
def test_hooks_are_looked_up_on_the_host_if_it_is_given(path: str, expected: list[Any]) -> None:
    """A missing hook keeps containers from starting; one that others write to is theirs."""
    assert told(hook(path=path), stat_host=host) == expected
    assert told(hook(path=path)) == []
    # That stage runs in the container.
    assert told(hook(path=path, hookName="startContainer"), stat_host=host) == []


def test_a_socket_may_be_mounted_writable() -> None:
    """It is of no use otherwise; without the host one cannot know."""
    spec = mount(hostPath="/socket", options=["rbind"])
    assert told(spec, stat_host=host) == []
    assert told(spec) == [("warning", "mount-writable", MOUNT)]


def test_no_more_findings_than_one_can_read() -> None:
    """The rest is counted."""
    found = validate.validate(json.dumps(edits(env=["A"] * 5000)))
    errors = [finding for finding in found if finding.severity == "error"]
    assert len(errors) == validate.MAX_FINDINGS + 1
    assert (errors[-1].category, errors[-1].message) == ("more", "4000 more are not shown")
