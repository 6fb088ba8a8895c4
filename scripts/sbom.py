# SPDX-License-Identifier: Apache-2.0
"""Print a CycloneDX 1.6 document of a release: `sbom.py [--image] DIRECTORY VERSION TIME`.

Of what it is made: the pins of requirements/node.txt, which has those of requirements/runtime.txt
among them, with the digests of every file that a pin allows; the distribution's packages whose
files the bundle has (`bundled-packages` in the directory, see scripts/bundle); the files
themselves. With --image, what is in the image of scripts/image, whose directory has no files but
`bundled-packages`. TIME is in seconds since 1970. The same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

TREE = Path(__file__).parents[1]
PINS = TREE / "requirements" / "runtime.txt"
NODE_PINS = TREE / "requirements" / "node.txt"
NODE_PACKAGE = "gpu-node_"
BUNDLED = "bundled-packages"
LICENSE = [{"license": {"id": "Apache-2.0"}}]
# Names UUIDs of documents that are made of these contents.
NAMESPACE = uuid.UUID("0f1f7b5e-6a0e-5d0c-9d0a-6d5b0a2a7c11")


def pinned(text: str) -> list[dict[str, Any]]:
    """Return a component for each pin in *text*, which is that of a requirements file."""
    components = []
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", text)[1:]:
        name, version = re.match(r"([\w.-]+)==(\S+)", block).groups()  # type: ignore[union-attr]
        purl = f"pkg:pypi/{name.lower()}@{quote(version)}"
        digests = re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
        components.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "purl": purl,
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests],
            }
        )
    return components


def packaged(text: str, distribution: str) -> list[dict[str, Any]]:
    """Return a component for each line of *text*: source, its version, package, its version.

    What comes from no package has "-" for that.
    """
    components = []
    for line in text.splitlines():
        name, version, package, of_package = line.split()
        purl = f"pkg:generic/{name}@{version}"
        if package != "-":
            version = of_package
            name, _, architecture = package.partition(":")
            purl = f"pkg:deb/{distribution}/{quote(name)}@{quote(version, safe='')}"
            purl += f"?arch={architecture}" if architecture else ""
        components.append(
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        )
    return components


def files(directory: Path) -> list[dict[str, Any]]:
    """Return a component for each file in *directory*."""
    return [
        {
            "type": "file",
            "bom-ref": f"file:{path.name}",
            "name": path.name,
            "hashes": [
                {"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}
            ],
        }
        for path in sorted(directory.iterdir())
        if path.name != BUNDLED
    ]


def of_release(directory: Path, version: str, distribution: str) -> dict[str, Any]:
    """Return the components of the files in *directory*, and what each depends on."""
    pins = pinned(NODE_PINS.read_text())
    packages = packaged((directory / BUNDLED).read_text(), distribution)
    published = files(directory)
    root = reference(version)
    libraries = sorted(item["bom-ref"] for item in pinned(PINS.read_text()))
    node_libraries = sorted({item["bom-ref"] for item in pins} - {*libraries})
    dependencies = [{"ref": root, "dependsOn": libraries}]
    for item in published:
        # The others take an interpreter and its libraries from where they are installed.
        is_bundle = re.search(r"-linux-\w+\.tar\.gz$", item["name"]) is not None
        inside = sorted(package["bom-ref"] for package in packages) if is_bundle else []
        if item["name"].startswith(NODE_PACKAGE):
            inside = node_libraries
        dependencies.append({"ref": item["bom-ref"], "dependsOn": [root, *inside]})
    return {"components": [*pins, *packages, *published], "dependencies": dependencies}


def of_image(directory: Path, version: str, distribution: str) -> dict[str, Any]:
    """Return the components of an image, which needs all of them."""
    components = [
        *pinned(NODE_PINS.read_text()),
        *packaged((directory / BUNDLED).read_text(), distribution),
    ]
    names = sorted(item["bom-ref"] for item in components)
    dependencies = [{"ref": reference(version), "dependsOn": names}]
    return {"components": components, "dependencies": dependencies}


def reference(version: str) -> str:
    """Return the name of what the document is about."""
    return f"pkg:generic/gpuruntime@{version}"


def document(version: str, seconds: int, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the document with *parts*: components and dependencies."""
    root = reference(version)
    made = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": "gpuruntime",
                "version": version,
                "purl": root,
                "licenses": LICENSE,
            },
        },
        **parts,
    }
    serial = uuid.uuid5(NAMESPACE, json.dumps(made, sort_keys=True))
    return {"serialNumber": f"urn:uuid:{serial}", **made}


def main() -> None:
    """Print the document."""
    *options, directory, version, seconds = sys.argv[1:]
    release = Path("/etc/os-release")
    match = re.search(r"(?m)^ID=(\w+)$", release.read_text() if release.exists() else "")
    describe = of_image if options == ["--image"] else of_release
    parts = describe(Path(directory), version, match[1] if match else "linux")
    print(json.dumps(document(version, int(seconds), parts), indent=2))


if __name__ == "__main__":
    main()
