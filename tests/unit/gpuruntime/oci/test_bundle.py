# SPDX-License-Identifier: Apache-2.0
"""config.json: read strictly, replaced atomically, everything that is not ours kept."""

from __future__ import annotations

import copy
import json
import os
import resource
import socket
import stat
import time
from pathlib import Path
from typing import Any

import costs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdi import edits
from gpuruntime.errors import BundleError
from gpuruntime.oci.bundle import MAX_CONFIG_BYTES, MAX_DEPTH, MAX_VALUES, Bundle

BIG = 2**63 + 12345678901234567890


def put(place: Path, content: bytes | str | object) -> Path:
    """Write a config.json and return its path."""
    if not isinstance(content, (bytes, str)):
        content = json.dumps(content)
    path = place / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def doubt(place: Path, content: bytes | str | object) -> str | None:
    """Return why a config.json of *content* must not be edited, or None."""
    put(place, content)
    return Bundle(str(place)).parse()[1]


def refusal(place: Path, content: bytes | str | object) -> str:
    """Return why a config.json of *content* is no document at all."""
    put(place, content)
    with pytest.raises(BundleError) as error:
        Bundle(str(place)).parse()
    return error.value.message


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 1}',
        '{"process": {"args": ["x"], "args": ["y"]}}',
        '{"x": [[{"deep": {"b": 1, "b": 2}}]]}',
        '{"hooks": {}, "\\u0068ooks": {}}',
    ],
)
def test_a_member_twice_is_a_doubt_at_any_depth(tmp_path: Path, text: str) -> None:
    """JSON-01: of two members runc takes the last, others the first."""
    assert "twice" in (doubt(tmp_path, text) or "")


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"HOOKS": {}}, '"HOOKS" is a misspelled "hooks"'),
        ({"Hooks": {}}, '"Hooks"'),
        ({"pRocess": {}}, '"pRocess"'),
        ({"process": {"Env": []}}, '"Env"'),
        ({"process": {"user": {"UID": 1}}}, '"UID"'),
        ({"linux": {"Resources": {}}}, '"Resources"'),
        ({"linux": {"resources": {"DEVICES": []}}}, '"DEVICES"'),
        ({"hooks": {"createcontainer": []}}, '"createcontainer"'),
        ({"hook\u017f": {}}, '"hook\u017f" is a misspelled "hooks"'),
        ({"hoo\u212as": {}}, '"hooks"'),
        ({"process": {"capabilities": {"Bounding": ["CAP_SYS_ADMIN"]}}}, '"Bounding"'),
        ({"linux": {"namespaces": [{"Type": "user"}]}}, '"Type" is a misspelled "type"'),
        ({"linux": {"devices": [{"PATH": "/dev/x"}]}}, '"PATH"'),
        ({"linux": {"resources": {"devices": [{"Allow": True}]}}}, '"Allow"'),
        ({"mounts": [{}, {"Source": "/dev/null"}]}, '"Source"'),
        ({"hooks": {"prestart": [{"path": "/x", "ENV": []}]}}, '"ENV"'),
    ],
)
def test_another_letter_case_is_a_doubt(tmp_path: Path, document: object, named: str) -> None:
    """JSON-01: Go reads HOOKS as hooks, crun does not."""
    assert named in (doubt(tmp_path, document) or "")


def test_other_spellings_of_what_is_not_ours_are_not(tmp_path: Path) -> None:
    """We neither read nor write them: no reason to refuse a container."""
    assert (
        doubt(tmp_path, {"Annotation": 1, "linux": {"SECCOMP": {}, "x": {"Devices": 1}}}) is None
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_other_encodings_are_no_json(tmp_path: Path, encoding: str) -> None:
    """JSON-02: a byte order mark included, which Go refuses as well."""
    assert "config.json" in refusal(tmp_path, '{"a": "b"}'.encode(encoding))


def test_bytes_that_are_no_utf8_are_a_doubt_with_their_place(tmp_path: Path) -> None:
    """JSON-02: Go replaces them, so what we wrote would not be what was there."""
    assert doubt(tmp_path, b'{"a": "\xff"}') == "not valid UTF-8 at byte 7"


def test_a_lone_surrogate_cannot_be_stored(tmp_path: Path) -> None:
    """JSON-02: it has no UTF-8; the file stays as it is."""
    path = put(tmp_path, r'{"a": "\ud800"}')
    before = path.read_bytes(), path.stat().st_ino
    bundle = Bundle(str(tmp_path))
    document, _ = bundle.parse()
    with pytest.raises(BundleError, match="surrogate"):
        bundle.store(document)
    assert (path.read_bytes(), path.stat().st_ino) == before
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize(
    "text",
    [
        '{"hooks\\u0000": {}}',
        '{"Process\\u0000x": {}}',
        '{"process": {"env": ["A=1\\u0000"]}}',
        '{"process": {"env\\u0000": []}}',
        '{"mounts": [{"destination": "/a\\u0000b"}]}',
        '{"mounts": [{"destination\\u0000": "/a"}]}',
        '{"linux": {"devices": [{"path": "/dev/a\\u0000"}]}}',
        '{"hooks": {"prestart": [{"args": ["\\u0000"]}]}}',
        '{"root": {"path": "/\\u0000"}}',
    ],
)
def test_a_nul_in_what_we_read_is_a_doubt(tmp_path: Path, text: str) -> None:
    """JSON-02: to a runtime in C, a name or a value ends there."""
    put(tmp_path, text)
    assert Bundle(str(tmp_path)).parse()[1] is not None


def test_a_nul_escape_survives(tmp_path: Path) -> None:
    """JSON-02: valid JSON, and elsewhere not ours to judge."""
    put(tmp_path, '{"a": "\\u0000"}')
    bundle = Bundle(str(tmp_path))
    document, why = bundle.parse()
    assert why is None
    bundle.store(document)
    assert json.loads((tmp_path / "config.json").read_bytes()) == {"a": "\0"}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1} {"b": 2}',
        '{"a": 1} // x',
        '{"a": 1,}',
        "{'a': 1}",
        "",
        " \n",
        "null",
        "[]",
        '"x"',
        "1",
    ],
)
def test_what_is_no_json_object_is_refused_at_once(tmp_path: Path, text: str) -> None:
    """JSON-03, JSON-04: no traceback, no hang."""
    with costs.at_most(1):
        assert refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 10_000 + "}", "has 10000 digits"),
    ],
)
def test_too_much_of_anything_is_a_doubt(tmp_path: Path, text: str, why: str) -> None:
    """JSON-03, JSON-04: it may be right for others, and is nothing that we edit."""
    with costs.at_most(1):
        assert why in (doubt(tmp_path, text) or "")


def test_numbers_out_of_range_are_a_doubt(tmp_path: Path) -> None:
    """JSON-03: read as infinity here and refused by Go."""
    assert "out of range" in (doubt(tmp_path, '{"a": 1e999}') or "")
    assert doubt(tmp_path, '{"a": -0, "b": -0.0, "c": 1e308}') is None


def test_depth_is_limited(tmp_path: Path) -> None:
    """JSON-03: other readers give up earlier than we do."""
    deep: Any = "x"
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert doubt(tmp_path, {"a": deep}) is None
    assert "nested deeper" in (doubt(tmp_path, {"a": [deep]}) or "")


@pytest.mark.parametrize("item", ["{}", "[]", "0", '"aaaa="', '{"":0}'])
def test_very_many_values_are_a_doubt_at_once(tmp_path: Path, item: str) -> None:
    """JSON-03: each takes far more memory than text; nothing of such a document is read."""
    items = [item] * min(5_000_000, MAX_CONFIG_BYTES // (len(item) + 1) - 9)
    put(tmp_path, f'{{"process":{{"env":[{",".join(items)}]}}}}')
    bundle = Bundle(str(tmp_path))
    start = time.process_time()
    assert bundle.parse() == ({}, f"more than {MAX_VALUES} values")
    assert time.process_time() - start < 0.5


def test_as_many_values_as_anybody_needs_are_none(tmp_path: Path) -> None:
    """ENV-13: a hundred thousand variables, and commas within them."""
    env = [f"V{i}=a,b" for i in range(100_000)]
    put(tmp_path, {"process": {"env": env}})
    document, why = Bundle(str(tmp_path)).parse()
    assert why is None
    assert document["process"]["env"] == env


def test_a_huge_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    """JSON-03, JSON-05: a sparse tebibyte costs nothing."""
    path = tmp_path / "config.json"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError, match=f"larger than {MAX_CONFIG_BYTES}"):
        Bundle(str(tmp_path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory", "socket", "device"])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """JSON-05: nothing is followed, nothing is waited for, nothing of it is shown."""
    path = tmp_path / "config.json"
    other = tmp_path / "other"
    other.write_text('{"secret": 1}')
    listener = socket.socket(socket.AF_UNIX)
    try:
        if kind in ("link", "device"):
            path.symlink_to(other if kind == "link" else "/dev/zero")
        elif kind == "dangling":
            path.symlink_to("nothing")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            # An address is short: the path may be longer.
            monkeypatch.chdir(tmp_path)
            listener.bind("config.json")
        with pytest.raises(BundleError) as error:
            Bundle(str(tmp_path))
    finally:
        listener.close()
    assert "secret" not in error.value.lines()
    assert str(path) in error.value.message


def test_a_missing_bundle_is_named(tmp_path: Path) -> None:
    """The path in the message is the one to look at."""
    with pytest.raises(BundleError, match=r"/no/config\.json"):
        Bundle(str(tmp_path / "no"))


SAMPLES: tuple[Any, ...] = (
    None, True, False, 1, 0, -1, 1.5, "x", "", [], {}, [None], [1], ["x"], [[]], [{}], {"x": None}
)  # fmt: skip
OBJECTS, LISTS = (None, {}, {"x": None}), (None, [], [{}])
# Place → those of SAMPLES that may be there; what is in a list is the low-level runtime's concern.
EDITABLE: dict[str, tuple[Any, ...]] = {
    "process": OBJECTS,
    "process.env": (None, [], ["x"]),
    "process.user": OBJECTS,
    "process.user.uid": (1, 0),
    "process.user.gid": (1, 0),
    "process.user.additionalGids": (None, [], [None], [1], ["x"], [[]], [{}]),
    "root": OBJECTS,
    "mounts": LISTS,
    "hooks": OBJECTS,
    "hooks.prestart": LISTS,
    "hooks.createContainer": LISTS,
    "linux": OBJECTS,
    "linux.devices": LISTS,
    "linux.resources": OBJECTS,
    "linux.resources.devices": LISTS,
    "linux.namespaces": LISTS,
    "linux.netDevices": OBJECTS,
    # It is replaced.
    "linux.intelRdt": SAMPLES,
}
EDITS: Any = {
    "env": ["A=b"],
    "deviceNodes": [{"path": "/dev/x", "type": "c", "major": 1, "minor": 3}],
    "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["rbind"]}],
    "hooks": [{"hookName": "createContainer", "path": "/x"}],
    "additionalGids": [7],
}
NEWER: Any = {
    "netDevices": [{"hostInterfaceName": "eth0", "name": "net0"}],
    "intelRdt": {"closID": "x"},
}


@pytest.mark.parametrize("place", EDITABLE)
def test_wrong_types_are_doubts_and_never_a_crash(tmp_path: Path, place: str) -> None:
    """JSON-10: whatever is somewhere, we refuse to edit it or can."""
    edited = []
    *parents, last = place.split(".")
    for value in SAMPLES:
        document: dict[str, Any] = {}
        at = document
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
        put(tmp_path, document)
        config, why = Bundle(str(tmp_path)).parse()
        if why is None:
            edits.apply(copy.deepcopy({**EDITS, **NEWER}), config)
            assert "A=b" in config["process"]["env"]
            assert 7 in config["process"]["user"]["additionalGids"]
            edited.append(value)
    # As JSON: to Python, 1 is True.
    assert list(map(json.dumps, edited)) == [
        text for text in map(json.dumps, SAMPLES) if text in map(json.dumps, EDITABLE[place])
    ]


@pytest.mark.parametrize("uid", [-1, 2**32, 2**64, 1.0, True, "0", None])
def test_a_user_id_out_of_range_is_a_doubt(tmp_path: Path, uid: object) -> None:
    """JSON-11: no wrap to root, and True is not 1."""
    assert doubt(tmp_path, {"process": {"user": {"uid": uid}}}) is not None


def test_a_user_id_in_range_is_none(tmp_path: Path) -> None:
    """The control: the largest id that Linux has."""
    assert doubt(tmp_path, {"process": {"user": {"uid": 2**32 - 1, "gid": 0}}}) is None


# ---- storing ----


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o444, 0o666])
def test_the_mode_is_kept_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    """Whether others may read a bundle is for the engine to decide."""
    path = put(tmp_path, {"a": 1})
    path.chmod(mode)
    old = os.umask(0o077)
    try:
        bundle = Bundle(str(tmp_path))
        bundle.store(bundle.parse()[0])
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_is_kept(tmp_path: Path) -> None:
    """A rootless engine must still be able to read and remove its bundle."""
    path = put(tmp_path, {"a": 1})
    os.chown(path, 4711, 4712)
    bundle = Bundle(str(tmp_path))
    bundle.store(bundle.parse()[0])
    assert (path.stat().st_uid, path.stat().st_gid) == (4711, 4712)


def test_a_hard_linked_template_stays_as_it_is(tmp_path: Path) -> None:
    """The file is replaced, never written to."""
    path = put(tmp_path, {"a": 1})
    os.link(path, tmp_path / "template")
    bundle = Bundle(str(tmp_path))
    bundle.store({"b": 2})
    assert json.loads(path.read_text()) == {"b": 2}
    assert json.loads((tmp_path / "template").read_text()) == {"a": 1}
    assert sorted(os.listdir(tmp_path)) == ["config.json", "template"]


def test_large_integers_are_exact(tmp_path: Path) -> None:
    """JSON-08: a limit of 2^64-1 must not become a float."""
    put(tmp_path, {"limit": BIG, "small": -BIG})
    bundle = Bundle(str(tmp_path))
    bundle.store(bundle.parse()[0])
    assert json.loads((tmp_path / "config.json").read_bytes()) == {"limit": BIG, "small": -BIG}


def test_a_store_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A directory in the way: the temporary file goes, the message names the path."""
    path = put(tmp_path, {"a": 1})
    bundle = Bundle(str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(BundleError, match="cannot replace"):
        bundle.store({})
    assert os.listdir(tmp_path) == ["config.json"]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=12,
)
OURS = {
    "": {"process", "mounts", "hooks", "linux", "root", "annotations", "ociversion"},
    "process": {"env", "user", "args", "cwd", "capabilities", "terminal"},
    "linux": {"devices", "resources", "namespaces", "intelrdt", "netdevices"},
}
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def unknown(where: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return members that OCI does not have, at *where*."""
    keys = KEYS.filter(lambda key: key.lower() not in OURS[where])
    return st.dictionaries(keys, VALUES, max_size=4)


@pytest.mark.property
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(top=unknown(""), process=unknown("process"), linux=unknown("linux"))
def test_unknown_oci_fields_survive_create(
    tmp_path: Path, top: dict[str, Any], process: dict[str, Any], linux: dict[str, Any]
) -> None:
    """JSON-08: what a newer engine writes reaches a newer runtime, whatever we know of it."""
    document = {
        **copy.deepcopy(top),
        "process": {**copy.deepcopy(process), "env": ["PATH=/bin"]},
        "linux": {**copy.deepcopy(linux), "resources": {"devices": [{"allow": False}]}},
    }
    put(tmp_path, document)
    bundle = Bundle(str(tmp_path))
    config, why = bundle.parse()
    assert why is None
    edits.apply(EDITS, config)
    bundle.store(config)
    stored = json.loads((tmp_path / "config.json").read_bytes())
    assert stored["process"].pop("env") == ["PATH=/bin", "A=b"]
    assert stored["process"].pop("user") == {"additionalGids": [7]}
    assert [d["path"] for d in stored["linux"].pop("devices")] == ["/dev/x"]
    assert stored["linux"].pop("resources")["devices"][0] == {"allow": False}
    assert stored.pop("process") == process
    assert stored.pop("linux") == linux
    assert stored.pop("mounts")
    assert stored.pop("hooks")
    assert stored == top
    # 1 == True and 1 == 1.0 to Python: the text says which.
    assert json.dumps(stored) == json.dumps(top)
