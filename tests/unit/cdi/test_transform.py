# SPDX-License-Identifier: Apache-2.0
"""Another root: which paths it changes, and that nothing else does."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
from effort import tries
from hypothesis import given, settings
from hypothesis import strategies as st
from property import cdi_documents

from cdi import document, generate, version
from cdi.errors import CdiError
from cdi.transform import transform_root

VALID = st.integers(0, 2**32).map(lambda seed: cdi_documents.valid(random.Random(seed)))
SIDES = st.sampled_from(["host", "container"])
PATHS = st.lists(st.sampled_from(["a", "ab", "run", "x y", "\u00e9", ".b"]), max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)
ROOT = "/run/nvidia/driver"
STAGES = document.HOOK_NAMES


def spec(**edits: Any) -> Any:
    """Return a document whose device has *edits*, and the spec as well."""
    return {
        "cdiVersion": "0.5.0",
        "kind": "vendor.test/class",
        "devices": [{"name": "d", "containerEdits": edits}],
        "containerEdits": copy.deepcopy(edits),
    }


def moved(document_: Any, side: Any, old: str = ROOT, new: str = "") -> Any:
    """Return the edits of *document_* with another root, which the spec's and the device's are."""
    before = copy.deepcopy(document_)
    found: Any = transform_root(document_, old, new, relative_to=side)
    assert document_ == before
    assert document.check(found) == found == generate.canonical(found)
    edits = found["devices"][0]["containerEdits"]
    assert found["containerEdits"] == edits
    return edits


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        (ROOT, "/x", "/x"),
        (f"{ROOT}/lib/a", "/x", "/x/lib/a"),
        (f"{ROOT}/lib/a", "", "/lib/a"),
        (f"{ROOT}/lib/a", "/", "/lib/a"),
        (ROOT, "", "/"),
        (f"{ROOT}//lib/./a/", "/x/", "/x/lib/a"),
        (f"/{ROOT}/lib", "//x", "/x/lib"),
        (f"{ROOT}/a/../b", "/x", "/x/b"),
        (f"{ROOT}s/lib", "/x", f"{ROOT}s/lib"),
        ("/run/nvidia", "/x", "/run/nvidia"),
        (f"{ROOT}/../lib", "/x", f"{ROOT}/../lib"),
        (f"{ROOT}/../../nvidia/driver/lib", "/x", "/x/lib"),
        (f"/host{ROOT}", "/x", f"/host{ROOT}"),
        (ROOT[1:], "/x", ROOT[1:]),
        ("/other//path/", "/x", "/other//path/"),
    ],
)
def test_whole_names_are_compared(path: str, new: str, expected: str) -> None:
    """The incumbent compares characters: its /run/nv begins /run/nvidia."""
    before = spec(mounts=[{"hostPath": path, "containerPath": path}])
    for old in (ROOT, f"{ROOT}/", f"/{ROOT}/."):
        assert moved(before, "host", old, new)["mounts"] == [
            {"hostPath": expected, "containerPath": path}
        ]
        assert moved(before, "container", old, new)["mounts"] == [
            {"hostPath": path, "containerPath": expected}
        ]


def test_the_root_of_all_has_everything_below_it() -> None:
    """`--to` alone puts a directory in front."""
    before = spec(
        mounts=[{"hostPath": "/a", "containerPath": "b"}, {"hostPath": "/", "containerPath": "/"}]
    )
    for old in ("", "/"):
        assert [m["hostPath"] for m in moved(before, "host", old, "/host")["mounts"]] == [
            "/host/a",
            "/host",
        ]
    assert [m["containerPath"] for m in moved(before, "container", "/", "/x")["mounts"]] == [
        "b",
        "/x",
    ]


def test_device_nodes() -> None:
    """On the host's side each says where it is there, for the path inside stays."""
    before = spec(
        deviceNodes=[
            {"path": f"{ROOT}/dev/a", "type": "c"},
            {"path": "/dev/b", "hostPath": f"{ROOT}/dev/b"},
            {"path": f"{ROOT}/dev/c", "hostPath": "/dev/c"},
            {"path": "/dev/d"},
        ]
    )
    assert moved(before, "host")["deviceNodes"] == [
        {"path": f"{ROOT}/dev/a", "hostPath": "/dev/a", "type": "c"},
        {"path": "/dev/b", "hostPath": "/dev/b"},
        {"path": f"{ROOT}/dev/c", "hostPath": "/dev/c"},
        {"path": "/dev/d", "hostPath": "/dev/d"},
    ]
    assert moved(before, "container")["deviceNodes"] == [
        {"path": "/dev/a", "type": "c"},
        {"path": "/dev/b", "hostPath": f"{ROOT}/dev/b"},
        {"path": "/dev/c", "hostPath": "/dev/c"},
        {"path": "/dev/d"},
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_hooks(stage: str) -> None:
    """Only the last stage looks for its program in the container; two are told of paths there."""
    inside, outside = f"{ROOT}/a", "/a"
    arguments = [inside, f"{inside}::{ROOT}/b", f"--link={inside}", f"x::{inside}::{inside}", "::"]
    changed = ["/a", "/a::/b", f"--link={inside}", f"x::/a::{inside}", "::"]
    before = spec(hooks=[{"hookName": stage, "path": inside, "args": arguments}])
    paths = {"host": outside, "container": inside}
    told = {"host": changed, "container": arguments}
    if stage in ("createContainer", "startContainer"):
        told = {"host": arguments, "container": changed}
    if stage == "startContainer":
        paths = {"host": inside, "container": outside}
    for side in ("host", "container"):
        expected = {"hookName": stage, "path": paths[side], "args": told[side]}
        assert moved(before, side)["hooks"] == [expected]
    bare = spec(hooks=[{"hookName": stage, "path": "/x"}])
    assert moved(bare, "host")["hooks"] == [{"hookName": stage, "path": "/x"}]


def test_the_rest_stays() -> None:
    """Variables, arguments' options, and annotations are no paths."""
    before: Any = {
        **spec(
            env=[f"A={ROOT}/a"],
            hooks=[{"hookName": "poststop", "path": "/h", "env": [f"A={ROOT}"]}],
        ),
        "cdiVersion": "0.8.0",
        "annotations": {"a": ROOT},
    }
    for side in ("host", "container"):
        assert transform_root(before, ROOT, "/x", relative_to=side) == generate.canonical(before)


def test_the_version_is_kept_if_it_will_do() -> None:
    """A host path needs 0.5.0; a version that is higher than needed is left alone."""
    for claimed, expected in (("0.3.0", "0.5.0"), ("v0.4.0", "0.5.0"), ("v1.0.0", "v1.0.0")):
        before: Any = {**spec(deviceNodes=[{"path": "/dev/a"}]), "cdiVersion": claimed}
        after = transform_root(before, ROOT, "/x", relative_to="host")
        assert after["cdiVersion"] == expected
        after = transform_root(before, ROOT, "/x", relative_to="container")
        assert after["cdiVersion"] == claimed


@pytest.mark.parametrize(("old", "new"), [("/a", "/a/"), ("", "/"), ("/a/../b", "//b")])
def test_the_same_root_changes_nothing(old: str, new: str) -> None:
    """Nor does it write out what is implied."""
    before = spec(
        deviceNodes=[{"path": "/a/dev/b"}],
        mounts=[{"hostPath": "/b//", "containerPath": "/a/./b"}],
    )
    for side in ("host", "container"):
        assert moved(before, side, old, new) == before["containerEdits"]


def test_what_does_not_load_is_not_rewritten() -> None:
    """The whole document is checked first."""
    bad: Any = {**spec(), "kind": "x"}
    with pytest.raises(CdiError) as error:
        transform_root(bad, "/a", "/b", relative_to="host")
    assert error.value.category == "vendor"


@pytest.mark.property
@settings(max_examples=tries(200))
@given(VALID, SIDES, PATHS, PATHS)
def test_any_document_still_loads(before: Any, side: Any, old: str, new: str) -> None:
    """With as many edits as before, and only path-like members changed."""
    checked = document.check(before)
    kept = copy.deepcopy(checked)
    after = transform_root(checked, old, new, relative_to=side)
    assert checked == kept
    assert document.check(after) == after
    known = version.KNOWN.index
    assert known(after["cdiVersion"].removeprefix("v")) >= known(
        checked["cdiVersion"].removeprefix("v")
    )
    assert without_paths(after) == without_paths(generate.canonical(checked))


def without_paths(value: Any) -> Any:
    """Return *value* without versions and what can be a path."""
    if isinstance(value, dict):
        paths = {"path", "hostPath", "containerPath", "args", "cdiVersion"}
        return {m: without_paths(item) for m, item in value.items() if m not in paths}
    return [without_paths(item) for item in value] if isinstance(value, list) else value


def is_below(path: str, directory: str) -> bool:
    """Return whether *path* is *directory* or below it."""
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


@pytest.mark.slow
@pytest.mark.property
@settings(max_examples=tries(300))
@given(PATHS, PATHS, st.lists(PATHS, max_size=4), st.lists(PATHS, max_size=4), SIDES)
def test_there_and_back_again(
    old: str, new: str, below: list[str], elsewhere: list[str], side: Any
) -> None:
    """Unless something that stays was below the new root before."""
    paths = [re.sub("/+", "/", f"{old}{path}").rstrip("/") or "/" for path in below]
    paths += [path for path in elsewhere if not is_below(path, old) and not is_below(path, new)]
    before = spec(
        env=["A=b"],
        deviceNodes=[{"path": path, "hostPath": path} for path in paths],
        mounts=[{"hostPath": path, "containerPath": path} for path in paths],
        hooks=[
            {"hookName": stage, "path": path, "args": [path, f"{path}::{path}"]}
            for path in paths
            for stage in STAGES
        ],
    )
    there = transform_root(before, old, new, relative_to=side)
    back = transform_root(there, new, old, relative_to=side)
    assert back == generate.canonical(document.check(before))
