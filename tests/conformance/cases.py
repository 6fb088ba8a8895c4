# SPDX-License-Identifier: Apache-2.0
"""Run conformance cases: compare with the results of the reference library for the same input.

tests/data/cdi/README.md explains the members of a case. As a program, `cases.py FOLDER` runs every
case of a folder and ends with a line of counts.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from cdi import annotations, document, generate, names, registry, store, validate, version, yamlio
from cdi.errors import CdiError
from cdi.inject import inject

# The reference keeps the mode of its temporary file, which only root can read.
OUR_MODE = "0644"
# Name of a case that the reference accepts → category of our refusal.
REFUSED = {"hook-relative-path": "hook-path"}


class DifferenceError(Exception):
    """The result of a case differs from that of the reference."""


def run(case: dict[str, Any]) -> None:
    """Run *case*; raise DifferenceError if its result differs from the reference."""
    operation = OPERATIONS.get(case["op"])
    if operation is None:
        raise DifferenceError(f'unknown operation "{case["op"]}"')
    # A private directory: files in a directory that others can write to are not trusted.
    with tempfile.TemporaryDirectory() as place:
        operation(case, Path(place))


def same(subject: str, actual: Any, expected: Any) -> None:
    """Raise DifferenceError unless *actual* equals *expected*."""
    if actual != expected:
        raise DifferenceError(f"{subject}: {json.dumps(actual)}, expected {json.dumps(expected)}")


def outcome(operation: Any, *arguments: Any) -> dict[str, Any]:
    """Return {"result": …} or {"error": category} for a call of *operation*."""
    try:
        return {"result": operation(*arguments)}
    except CdiError as error:
        return {"error": error.category}


def normalised(value: Any, where: tuple[str, ...] = ()) -> Any:
    """Return *value* without the members that the Go encoder omits, as the corpus compares it."""
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


def load(case: dict[str, Any], place: Path) -> registry.Registry:
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
        may_trust=lambda _: True,
        decode_yaml=yamlio.decode_all,
    )


def run_inject(case: dict[str, Any], place: Path) -> None:
    """Load, compare the registry, inject, compare the config."""
    specs = load(case, place)
    if case["name"] in REFUSED:
        errors = [
            [error.category for error in file_errors] for file_errors in specs.errors.values()
        ]
        same("errors", errors, [[REFUSED[case["name"]]]])
        same("devices", specs.devices, [])
        return
    if "cache" in case:
        errors = {
            str(Path(path).relative_to(place)): sorted(error.category for error in file_errors)
            for path, file_errors in specs.errors.items()
        }
        expected_errors = {
            path: sorted(file_errors) for path, file_errors in case["cache"]["spec_errors"].items()
        }
        same("errors", errors, expected_errors)
        for attribute in ("devices", "vendors", "classes"):
            same(attribute, getattr(specs, attribute), case["cache"][attribute])
    config = copy.deepcopy(case["oci"])
    before = copy.deepcopy([file.spec for file in specs.files])
    expected = case["expect"]
    try:
        for devices in case.get("calls") or [case["devices"]]:
            config = inject(specs, devices, config)
    except CdiError as error:
        if "error" not in expected:
            raise DifferenceError(f"refused: {error.category}: {error}") from error
        if expected["stage"] == "inject":
            same("category", error.category, expected["error"])
        else:
            same("category", error.category, "unresolvable")
            missing = [name for name in case["devices"] if specs.find(name) is None]
            same("unresolved", missing, expected.get("unresolved", missing))
        if "calls" not in case:
            same("config after the error", config, case["oci"])
    else:
        if "error" in expected:
            raise DifferenceError(f"accepted, expected {expected['error']}")
        same("config", normalised(config), expected["oci"])
    same("specs", [file.spec for file in specs.files], before)


def run_parse_name(case: dict[str, Any], place: Path) -> None:
    """Split a device name, leniently and by its grammar."""
    del place
    text, expected = case["input"], case["expect"]
    result = expected.get("result", {})
    lenient = dict(zip(("vendor", "class", "name"), names.split_device(text)))
    same("lenient", lenient, expected.get("lenient", result.get("lenient")))
    same("qualified", names.is_qualified(text), "error" not in expected)
    try:
        parts = names.parse_qualified(text)
    except CdiError as error:
        category = error.category
        if category == "vendor" and not lenient["vendor"]:
            category = "unqualified"
        same("category", category, expected.get("error"))
    else:
        same("parts", list(parts), [result[part] for part in ("vendor", "class", "name")])


def run_minimum_version(case: dict[str, Any], place: Path) -> None:
    """Compare the minimum version of a document."""
    del place
    spec = document.normalise(yamlio.decode(case["input"]))
    same("version", version.minimum(spec), case["expect"]["result"]["version"])


def run_parse_annotations(case: dict[str, Any], place: Path) -> None:
    """Compare the devices that annotations request."""
    del place
    result = outcome(annotations.parse, case["input"])
    if "result" in result:
        keys, devices = result["result"]
        result = {"result": {"keys": sorted(keys), "devices": sorted(devices)}}
    same("outcome", result, case["expect"])


def run_update_annotations(case: dict[str, Any], place: Path) -> None:
    """Add an annotation that requests devices."""
    del place
    arguments = case["input"]
    result = outcome(
        annotations.update,
        arguments["annotations"] or {},
        arguments["plugin"],
        arguments["deviceID"],
        arguments["devices"],
    )
    if "result" in result:
        result = {"result": {"annotations": dict(result["result"])}}
    same("outcome", result, case["expect"])


def run_spec_name(case: dict[str, Any], place: Path) -> None:
    """Compare the file name of a kind."""
    del place
    arguments = case["input"]
    result = outcome(generate.spec_name, arguments["kind"], arguments.get("transientID"))
    if "result" in result:
        result = {"result": {"name": result["result"]}}
    same("outcome", result, case["expect"])


def run_write(case: dict[str, Any], place: Path) -> None:
    """Write a spec to two directories that do not exist."""
    text, name = case["input"]["text"], case["input"]["name"]
    directories = [str(place / "0"), str(place / "1")]
    spec = yamlio.decode(text)
    result = outcome(lambda: store.save_spec(spec, name, directories, may_trust=lambda _: True))
    if "error" in result:
        same("outcome", result, case["expect"])
        same("files", [str(p) for p in place.rglob("*") if p.is_file()], [])
        return
    if "error" in case["expect"]:
        raise DifferenceError(f"written, expected {case['expect']['error']}")
    written = []
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        content = path.read_text()
        parsed = json.loads(content) if path.suffix == ".json" else yamlio.decode(content)
        written.append(
            {
                "path": str(path.relative_to(place)),
                "mode": f"{path.stat().st_mode & 0o7777:04o}",
                "content": parsed,
                "starts_with_dashes": content.startswith("---"),
            }
        )
    expected_files = [{**file, "mode": OUR_MODE} for file in case["expect"]["result"]["files"]]
    same("files", written, expected_files)


def run_schema(case: dict[str, Any], place: Path) -> None:
    """Validate a document, unchanged, by the lenient schema."""
    del place
    arguments = case["input"]
    is_valid = validate.reference_verdict(arguments["text"], arguments["filename"])
    same("valid", is_valid, case["expect"]["result"]["valid"])


OPERATIONS = {
    "inject": run_inject,
    "parse-qualified-name": run_parse_name,
    "parse-annotations": run_parse_annotations,
    "update-annotations": run_update_annotations,
    "spec-name": run_spec_name,
    "write": run_write,
    "minimum-version": run_minimum_version,
    "schema": run_schema,
}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the cases of *folder*, sorted: file name → case."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    """Run a folder of cases; print the failing cases, then the counts."""
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit("usage: cases.py FOLDER\nhint: make conformance CASES=FOLDER")
    failed = 0
    cases = read(Path(sys.argv[1]))
    for name, case in cases.items():
        try:
            run(case)
        except Exception as error:  # noqa: BLE001 (a case that breaks us is a case that fails)
            failed += 1
            is_difference = isinstance(error, DifferenceError)
            why = str(error) if is_difference else traceback.format_exc().strip().splitlines()[-1]
            print(f"{name}: {why}")
    print(f"{len(cases) - failed} passed, {failed} failed")
    sys.exit(1 if failed or not cases else 0)


if __name__ == "__main__":
    main()
