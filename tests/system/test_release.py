# SPDX-License-Identifier: Apache-2.0
"""`make release`: what is published, whether its SBOM is one, and that it can be made again."""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import releases
from effort import IS_FULL

TREE = Path(__file__).parents[2]
# What CycloneDX 1.6 requires of the members that we use, and no member that it does not know.
HASH = {
    "type": "object",
    "required": ["alg", "content"],
    "additionalProperties": False,
    "properties": {
        "alg": {"const": "SHA-256"},
        "content": {"type": "string", "pattern": "^[a-fA-F0-9]{64}$"},
    },
}
COMPONENT = {
    "type": "object",
    "required": ["type", "name"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": ["application", "library", "file"]},
        "bom-ref": {"type": "string", "minLength": 1},
        "name": {"type": "string", "minLength": 1},
        "version": {"type": "string", "maxLength": 1024},
        "purl": {"type": "string", "pattern": r"^pkg:(pypi|deb/\w+|generic)/[\w.%+-]+@[\w.%+~-]+"},
        "hashes": {"type": "array", "minItems": 1, "uniqueItems": True, "items": HASH},
        "licenses": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["license"],
                "properties": {"license": {"type": "object", "required": ["id"]}},
            },
        },
    },
}
DOCUMENT = {
    "type": "object",
    "required": ["bomFormat", "specVersion", "metadata", "components"],
    "additionalProperties": False,
    "properties": {
        "bomFormat": {"const": "CycloneDX"},
        "specVersion": {"const": "1.6"},
        "serialNumber": {
            "type": "string",
            "pattern": "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        },
        "version": {"type": "integer", "minimum": 1},
        "metadata": {
            "type": "object",
            "required": ["timestamp", "component"],
            "additionalProperties": False,
            "properties": {
                "timestamp": {
                    "type": "string",
                    "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$",
                },
                "component": COMPONENT,
            },
        },
        "components": {"type": "array", "uniqueItems": True, "items": COMPONENT},
        "dependencies": {
            "type": "array",
            "uniqueItems": True,
            "items": {
                "type": "object",
                "required": ["ref"],
                "additionalProperties": False,
                "properties": {
                    "ref": {"type": "string", "minLength": 1},
                    "dependsOn": {
                        "type": "array",
                        "uniqueItems": True,
                        "items": {"type": "string", "minLength": 1},
                    },
                },
            },
        },
    },
}
pytestmark = pytest.mark.system("make", "gcc", "readelf")


def digests(directory: Path) -> dict[str, str]:
    """Return name → digest of each file in *directory*."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the release of this run."""
    return releases.of_run(tmp_path_factory)


@pytest.fixture(scope="module")
def sbom(release: Path) -> dict[str, Any]:
    """Return its SBOM."""
    (path,) = release.glob("*.cdx.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def problems(document: dict[str, Any]) -> list[str]:
    """Return what of *document* the standard does not allow."""
    checker = jsonschema.Draft7Validator(DOCUMENT)
    found = [error.message for error in checker.iter_errors(document)]
    everything = [document["metadata"]["component"], *document["components"]]
    references = [item["bom-ref"] for item in everything if "bom-ref" in item]
    found += [f"twice: {name}" for name in references if references.count(name) > 1]
    for item in document.get("dependencies", []):
        used = [item.get("ref", ""), *item.get("dependsOn", [])]
        found += [f"nothing is {name}" for name in used if name not in references]
    return found


def test_what_is_published(release: Path) -> None:
    """One file of each kind; Debian's packages where they can be built."""
    names = sorted(path.name for path in release.iterdir())
    wanted = [
        *(r"SHA256SUMS", r"gpuruntime-[\d.]+-linux-\w+\.tar\.gz"),
        *(r"gpuruntime-[\d.]+-py3-none-any\.whl", r"gpuruntime-[\d.]+\.cdx\.json"),
        r"gpuruntime-[\d.]+\.tar\.gz",
    ]
    if shutil.which("dpkg-deb"):
        wanted += [
            r"gpuruntime-nvidia-compat_[\w.-]+\.deb",
            r"gpuruntime_[\w.-]+\.deb",
            r"gpu-node_[\w.-]+\.deb",
        ]
    assert len(names) == len(wanted)
    for pattern in wanted:
        assert [name for name in names if re.fullmatch(pattern, name)], pattern


def test_checksums_are_those_of_all_files(release: Path) -> None:
    """`sha256sum -c` is what users run."""
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = (release / "SHA256SUMS").read_text().splitlines()
    said = {line.split()[1]: line.split()[0] for line in lines}
    found = digests(release)
    del found["SHA256SUMS"]
    assert said == found


def test_the_source_is_enough_to_build_of(release: Path, tmp_path: Path) -> None:
    """It has what `make` needs, and nothing that was built."""
    (path,) = [p for p in release.glob("gpuruntime-*.tar.gz") if "-linux-" not in p.name]
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert {"Makefile", "pyproject.toml", "scripts/install", "packaging/wheel/build.py"} <= names
    assert {"gpuruntime/launcher/launcher.c", "tests/conftest.py", "LICENSE"} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", ".git/"))]
    subprocess.run(["tar", "-C", tmp_path, "-xf", path], check=True)
    (top,) = tmp_path.iterdir()
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
                   cwd=top, check=True, capture_output=True)  # fmt: skip
    (again,) = tmp_path.glob("*.whl")
    (wheel,) = release.glob("*.whl")
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(wheel) as other:
        assert one.namelist() == other.namelist()


def test_the_sbom_is_one(sbom: dict[str, Any]) -> None:
    """Required members, types, patterns; and each reference leads somewhere."""
    assert problems(sbom) == []


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["bomFormat"], None),
        (["specVersion"], "9.9"),
        (["serialNumber"], "1234"),
        (["version"], 0),
        (["metadata", "timestamp"], "yesterday"),
        (["components", 0, "name"], None),
        (["components", 0, "type"], "thing"),
        (["components", 0, "purl"], "click"),
        (["components", 0, "hashes", 0, "content"], "abc"),
        (["components", 0, "colour"], "green"),
        (["components", 1, "bom-ref"], "pkg:pypi/anyio@4.16.0"),
        (["dependencies", 0, "ref"], "nobody"),
    ],
)
def test_what_is_no_sbom_is_seen(
    where: list[str | int], value: object, sbom: dict[str, Any]
) -> None:
    """The controls: each of these changes makes it invalid."""
    changed: Any = copy.deepcopy(sbom)
    inner = changed
    for step in where[:-1]:
        inner = inner[step]
    if value is None:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    assert problems(changed) != []


def test_the_sbom_has_every_pin_package_and_file(release: Path, sbom: dict[str, Any]) -> None:
    """What is left out of it cannot be looked up when a vulnerability is told."""
    components = {item["bom-ref"]: item for item in sbom["components"]}
    text = (TREE / "requirements" / "node.txt").read_text()
    pins = re.findall(r"(?m)^([\w.-]+)==(\S+)", text)
    assert len(pins) >= 4
    for name, version in pins:
        assert components[f"pkg:pypi/{name}@{version}"]["version"] == version
    known = [h["content"] for c in components.values() if c["type"] == "library"
             for h in c.get("hashes", [])]  # fmt: skip
    assert sorted(known) == sorted(re.findall("sha256:([0-9a-f]{64})", text))
    found = {name: digest for name, digest in digests(release).items()
             if name != "SHA256SUMS" and not name.endswith(".cdx.json")}  # fmt: skip
    said = {item["name"]: item["hashes"][0]["content"] for item in components.values()
            if item["type"] == "file"}  # fmt: skip
    assert said == found
    (bundle,) = (name for name in found if "-linux-" in name)
    (inside,) = (d["dependsOn"] for d in sbom["dependencies"] if d["ref"] == f"file:{bundle}")
    if shutil.which("dpkg-query"):
        assert [name for name in inside if re.match(r"pkg:deb/\w+/libc6@", name)]


@pytest.mark.skipif(not IS_FULL, reason="`make test-all` makes a second release")
def test_a_second_release_is_the_same_to_the_byte(release: Path, tmp_path: Path) -> None:
    """Whoever doubts a wheel, a bundle or a package makes it again.

    Neither the mask, the time zone, the locale nor the order of hashes may show.
    """
    with releases.foreign_mask():
        again = releases.build(tmp_path / "again", **releases.FOREIGN)
    assert digests(again) == digests(release)


def test_a_second_wheel_is_the_same_to_the_byte(release: Path, sbom: dict[str, Any]) -> None:
    """Of a release, it is what takes least to make again."""
    time = dt.datetime.fromisoformat(sbom["metadata"]["timestamp"])
    epoch = str(int(time.timestamp()))
    with releases.foreign_mask():
        done = releases.make("wheel", **releases.FOREIGN, SOURCE_DATE_EPOCH=epoch)
    assert done.returncode == 0, done.stderr
    (again,) = (TREE / "build" / "wheel").glob("*.whl")
    assert again.read_bytes() == (release / again.name).read_bytes()
