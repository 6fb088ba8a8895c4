# SPDX-License-Identifier: Apache-2.0
"""The image that `make image` has built: what is in it, whose it is, and that all of it starts.

`make image` runs these tests, and fails if one is skipped.
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from kubernetes import images

import gpuruntime

pytestmark = pytest.mark.image

DIGEST = "sha256:"
SHELLS = {"sh", "bash", "dash", "busybox", "perl", "apt", "apt-get", "dpkg"}
PROGRAMS = {"chroot", "gpu-node", "gpuruntime", "mount", "python3", "unshare"}
DOCUMENT = "usr/share/doc/gpuruntime/gpu-node.cdx.json"
RECORDS = "var/lib/dpkg/status.d/"
# Imports every module that gpu-node can reach: a part of the standard library may be missing.
IMPORTS = """\
import importlib, pkgutil
import cdi, gpunode, gpuruntime.cli, gpuruntime.discover, gpuruntime.engines
for package in (cdi, gpunode, gpuruntime.cli, gpuruntime.discover, gpuruntime.engines):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("all")
"""


@pytest.fixture(scope="module")
def archive() -> Path:
    """Return the archive."""
    archive = images.current()
    assert archive is not None
    return archive


@pytest.fixture(scope="module")
def config(archive: Path) -> dict[str, Any]:
    """Return the config of the image, with the name and the digests of its layers."""
    with tarfile.open(archive) as tar:
        index = document(tar, "index.json")
        (manifest,) = index["manifests"]
        content = blob(tar, manifest["digest"])
        name = manifest["annotations"]["org.opencontainers.image.ref.name"]
        layers = [layer["digest"] for layer in content["layers"]]
        return {**blob(tar, content["config"]["digest"]), "name": name, "layers": layers}


@pytest.fixture(scope="module")
def members(archive: Path, config: dict[str, Any]) -> dict[str, tarfile.TarInfo]:
    """Return what is in the one layer, by path."""
    (digest,) = config["layers"]
    with (
        tarfile.open(archive) as tar,
        tarfile.open(fileobj=tar.extractfile(path(digest))) as layer,
    ):
        return {member.name: member for member in layer}


def path(digest: str) -> str:
    """Return the path of a blob in the archive."""
    return f"blobs/sha256/{digest.removeprefix(DIGEST)}"


def document(tar: tarfile.TarFile, name: str) -> dict[str, Any]:
    """Return the JSON file *name*."""
    stream = tar.extractfile(name)
    assert stream is not None
    content: dict[str, Any] = json.load(stream)
    return content


def blob(tar: tarfile.TarFile, digest: str) -> dict[str, Any]:
    """Return the JSON file with *digest*."""
    return document(tar, path(digest))


def test_the_image_has_the_name_of_the_manifests(config: dict[str, Any]) -> None:
    """It is imported on nodes as it is; test_deploy.py compares the manifests with this name."""
    assert config["name"] == f"localhost/gpu-node:{gpuruntime.__version__}"


def test_a_container_is_nobody_by_default(config: dict[str, Any]) -> None:
    """What must be root says so in its manifest. Nothing of the build machine is in the config."""
    settings = config["config"]
    assert settings["User"] == "65534:65534"
    assert settings["Env"] == ["PATH=/usr/bin:/usr/sbin"]
    assert settings["Cmd"] == ["gpu-node", "--help"]
    assert not settings.get("Entrypoint")


def test_there_is_neither_a_shell_nor_a_package_manager(
    members: dict[str, tarfile.TarInfo],
) -> None:
    """The programs are these, and every one of them is needed."""
    names = {name.rpartition("/")[2] for name in members if re.match(r"(usr/)?s?bin/.", name)}
    assert names & SHELLS == set()
    assert {re.sub(r"python3\.\d+", "python3", name) for name in names} == PROGRAMS


def test_all_is_of_root_and_of_one_time(members: dict[str, tarfile.TarInfo]) -> None:
    """No file has a set-user-id bit, and only /tmp can be written by others."""
    times = {member.mtime for member in members.values()}
    assert len(times) == 1
    for name, member in members.items():
        assert (member.uid, member.gid) == (0, 0), name
        if not member.issym():
            assert not member.mode & 0o6000, name
            assert not member.mode & 0o002 or name == "tmp", name


def test_the_sbom_names_each_package_and_each_pin(members: dict[str, tarfile.TarInfo]) -> None:
    """Scanners read the records of packages, people the document."""
    made = json.loads((images.TREE / DOCUMENT).read_text())
    assert made["bomFormat"] == "CycloneDX"
    names = {item["name"].lower() for item in made["components"]}
    packages = {name.removeprefix(RECORDS) for name in members if name.startswith(RECORDS)}
    assert "libc6" in packages
    assert packages <= names
    pins = re.findall(r"(?m)^([\w.-]+)==", (images.SOURCE / "requirements/node.txt").read_text())
    assert {name.lower() for name in pins} <= names


def test_the_bundle_for_hosts_is_complete(members: dict[str, tarfile.TarInfo]) -> None:
    """`gpu-node install` finds it without an option."""
    bundle = "usr/share/gpu-node/bundle"
    assert members[f"{bundle}/bin/gpu-container-runtime"].issym()
    assert members[f"{bundle}/lib/gpuruntime/launcher"].mode & 0o111 == 0o111


def test_every_module_can_be_imported(archive: Path) -> None:
    """In the root directory alone, by its interpreter."""
    (interpreter,) = images.TREE.glob("usr/bin/python3.*")
    command = ["chroot", str(images.TREE), f"/usr/bin/{interpreter.name}", "-IB", "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "all\n", f"{archive}: {done.stderr}"
