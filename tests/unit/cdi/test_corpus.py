# SPDX-License-Identifier: Apache-2.0
"""Every case of the CDI corpus: what the reference library makes of the same files and config.

tests/data/cdi-corpus/README.md explains the members of a case.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cdi import edits, names, registry, version
from cdi.errors import CdiError
from gpuruntime import slowpath
from gpuruntime.errors import UnresolvedDeviceError
from gpuruntime.oci import devnodes
from gpuruntime.trust import may_trust

CORPUS = Path(__file__).parents[2] / "data" / "cdi-corpus"
# Case → why we do not do as the reference does, yet or at all.
SCALARS = "YAML 1.1 scalars are not turned into strings yet: refused as of the wrong type"
CASE = "member names in another letter case are unknown members to us, as to the schema"
JSON = "a decision: a .json file is read as JSON, and this is valid JSON"
DEVIATIONS = {
    "format--format-annotation-number": SCALARS,
    "format--format-args-scalars": SCALARS,
    "format--format-name-float": SCALARS,
    "format--format-name-int": SCALARS,
    "format--format-name-leading-zero": SCALARS,
    "format--format-name-n": SCALARS,
    "format--format-name-yes": SCALARS,
    "version--version-float10": SCALARS,
    "version--version-int": SCALARS,
    "format--format-case-insensitive-members": CASE,
    "format--format-gids-other-case": CASE,
    "format--format-json-escaped-slash": JSON,
    "format--format-json-surrogates": JSON,
}


def _cases(*operations: str) -> list[Any]:
    found = []
    for path in sorted(CORPUS.glob("*.json")):
        for case in json.loads(path.read_text()):
            if case["op"] in operations:
                name = f"{path.stem}--{case['name']}"
                marks = ()
                if name in DEVIATIONS:
                    marks = (pytest.mark.xfail(reason=DEVIATIONS[name], strict=True),)
                found.append(pytest.param(case, id=name, marks=marks))
    return found


INJECT = _cases("inject")
MINIMUM = _cases("minimum-version")
NAMES = _cases("parse-qualified-name")


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    """Return text → answer of the slow path for every text of the corpus, asked once."""
    texts = [spec["text"] for case in INJECT for spec in case.values[0]["specs"]]
    texts += [case.values[0]["input"] for case in MINIMUM]
    answers: dict[str, Any] = slowpath.ask(sys.executable, "yaml", {t: t for t in texts})
    return answers


def decoded(texts: dict[str, str], slow: dict[str, Any]) -> dict[str, Any]:
    """Return what the shim's own decoder returns for *texts*."""
    answers = {path: slow[text] for path, text in texts.items()}
    return {
        path: answer["document"]
        if "document" in answer
        else CdiError(answer["category"], answer["error"])
        for path, answer in answers.items()
    }


def normalised(value: Any, where: tuple[str, ...] = ()) -> Any:
    """Return *value* as the corpus compares it: what a printer in Go leaves out is left out."""
    if isinstance(value, list):
        return [normalised(item, (*where, "[]")) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        small = normalised(item, (*where, key))
        if small is None or small in ("", [], {}):
            continue
        zero = small == 0 and not isinstance(small, bool)
        if zero and key in ("uid", "gid") and where == ("process", "user"):
            continue
        if zero and key in ("major", "minor") and where == ("linux", "devices", "[]"):
            continue
        if small is False and key == "enableMonitoring" and where == ("linux", "intelRdt"):
            continue
        result[key] = small
    return result


def load(case: dict[str, Any], place: Path, slow: dict[str, Any]) -> registry.Registry:
    """Write the spec files of *case* below *place* and load them."""
    count = case.get("dirs", 1 + max((spec["dir"] for spec in case["specs"]), default=0))
    directories = [place / str(number) for number in range(count)]
    for directory in directories:
        directory.mkdir()
        directory.chmod(0o755)
    for spec in case["specs"]:
        path = directories[spec["dir"]] / spec["filename"]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(spec["text"].encode())
        path.chmod(0o644)
    return registry.load(
        [str(directory) for directory in directories],
        may_trust=may_trust,
        decode_yaml=lambda texts: decoded(texts, slow),
    )


def inject(known: registry.Registry, devices: list[str], config: dict[str, Any]) -> None:
    """Do what the shim does with the devices and the config."""
    edits.apply(devnodes.complete(known.resolve(devices)), config)


def check_loaded(known: registry.Registry, case: dict[str, Any], place: Path) -> None:
    """Compare the devices that resolve, and why each file that does not load is refused."""
    errors = {
        str(Path(path).relative_to(place)): sorted(text.partition(":")[0] for text in texts)
        for path, texts in known.errors.items()
    }
    wanted = {path: sorted(texts) for path, texts in case["cache"]["spec_errors"].items()}
    assert (sorted(known.devices), errors) == (case["cache"]["devices"], wanted)


@pytest.mark.parametrize("case", INJECT)
def test_a_case_ends_as_with_the_reference(
    case: dict[str, Any], tmp_path: Path, slow: dict[str, Any]
) -> None:
    """What loads, and the config afterwards or the stage at which the request is refused."""
    known = load(case, tmp_path, slow)
    check_loaded(known, case, tmp_path)
    before = copy.deepcopy(known.devices)
    config = copy.deepcopy(case["oci"])
    calls = case.get("calls") or [case["devices"]]
    expected = case["expect"]
    stage = expected.get("stage")
    if stage in ("load", "resolve"):
        with pytest.raises(CdiError) as refused:
            inject(known, case["devices"], config)
        assert refused.value.category == "unresolvable"
        assert config == case["oci"]
        if "unresolved" in expected:
            assert refused.value.message == ", ".join(expected["unresolved"])
    elif stage == "inject":
        with pytest.raises(UnresolvedDeviceError):
            inject(known, case["devices"], config)
        assert config == case["oci"]
    else:
        for devices in calls:
            inject(known, devices, config)
        assert normalised(config) == expected["oci"]
    assert known.devices == before


@pytest.mark.parametrize("case", MINIMUM)
def test_the_minimum_version(case: dict[str, Any], slow: dict[str, Any]) -> None:
    """A spec that claims less than it needs is refused; one that claims more loses readers."""
    document = decoded({"": case["input"]}, slow)[""]
    assert version.minimum(document) == case["expect"]["result"]["version"]


@pytest.mark.parametrize("case", NAMES)
def test_qualified_names(case: dict[str, Any]) -> None:
    """What is a device name, and what a host path or nothing."""
    text, expected = case["input"], case["expect"]
    lenient = expected["lenient"] if "error" in expected else expected["result"]["lenient"]
    vendor, cls, name = names.split_device(text)
    assert {"vendor": vendor, "class": cls, "name": name} == lenient
    assert names.is_qualified(text) is ("error" not in expected)
    if "error" not in expected:
        result = expected["result"]
        wanted = (result["vendor"], result["class"], result["name"])
        assert names.parse_qualified(text) == wanted


def test_the_deviations_are_cases() -> None:
    """A renamed case must not leave its excuse behind."""
    ids = {case.id for case in (*INJECT, *MINIMUM, *NAMES)}
    assert set(DEVIATIONS) <= ids
    assert len(ids) == 448
