# SPDX-License-Identifier: Apache-2.0
"""A small userland, built from this machine's own files, as a directory and as an image archive.

Busybox, the machine's glibc and loader, two C programs, a library that only the loader cache
of the image lists. Build it on the simulated host: one program is linked against libcuda.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUSYBOX = "/bin/busybox"
# A local name: engines do not pull it from a registry.
NAME = "localhost/gpuruntime-test:1"
# The image of the container that holds the namespaces of a pod.
PAUSE = "localhost/gpuruntime-pause:1"
# GPUs whose nodes the probe creates by mknod.
MADE = ("0", "1", "3", "7")
LOOK = ("/bin/probe", *MADE)
PATH = "PATH=/bin"
GO_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}


def make_root(root: Path) -> Path:
    """Make the userland in the new directory *root* and return it."""
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "run", "opt/own/lib"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    _gcc(root / "bin/probe", HERE / "probe.c")
    _gcc(root / "bin/needs", HERE / "needs.c", "-lcuda")
    own = root / "opt/own/lib/libown.so.1"
    _gcc(own, "-x", "c", "/dev/null", "-shared", "-nostdlib", "-Wl,-soname,libown.so.1")
    # `ldd` names the loader and the C library by the paths where they must be.
    libraries = {"/opt/own/lib"}
    for word in _run("ldd", root / "bin/probe").split():
        if word.startswith("/"):
            target = Path(f"{root}{word}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, target)
            libraries.add(str(Path(word).parent))
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (root / "etc/ld.so.conf").write_text("".join(f"{name}\n" for name in sorted(libraries)))
    _run("/sbin/ldconfig", "-X", "-r", root)
    return root


def archive_in(work: Path) -> Path:
    """Return the image archive in *work*; create it if it does not exist."""
    archive = work / "image.tar"
    if archive.exists():
        return archive
    return make_archive(make_root(work / "image"), archive)


def make_archive(
    root: Path, archive: Path, name: str = NAME, entrypoint: Sequence[str] = ()
) -> Path:
    """Write *root* as the archive of image *name* (Docker's format, which every engine reads)."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".")
    config = json.dumps(
        {
            "architecture": GO_ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {"Env": [PATH], "Entrypoint": list(entrypoint)},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer.getvalue())}"]},
        }
    ).encode()
    file = f"{_digest(config)}.json"
    manifest = [{"Config": file, "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {
        file: config,
        "layer.tar": layer.getvalue(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(archive, mode="w") as tar:
        for file, data in files.items():
            member = tarfile.TarInfo(file)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _gcc(output: Path, *words: object) -> None:
    _run("gcc", "-O1", "-Wall", "-Wextra", "-o", output, *words)


def _run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: status {done.returncode}\n{done.stderr}")
    return done.stdout
