# SPDX-License-Identifier: Apache-2.0
"""Spec directories: a file that cannot be used is named and hides no other, and none hangs us."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cdi import registry, yamlio
from cdi.errors import CdiError
from gpuruntime.trust import may_trust

GOOD = {
    "cdiVersion": "0.5.0",
    "kind": "example.com/card",
    "devices": [{"name": "good", "containerEdits": {"env": ["A=b"]}}],
}


def decode(texts: dict[str, str]) -> dict[str, Any]:
    """Decode YAML as the slow path does."""
    result: dict[str, Any] = {}
    for path, text in texts.items():
        try:
            result[path] = yamlio.decode(text)
        except CdiError as error:
            result[path] = error
    return result


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """Return a spec directory with one good file."""
    directory = tmp_path / "cdi"
    directory.mkdir()
    directory.chmod(0o755)
    (directory / "m-good.json").write_text(json.dumps(GOOD))
    return directory


def load(*directories: Path) -> registry.Registry:
    """Load directories."""
    return registry.load([str(d) for d in directories], may_trust=may_trust, decode_yaml=decode)


def spoil(path: Path, how: str) -> None:
    """Put something at *path* that is no spec."""
    if how == "fifo":
        os.mkfifo(path)
    elif how == "dangling":
        path.symlink_to("nothing")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "huge":
        with path.open("wb") as stream:
            stream.truncate(1 << 40)
    elif how == "writable":
        path.write_text(json.dumps({**GOOD, "kind": "example.com/other"}))
        path.chmod(0o666)
    else:
        path.write_bytes(how.encode("latin-1"))


@pytest.mark.parametrize("ending", ["json", "yaml"])
@pytest.mark.parametrize(
    "how",
    [
        *("fifo", "dangling", "loop", "device", "huge", "writable", "", "{", "[]", "\xff", "\0"),
        *('{"a": 1, "a": 2}', "[" * 100_000, '{"cdiVersion": "9.9.9"}', "a: [", "- " * 5000),
    ],
    ids=lambda how: how[:12].encode().hex() if not how.isalpha() else how,
)
def test_a_file_that_cannot_be_used_is_named_and_hides_no_other(
    specs: Path, ending: str, how: str
) -> None:
    """One bad file of another vendor must not take the node's GPUs away."""
    bad = specs / f"bad.{ending}"
    spoil(bad, how)
    start = time.monotonic()
    known = load(specs)
    assert time.monotonic() - start < 5
    assert list(known.devices) == ["example.com/card=good"]
    assert list(known.errors) == [str(bad)]
    assert len(known.errors[str(bad)]) == 1


def test_a_directory_that_others_can_write_is_not_read(specs: Path, tmp_path: Path) -> None:
    """Anybody could put a spec there that mounts the host's root."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.json").write_text(json.dumps({**GOOD, "kind": "example.com/evil"}))
    other.chmod(0o777)
    known = load(specs, other)
    assert list(known.devices) == ["example.com/card=good"]
    assert "untrusted" in known.errors[str(other)][0]


def test_a_directory_that_is_none_is_an_error_and_a_missing_one_is_not(
    specs: Path, tmp_path: Path
) -> None:
    """Later directories are read all the same."""
    (tmp_path / "file").touch()
    known = load(tmp_path / "missing", tmp_path / "file", specs)
    assert list(known.devices) == ["example.com/card=good"]
    assert list(known.errors) == [str(tmp_path / "file")]


def test_a_linked_directory_and_a_linked_file_are_read(specs: Path, tmp_path: Path) -> None:
    """Administrators link specs into place."""
    (tmp_path / "real.json").write_text(json.dumps({**GOOD, "kind": "example.com/linked"}))
    (specs / "linked.json").symlink_to(tmp_path / "real.json")
    (tmp_path / "link").symlink_to(specs)
    known = load(tmp_path / "link")
    assert sorted(known.devices) == ["example.com/card=good", "example.com/linked=good"]
    assert known.errors == {}


def test_other_endings_and_directories_are_no_specs(specs: Path) -> None:
    """Editors' backups and half-written files stay out."""
    for name in ("x.yml", "x.JSON", "x.json~", "spec.1.tmp", "json"):
        (specs / name).write_text("{")
    (specs / "directory.json").mkdir()
    known = load(specs)
    assert list(known.devices) == ["example.com/card=good"]
    assert known.errors == {}


def test_only_the_files_that_are_no_strict_json_go_the_slow_way(specs: Path) -> None:
    """A start with our own spec costs no second interpreter."""
    asked: list[str] = []

    def decode_yaml(texts: dict[str, str]) -> dict[str, Any]:
        asked.extend(texts)
        return decode(texts)

    (specs / "a.yaml").write_text(yamlio.encode({**GOOD, "kind": "example.com/yaml"}))
    (specs / "b.json").write_text(yamlio.encode({**GOOD, "kind": "example.com/inside"}))
    known = registry.load([str(specs)], may_trust=may_trust, decode_yaml=decode_yaml)
    assert sorted(asked) == [str(specs / "a.yaml"), str(specs / "b.json")]
    assert len(known.devices) == 3


def test_common_edits_are_of_the_kind_alone() -> None:
    """What `none` asks for: the driver without a device."""
    known = registry.Registry()
    assert known.common_edits("example.com/card") is None
    spec: Any = {**GOOD, "containerEdits": {"env": ["C=d"]}}
    known.devices = {"example.com/card=good": (spec, spec["devices"][0])}
    edits = known.common_edits("example.com/card")
    assert edits is not None
    assert edits["env"] == ["C=d"]
    assert known.common_edits("example.com/other") is None
