# SPDX-License-Identifier: Apache-2.0
"""Laws of engine configs, on files that nobody has written: only ours is added, and goes again."""

from __future__ import annotations

import copy
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from effort import tries
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuruntime.engines import file_changes, file_sets
from gpuruntime.engines.config_paths import EngineConfig, Family
from gpuruntime.engines.runtime_entry import RuntimeEntry

pytestmark = pytest.mark.property

ENTRY = RuntimeEntry("gpuruntime", "/usr/bin/gpu-container-runtime", is_default=True, has_cdi=True)
NAMES = st.sampled_from(
    ["runc", "kata", "x", "a b", 'q"uote', "é", "default_runtime_name", "k.y", "features", "#no"]
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=8)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), TEXTS)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
TABLES = st.dictionaries(NAMES, VALUES, max_size=3)
RUNTIMES = st.dictionaries(NAMES, st.builds(lambda t: {"runtime_type": "t", **t}, TABLES))
BLANKS = st.sampled_from(["", " ", "  ", "\t"])
COMMENTS = st.sampled_from(["", " # a comment", '\t#"]}'])
LINES = st.sampled_from(["", "\n", "# a line = [of\n", "\n\n# two\n\n"])


def _toml_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",\n  ".join(_literal(item) for item in value) + "]"
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, dict):
        pairs = (f"{_toml_string(key)} = {_literal(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    return json.dumps(value)


@st.composite
def toml_texts(draw: st.DrawFn, tables: dict[tuple[str, ...], Any]) -> str:
    """Return *tables*, path to keys, as text in one of many manners."""
    parts = []
    for path, keys in tables.items():
        header = ".".join(_toml_string(part) for part in path)
        parts.append(draw(LINES))
        if path:
            parts.append(f"{draw(BLANKS)}[{draw(BLANKS)}{header}{draw(BLANKS)}]{draw(COMMENTS)}\n")
        for key, value in keys.items():
            parts.append(draw(LINES))
            literal = _literal(value)
            blank = draw(BLANKS)
            parts.append(
                f"{draw(BLANKS)}{_toml_string(key)}{blank}={blank}{literal}{draw(COMMENTS)}\n"
            )
    text = "".join(parts) + draw(LINES)
    if draw(st.booleans()):
        text = text.removesuffix("\n")
    return text


@st.composite
def containerd_texts(draw: st.DrawFn) -> str:
    """Return a config.toml of any version."""
    version = draw(st.sampled_from([1, 2, 3]))
    plugin = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
    cri = ("plugins", plugin[version])
    top = draw(TABLES)
    if version > 1 or draw(st.booleans()):
        top["version"] = version
    tables: dict[tuple[str, ...], Any] = {(): top}
    if draw(st.booleans()):
        tables[cri] = draw(TABLES)
    runtimes = draw(RUNTIMES)
    manner = draw(st.sampled_from(["tables", "inline", "all inline", "dotted"]))
    if manner == "inline":
        tables[(*cri, "containerd")] = {"runtimes": runtimes}
    elif manner == "all inline":
        tables[cri] = {"containerd": {"runtimes": runtimes, "x": 1}}
    elif manner == "dotted":
        # As text, below the table around it.
        top_table = ".".join(_toml_string(part) for part in cri)
        lines = "".join(
            f"containerd.runtimes.{_toml_string(name)}.{_toml_string(key)} = {_literal(value)}\n"
            for name, table in runtimes.items()
            for key, value in table.items()
        )
        tables.pop(cri, None)
        return draw(toml_texts(tables)).rstrip("\n") + f"\n[{top_table}]\n{lines}"
    for name, table in runtimes.items() if manner == "tables" else ():
        tables[(*cri, "containerd", "runtimes", name)] = table
        if draw(st.booleans()):
            tables[(*cri, "containerd", "runtimes", name, "options")] = draw(TABLES)
    if draw(st.booleans()):
        tables[("plugins", "else")] = draw(TABLES)
    return draw(toml_texts(tables))


@st.composite
def crio_texts(draw: st.DrawFn) -> str:
    """Return a crio.conf."""
    tables: dict[tuple[str, ...], Any] = {(): {}, ("crio", "runtime"): draw(TABLES)}
    for name, table in draw(RUNTIMES).items():
        tables[("crio", "runtime", "runtimes", name)] = table
    tables[("crio", "network")] = draw(TABLES)
    return draw(toml_texts(tables))


@st.composite
def podman_texts(draw: st.DrawFn) -> str:
    """Return a containers.conf."""
    tables: dict[tuple[str, ...], Any] = {(): draw(TABLES), ("engine",): draw(TABLES)}
    if draw(st.booleans()):
        tables[("engine",)]["runtime_supports_json"] = draw(st.lists(TEXTS, max_size=2))
    tables[("engine", "runtimes")] = draw(st.dictionaries(NAMES, st.lists(TEXTS, max_size=2)))
    return draw(toml_texts(tables))


@st.composite
def docker_texts(draw: st.DrawFn) -> str:
    """Return a daemon.json."""
    document: dict[str, Any] = dict(draw(TABLES))
    document.pop("features", None)
    if draw(st.booleans()):
        document["features"] = dict.fromkeys(draw(st.sets(NAMES)), True)
    if draw(st.booleans()):
        document["runtimes"] = draw(st.dictionaries(NAMES, TABLES))
    if draw(st.booleans()):
        document["default-runtime"] = "kata"
    indent = draw(st.sampled_from([None, 1, 2, 4, "\t"]))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]))
    text = json.dumps(
        document, indent=indent, separators=separators, ensure_ascii=draw(st.booleans())
    )
    return draw(BLANKS) + text + draw(BLANKS)


FAMILIES: dict[Family, Any] = {
    "docker": docker_texts(),
    "containerd": containerd_texts(),
    "crio": crio_texts(),
    "podman": podman_texts(),
}


def _parse(family: Family, text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text) if family == "docker" else tomllib.loads(text)
    return document


def _without_ours(value: Any, before: Any) -> Any:
    """Return *value* without what *before* has not; what is in both must not be another value."""
    if isinstance(value, dict) and isinstance(before, dict):
        return {
            key: _without_ours(item, before[key]) for key, item in value.items() if key in before
        }
    if isinstance(value, list) and isinstance(before, list):
        return [item for item in value if item in before]
    return value


def _normal(document: dict[str, Any]) -> dict[str, Any]:
    """Return *document* without the one key that is set anew, and without empty tables."""
    document = copy.deepcopy(document)
    for path in (
        ("default-runtime",),
        ("plugins", "cri", "containerd", "default_runtime_name"),
        ("plugins", "io.containerd.grpc.v1.cri", "containerd", "default_runtime_name"),
        ("plugins", "io.containerd.cri.v1.runtime", "containerd", "default_runtime_name"),
        ("crio", "runtime", "default_runtime"),
        ("engine", "runtime"),
    ):
        table: Any = document
        for part in path[:-1]:
            table = table.get(part, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table.pop(path[-1], None)
    return _pruned(document)


def _pruned(table: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _pruned(v) if isinstance(v, dict) else v for key, v in table.items()}
    return {key: value for key, value in inner.items() if value != {}}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=tries(120), deadline=None)
@given(data=st.data())
def test_configure_adds_ours_and_undo_gives_every_byte_back(
    family: Family, data: st.DataObject
) -> None:
    """Whatever is in the file, in whatever manner: nothing else changes, twice is once."""
    text = data.draw(FAMILIES[family])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config")
        state = str(Path(directory, "state"))
        path.write_bytes(text.encode())
        place = EngineConfig(family, family, str(path), "", "")
        planned = file_sets.to_configure(place, ENTRY).files
        file_changes.configure(file_changes.to_configure(planned, state), state)
        configured = path.read_bytes().decode()
        before, after = _parse(family, text), _parse(family, configured)
        assert _normal(_without_ours(after, before)) == _normal(before)
        assert ENTRY.name in configured
        assert [c for c in file_changes.to_configure(planned, state) if c.before != c.after] == []
        file_changes.undo(file_changes.to_undo(planned, state), state)
        assert path.read_bytes().decode() == text


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=tries(80), deadline=None)
@given(data=st.data())
def test_undo_after_another_edit_leaves_that_edit(family: Family, data: st.DataObject) -> None:
    """What the other has added is there, what we have added is not."""
    text = data.draw(FAMILIES[family])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config")
        state = str(Path(directory, "state"))
        path.write_bytes(text.encode())
        place = EngineConfig(family, family, str(path), "", "")
        file_changes.configure(
            file_changes.to_configure(file_sets.to_configure(place, ENTRY).files, state), state
        )
        configured = path.read_bytes().decode()
        if family == "docker":
            brace = configured.index("{") + 1
            edited = configured[:brace] + '"theirs": 1,' + configured[brace:]
        else:
            edited = f"{configured}\n[theirs]\nkey = 1 # kept"
        path.write_bytes(edited.encode())
        file_changes.undo(
            file_changes.to_undo(file_sets.to_undo(place, ENTRY).files, state), state
        )
        left = _parse(family, path.read_bytes().decode())
        assert left.pop("theirs") == (1 if family == "docker" else {"key": 1})
        assert _pruned(left) == _pruned(_parse(family, text))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=tries(60), deadline=None)
@given(data=st.data())
def test_two_runtimes_are_undone_in_either_order(family: Family, data: st.DataObject) -> None:
    """After the first undo the other is configured, after the second every byte is back."""
    text = data.draw(FAMILIES[family])
    entries = [
        RuntimeEntry(name, f"/opt/{name}", is_default=data.draw(st.booleans()), has_cdi=True)
        for name in ("gpu-a", "gpu-b")
    ]
    gone, left = data.draw(st.permutations(entries))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config")
        state = str(Path(directory, "state"))
        path.write_bytes(text.encode())
        place = EngineConfig(family, family, str(path), "", "")
        for entry in entries:
            config_files = file_sets.to_configure(place, entry).files
            file_changes.configure(file_changes.to_configure(config_files, state), state)
        for entry in (gone, left):
            config_files = file_sets.to_undo(place, entry).files
            file_changes.undo(file_changes.to_undo(config_files, state), state)
            present = path.read_bytes().decode()
            assert entry.path not in present
            assert (left.path in present) == (entry is gone)
        assert path.read_bytes().decode() == text
