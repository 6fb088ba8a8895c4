# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime explain --image` with real engines: the image is read, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from image_trees import Image

PROGRAM = Path(sys.executable).with_name("gpuruntime")
NAME = "localhost/gpuruntime-explained:1"
ENVIRONMENT = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive of an image whose program needs a capability that it does not request."""
    work = tmp_path_factory.mktemp("explained")
    image = Image(work / "image").glibc("2.36")
    image.program("/bin/app", "libc.so.6", "libcuda.so.1").link("/bin/other", "app")
    os.link(image.at("/bin/app"), image.at("/bin/hard"))
    os.mkfifo(image.at("/etc/ld.so.cache"))
    with tarfile.open(work / "image.tar", "w") as tar:
        tar.add(image.path, arcname=".")
    return work / "image.tar"


def explained(engine: str, archive: Path, **environ: str) -> None:
    """Import the image into *engine*, explain it, and assert that nothing is left."""
    environ = {**os.environ, **environ}
    changes = [f"--change=ENV {name}={value}" for name, value in ENVIRONMENT.items()]
    changes.append("--change=VOLUME /data")

    def run(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(word) for word in words]
        return subprocess.run(
            command, capture_output=True, text=True, check=check, env=environ, timeout=120
        )

    run(engine, "import", *changes, archive, NAME)
    done = run(PROGRAM, "explain", "--image", NAME, "--json", check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, report["error"], report["works"]) == (1, None, False)
    assert report["libc"] == {"kind": "glibc", "version": "2.36"}
    assert report["capabilities"] == ["utility"]
    (need,) = report["needs"]
    assert (need["library"], need["requested"]) == ("libcuda.so.1", False)
    assert run(engine, "ps", "--all", "--quiet").stdout == ""
    assert run(engine, "volume", "ls", "--quiet").stdout == ""


@pytest.mark.engine("podman")
def test_an_image_of_podman(archive: Path, tmp_path: Path) -> None:
    """The engine has its own storage and no daemon."""
    settings = tmp_path / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    explained(
        "podman",
        archive,
        CONTAINERS_STORAGE_CONF=str(settings),
        DOCKER_HOST=f"unix://{tmp_path}/none.sock",
    )


@pytest.mark.engine("docker", "dockerd", "containerd")
def test_an_image_of_docker(archive: Path, tmp_path: Path) -> None:
    """A daemon may store images in any format."""
    socket = f"unix://{tmp_path}/docker.sock"
    command = [
        *("dockerd", "-H", socket, "--data-root", tmp_path / "data"),
        *("--exec-root", tmp_path / "exec", "--pidfile", tmp_path / "docker.pid"),
        *("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs"),
    ]
    with (tmp_path / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
    try:
        client = ["docker", "-H", socket, "version"]
        end = time.monotonic() + 60
        while subprocess.run(client, capture_output=True, check=False).returncode != 0:
            assert daemon.poll() is None, (tmp_path / "dockerd.log").read_text()
            assert time.monotonic() < end, (tmp_path / "dockerd.log").read_text()
            time.sleep(0.2)
        explained("docker", archive, DOCKER_HOST=socket)
    finally:
        daemon.terminate()
        daemon.wait()
