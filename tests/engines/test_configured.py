# SPDX-License-Identifier: Apache-2.0
"""Real engines take the configs that `runtime configure` has made, and know our runtime by them.

Each daemon runs on sockets of its own, in a PID and a mount namespace that end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuruntime.engines import containerd_socket

TREE = Path(__file__).parents[2]
PROGRAM = str(Path(sys.prefix, "bin", "gpu-container-runtime"))
DATA = TREE / "tests" / "data" / "engines"
DEADLINE_S = 30.0
# Whatever an engine leaves in these directories is gone with it.
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
COVERED = ("/run", "/etc/docker", "/etc/containers", "/var/lib/containers")
COVER_SCRIPT = (
    f"for name in {' '.join(COVERED)}; do "
    'test ! -d $name || mount -t tmpfs none $name; done; exec "$@"'
)
COVER = ("sh", "-ec", COVER_SCRIPT, "sh")


@pytest.fixture
def work() -> Iterator[Path]:
    """Return a directory whose name is short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    yield directory
    shutil.rmtree(directory)


def configure(work: Path, *words: object, check: bool = True) -> None:
    """Run the command, with its records in *work*."""
    subprocess.run(
        [
            *(sys.executable, "-m", "gpuruntime", "runtime", "configure"),
            *("--state-dir", work / "state", "--runtime-path", PROGRAM, *map(str, words)),
        ],
        check=check,
        cwd=TREE,
        timeout=60,
        stderr=subprocess.PIPE,
    )


def output(*command: object, **environment: str) -> str:
    """Return what *command* prints; its error fails the test."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def daemon(log: Path, *command: object) -> Iterator[None]:
    """Run *command* while in the context, and all that it starts."""
    words = [*ALONE, *COVER, *map(str, command)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def until_it_answers(log: Path, *command: object) -> str:
    """Return what *command* prints as soon as it succeeds."""
    words = [str(word) for word in command]
    end = time.monotonic() + DEADLINE_S
    while True:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0:
            return done.stdout
        assert time.monotonic() < end, f"{done.stderr}\n{log.read_text()[-4000:]}"
        time.sleep(0.1)


def docker_info(work: Path, name: str) -> dict[str, Any]:
    """Start dockerd on the config in *work*, with what it keeps in *name*; return its answer."""
    own = work / name
    own.mkdir()
    socket = f"unix://{own}/docker.sock"
    command = (
        *("dockerd", "--config-file", work / "daemon.json", "-H", socket),
        *("--data-root", own / "data", "--exec-root", own / "exec"),
        *("--pidfile", own / "pid", "--iptables=false", "--ip6tables=false", "--bridge=none"),
    )
    log = own / "log"
    with daemon(log, *command):
        text = until_it_answers(log, "docker", "-H", socket, "info", "--format", "{{json .}}")
    document: dict[str, Any] = json.loads(text)
    return document


@pytest.mark.engine("dockerd", "docker", "unshare")
def test_dockerd_knows_the_runtime(work: Path) -> None:
    """And what was in its config before; after the undo it does not."""
    path = work / "daemon.json"
    path.write_text('{\n  "labels": ["kept=1"],\n  "features": {"buildkit": true}\n}\n')
    words = ("--runtime", "docker", "--config", path, "--set-as-default", "--cdi.enabled")
    configure(work, *words)
    found = docker_info(work, "configured")
    assert found["Runtimes"]["gpuruntime"]["path"] == PROGRAM
    assert found["DefaultRuntime"] == "gpuruntime"
    assert found["Labels"] == ["kept=1"]
    configure(work, *words, "--undo")
    left = docker_info(work, "undone")
    assert "gpuruntime" not in left["Runtimes"]
    assert left["DefaultRuntime"] == "runc"


def lay_out(work: Path, name: str) -> Path:
    """Put the containerd config of the case *name* into *work*."""
    directory = work / "etc"
    shutil.copytree(DATA / name / "before", directory)
    path = directory / "config.toml"
    path.write_text(path.read_text().replace("@DIR@", str(directory)))
    return path


def cri_of(dump: str) -> dict[str, Any]:
    """Return the settings of the CRI plugin in the output of `containerd config dump`."""
    plugins = tomllib.loads(dump)["plugins"]
    found: dict[str, Any] = plugins.get("io.containerd.grpc.v1.cri") or plugins["cri"]
    return found


def without_ours(cri: dict[str, Any]) -> dict[str, Any]:
    """Return the settings but for our runtime."""
    cri["containerd"]["runtimes"].pop("gpuruntime", None)
    cri["containerd"].pop("default_runtime_name", None)
    return cri


@pytest.mark.engine("containerd")
@pytest.mark.parametrize("name", ["containerd-v2", "containerd-imports"])
def test_containerd_has_our_runtime_and_all_else_as_before(work: Path, name: str) -> None:
    """It prints the config that it makes of both files, with every default."""
    path = lay_out(work, name)
    dump = ("containerd", "--config", path, "config", "dump")
    before = cri_of(output(*dump))
    configure(work, "--runtime", "containerd", "--config", path, "--set-as-default")
    after = cri_of(output(*dump))
    runtimes = after["containerd"]["runtimes"]
    ours, runc = runtimes["gpuruntime"], runtimes["runc"]
    assert ours["options"].pop("BinaryName") == PROGRAM
    assert ours["options"].pop("SystemdCgroup")
    assert runc["options"]["SystemdCgroup"]
    assert ours["runtime_type"] == "io.containerd.runc.v2"
    assert after["containerd"]["default_runtime_name"] == "gpuruntime"
    assert without_ours(after) == without_ours(before)
    configure(work, "--runtime", "containerd", "--config", path, "--undo")
    assert without_ours(cri_of(output(*dump))) == without_ours(before)


@pytest.mark.engine("containerd")
def test_containerd_has_our_runtime_in_a_config_of_version_1(work: Path) -> None:
    """Such a config imports nothing: it is edited itself."""
    path = lay_out(work, "containerd-v1")
    configure(work, "--runtime", "containerd", "--config", path, "--set-as-default")
    printed = cri_of(output("containerd", "--config", path, "config", "dump"))["containerd"]
    assert printed["runtimes"]["gpuruntime"]["options"]["BinaryName"] == PROGRAM
    assert printed["runtimes"]["gpuruntime"]["options"]["SystemdCgroup"]
    assert printed["default_runtime_name"] == "gpuruntime"


@pytest.mark.engine("containerd", "ctr", "unshare")
def test_containerd_starts_with_a_config_made_from_nothing(work: Path) -> None:
    """Its CRI plugin too: an unknown key or type would keep it off."""
    path = work / "config.toml"
    path.write_text(
        f'version = 2\nroot = "{work}/root"\nstate = "{work}/run"\n'
        f'[grpc]\naddress = "{work}/c.sock"\n[debug]\naddress = ""\n'
        '[plugins."io.containerd.grpc.v1.cri"]\nstream_server_port = "0"\n'
    )
    words = ("--runtime", "containerd", "--config", path)
    words = (*words, "--container-annotations", "cdi.k8s.io/")
    configure(work, *words, "--set-as-default", "--cdi.enabled")
    with daemon(work / "log", "containerd", "--config", path):
        ctr = ("ctr", "--address", work / "c.sock")
        until_it_answers(work / "log", *ctr, "version")
        listed = output(*ctr, "plugins", "list", "-d", "id==cri")
        major = containerd_socket.major_version(str(work / "c.sock"))
    log = (work / "log").read_text()
    assert PROGRAM in log
    assert "DefaultRuntimeName:gpuruntime" in log
    assert "invalid plugin config" not in log
    assert "cri" in listed
    assert f" {major}." in output("containerd", "--version")
    assert "failed to load plugin io.containerd.grpc.v1.cri" not in log


@pytest.mark.engine("podman", "unshare")
@pytest.mark.parametrize("words", [(), ("--set-as-default",)])
def test_podman_knows_the_runtime(work: Path, words: tuple[str, ...]) -> None:
    """By its name alone."""
    path = work / "containers.conf"
    path.write_text('[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n')
    configure(work, "--runtime", "podman", "--config", path, *words)
    named = [] if words else ["--runtime", "gpuruntime"]
    podman = (
        *(*ALONE, *COVER, "podman"),
        *("--root", work / "root", "--runroot", work / "run", "--tmpdir", work / "tmp"),
        *named,
    )
    environment = {"CONTAINERS_CONF": str(path)}
    shown = json.loads(output(*podman, "info", "--format", "json", **environment))["host"]
    assert shown["ociRuntime"]["name"] == "gpuruntime"
    assert shown["ociRuntime"]["path"] == PROGRAM
    assert shown["cgroupManager"] == "cgroupfs"


@pytest.mark.engine("podman", "unshare")
def test_podman_reads_the_drop_in_where_it_is_by_default(work: Path) -> None:
    """With the machine's own directory covered by one of the test."""
    drop_in = work / "conf.d" / "99-gpuruntime.conf"
    configure(work, "--runtime", "podman", "--drop-in-config", drop_in)
    script = (
        'mkdir -p /etc/containers/containers.conf.d; cp "$1" /etc/containers/containers.conf.d; '
        'shift; exec "$@"'
    )
    shown = output(
        *(*ALONE, *COVER, "sh", "-ec", script, "sh", drop_in),
        *("podman", "--root", work / "root", "--runroot", work / "run", "--tmpdir", work / "tmp"),
        *("--cgroup-manager=cgroupfs", "--events-backend=none", "--runtime=gpuruntime"),
        *("info", "--format", "json"),
    )
    assert json.loads(shown)["host"]["ociRuntime"]["path"] == PROGRAM


@pytest.mark.engine("runc")
def test_crio_takes_the_drop_in(work: Path) -> None:
    """Its own command reads it and prints what it makes of it."""
    crio = shutil.which("crio")
    if crio is None:
        pytest.skip("no package of this distribution has crio")
    drop_in = work / "crio.conf.d" / "99-gpuruntime.toml"
    words = ("--runtime", "crio", "--drop-in-config", drop_in, "--set-as-default")
    configure(work, *words)
    printed = tomllib.loads(output(crio, "--config-dir", drop_in.parent, "config"))
    assert printed["crio"]["runtime"]["runtimes"]["gpuruntime"]["runtime_path"] == PROGRAM
