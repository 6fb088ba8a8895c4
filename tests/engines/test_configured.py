# SPDX-License-Identifier: Apache-2.0
"""Real engines accept the configs that `runtime configure` writes, and list our runtime."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_daemons import (
    ALONE,
    COVER,
    PROGRAM,
    TREE,
    configure,
    daemon,
    docker_info,
    output,
    until_it_answers,
)

from gpuruntime.engines import containerd_socket

DATA = TREE / "tests" / "data" / "engines"


@pytest.fixture
def work() -> Iterator[Path]:
    """Return a directory whose name is short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.engine("dockerd", "docker", "unshare")
def test_dockerd_knows_the_runtime(work: Path) -> None:
    """And keeps the settings from before; after the undo the runtime is gone."""
    path = work / "daemon.json"
    path.write_text('{\n  "labels": ["kept=1"],\n  "features": {"buildkit": true}\n}\n')
    words = ("--runtime", "docker", "--config", path, "--set-as-default", "--cdi.enabled")
    configure(work, *words)
    info = docker_info(work, "configured")
    assert info["Runtimes"]["gpuruntime"]["path"] == PROGRAM
    assert info["DefaultRuntime"] == "gpuruntime"
    assert info["Labels"] == ["kept=1"]
    configure(work, *words, "--undo")
    left = docker_info(work, "undone")
    assert "gpuruntime" not in left["Runtimes"]
    assert left["DefaultRuntime"] == "runc"


@pytest.mark.engine("dockerd", "unshare")
@pytest.mark.parametrize("is_option", [True, False])
def test_the_containerd_of_dockerd_is_not_the_systems(work: Path, *, is_option: bool) -> None:
    """Its config is in the exec-root of dockerd, which generates it at each start."""
    root = work / "exec"
    text = "{}" if is_option else json.dumps({"exec-root": str(root)})
    (work / "daemon.json").write_text(text)
    command = (
        *("dockerd", "--config-file", work / "daemon.json", "-H", f"unix://{work}/s"),
        *("--data-root", work / "data", "--pidfile", work / "pid"),
        *("--iptables=false", "--ip6tables=false", "--bridge=none"),
        *(("--exec-root", root) if is_option else ()),
    )
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gpuruntime.engines import daemons; "
        "print([daemon.name for daemon in daemons.running()])"
    )
    look = (sys.executable, "-c", script, TREE)
    words = " ".join(shlex.quote(str(word)) for word in command)
    wait = f"{words} & while ! test -S {root}/containerd/containerd.sock; do sleep 0.1; done; "
    printed = output(*ALONE, *COVER, "sh", "-c", f'{wait} exec "$@"', "sh", *look)
    assert printed.splitlines()[-1] == "['docker']"


def lay_out(work: Path, name: str) -> Path:
    """Copy the containerd config of the case *name* to *work*."""
    directory = work / "etc"
    shutil.copytree(DATA / name / "before", directory)
    path = directory / "config.toml"
    path.write_text(path.read_text().replace("@DIR@", str(directory)))
    return path


def cri_of(dump: str) -> dict[str, Any]:
    """Return the settings of the CRI plugin in the output of `containerd config dump`."""
    plugins = tomllib.loads(dump)["plugins"]
    cri: dict[str, Any] = plugins.get("io.containerd.grpc.v1.cri") or plugins["cri"]
    return cri


def without_ours(cri: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without our runtime."""
    cri["containerd"]["runtimes"].pop("gpuruntime", None)
    cri["containerd"].pop("default_runtime_name", None)
    return cri


@pytest.mark.engine("containerd")
@pytest.mark.parametrize("name", ["containerd-v2", "containerd-imports"])
def test_containerd_has_our_runtime_and_all_else_as_before(work: Path, name: str) -> None:
    """The dump of containerd is the merged config, with every default."""
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
    """Such a config cannot import files: the file itself is edited."""
    path = lay_out(work, "containerd-v1")
    configure(work, "--runtime", "containerd", "--config", path, "--set-as-default")
    printed = cri_of(output("containerd", "--config", path, "config", "dump"))["containerd"]
    assert printed["runtimes"]["gpuruntime"]["options"]["BinaryName"] == PROGRAM
    assert printed["runtimes"]["gpuruntime"]["options"]["SystemdCgroup"]
    assert printed["default_runtime_name"] == "gpuruntime"


@pytest.mark.engine("containerd", "ctr", "unshare")
@pytest.mark.parametrize("options", [("--set-as-default",), (), ("--drop-in-config", "")])
def test_containerd_starts_with_a_config_made_from_nothing(
    work: Path, options: tuple[str, ...]
) -> None:
    """Its CRI plugin too: an unknown key or a missing default runtime would disable it."""
    path = work / "config.toml"
    path.write_text(
        f'version = 2\nroot = "{work}/root"\nstate = "{work}/run"\n'
        f'[grpc]\naddress = "{work}/c.sock"\n[debug]\naddress = ""\n'
        '[plugins."io.containerd.grpc.v1.cri"]\nstream_server_port = "0"\n'
    )
    words = ("--runtime", "containerd", "--config", path)
    words = (*words, "--container-annotations", "cdi.k8s.io/")
    configure(work, *words, *options, "--cdi.enabled")
    with daemon(work / "log", "containerd", "--config", path):
        ctr = ("ctr", "--address", work / "c.sock")
        until_it_answers(work / "log", *ctr, "version")
        listed = output(*ctr, "plugins", "list", "-d", "id==cri")
        major = containerd_socket.major_version(str(work / "c.sock"))
    log = (work / "log").read_text()
    assert PROGRAM in log
    assert f"DefaultRuntimeName:{'gpuruntime' if '--set-as-default' in options else 'runc'}" in log
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
    """A directory of the test covers the directory of the machine."""
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
    """The command of CRI-O reads the drop-in and prints the resulting config."""
    crio = shutil.which("crio")
    if crio is None:
        pytest.skip("no package of this distribution has crio")
    drop_in = work / "crio.conf.d" / "99-gpuruntime.toml"
    words = ("--runtime", "crio", "--drop-in-config", drop_in, "--set-as-default")
    configure(work, *words)
    printed = tomllib.loads(output(crio, "--config-dir", drop_in.parent, "config"))
    assert printed["crio"]["runtime"]["runtimes"]["gpuruntime"]["runtime_path"] == PROGRAM
