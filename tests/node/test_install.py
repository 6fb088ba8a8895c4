# SPDX-License-Identifier: Apache-2.0
"""`gpu-node install` and `uninstall` on hosts below a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node.install_host import (
    GPU_NODE,
    RUNTIME,
    SYSTEMCTL,
    TOP,
    gpu_node,
    make_bundle,
    make_host,
    tree_of,
)

from gpunode.install import bundle, installer
from gpunode.install.errors import InstallError
from gpunode.install.installer import Options
from gpunode.install.restart import NONE, SYSTEMD, Restarter

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: chroot"),
    pytest.mark.slow,
]
RANCHER = "var/lib/rancher/{}/agent/etc/containerd/config.toml"
CRI_2 = '# by hand\nversion = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n'
CRI_3 = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\n  snapshotter = 'x'\n"
DOCKER = {"etc/docker/daemon.json": '{\n  "log-driver": "journald" }', "usr/bin/dockerd": ""}
# Name → the engine, the files of its host, and the file that names the runtime afterwards.
ENGINES: dict[str, tuple[str, dict[str, str], str]] = {
    "docker": ("docker", DOCKER, "etc/docker/daemon.json"),
    "docker without a file": ("docker", {"usr/bin/dockerd": ""}, "etc/docker/daemon.json"),
    "containerd 1.6": (
        *("containerd", {"etc/containerd/config.toml": CRI_2}),
        "etc/containerd/conf.d/99-gpuruntime.toml",
    ),
    "containerd 2.1": (
        *("containerd", {"etc/containerd/config.toml": CRI_3}),
        "etc/containerd/conf.d/99-gpuruntime.toml",
    ),
    "containerd version 1": (
        *("containerd", {"etc/containerd/config.toml": "[plugins.cri]\n"}),
        "etc/containerd/config.toml",
    ),
    "CRI-O": (
        *("crio", {"etc/crio/crio.conf": "[crio.runtime]\n"}),
        "etc/crio/crio.conf.d/99-gpuruntime.toml",
    ),
    "k3s": (
        *("k3s", {RANCHER.format("k3s"): CRI_2}),
        "var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl",
    ),
    "RKE2": (
        *("rke2", {RANCHER.format("rke2"): CRI_3}),
        "var/lib/rancher/rke2/agent/etc/containerd/config-v3.toml.tmpl",
    ),
    "k0s": (
        *("k0s", {"etc/k0s/containerd.toml": "# k0s_managed=true\nversion = 2\n"}),
        "etc/k0s/containerd.d/99-gpuruntime.toml",
    ),
}


@pytest.fixture
def work() -> Iterator[Path]:
    """Return a directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="i") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def systemctl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program that stands for systemctl."""
    directory = tmp_path_factory.mktemp("systemctl")
    (directory / "systemctl.c").write_text(SYSTEMCTL)
    command = ["cc", "-static", "-O1", "-o", "systemctl", "systemctl.c"]
    subprocess.run(command, cwd=directory, check=True)
    return directory / "systemctl"


def done(root: Path, *words: str) -> str:
    """Return what a command that succeeds prints."""
    process = gpu_node(root, *words)
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    return process.stderr


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_configured_once_and_restored_to_the_byte(work: Path, name: str) -> None:
    """The engine is the one that is installed; a second call changes nothing."""
    engine, files, config = ENGINES[name]
    root = make_host(work / "host", files)
    before = tree_of(root)
    source = f"--bundle={make_bundle(work / 'bundle')}"
    output = done(root, "install", source)
    assert RUNTIME in (root / config).read_text()
    assert (root / RUNTIME.lstrip("/")).stat().st_mode & 0o777 == 0o755
    assert f'run "systemctl restart {engine}' in output
    installed = tree_of(root)
    assert done(root, "install", source).count("wrote") == 0
    assert tree_of(root) == installed
    done(root, "uninstall")
    assert tree_of(root) == before


def test_an_upgrade_keeps_the_version_of_running_containers(work: Path) -> None:
    """The version before stays, and one that a CDI spec names; others are removed."""
    root = make_host(work / "host", DOCKER)
    names = []
    for version in ("1.0.0", "1.1.0", "1.2.0", "1.3.0"):
        made = make_bundle(work / version, version)
        done(root, "install", f"--bundle={made}")
        names.append(os.path.basename(os.readlink(root / TOP / "current")))
        if version == "1.0.0":
            (root / "etc/cdi").mkdir()
            hook = f"/{TOP}/versions/{names[0]}/bin/gpu-cdi-hook"
            (root / "etc/cdi/nvidia.yaml").write_text(f"path: {hook}\n")
    assert [name.partition("-")[0] for name in names] == ["1.0.0", "1.1.0", "1.2.0", "1.3.0"]
    kept = sorted(path.name for path in (root / TOP / "versions").iterdir())
    assert kept == [names[0], names[2], names[3]]
    assert (root / TOP / "current/bin/gpu-container-runtime").read_bytes().endswith(b"1.3.0")


def test_a_damaged_version_is_replaced(work: Path) -> None:
    """As by the next call after somebody has edited a file of it."""
    root = make_host(work / "host", DOCKER)
    source = f"--bundle={make_bundle(work / 'bundle')}"
    done(root, "install", source)
    installed = tree_of(root)
    (root / TOP / "current/lib/gpuruntime/launcher").write_text("damaged")
    assert "installed version" in done(root, "install", source)
    assert tree_of(root) == installed


def test_edits_of_others_survive_the_removal(work: Path) -> None:
    """Those that somebody made after the installation."""
    root = make_host(work / "host", DOCKER)
    done(root, "install", f"--bundle={make_bundle(work / 'bundle')}")
    config = root / "etc/docker/daemon.json"
    config.write_text(config.read_text().replace("journald", "syslog"))
    done(root, "uninstall")
    assert config.read_text() == DOCKER["etc/docker/daemon.json"].replace("journald", "syslog")


def test_links_of_the_host_lead_where_they_lead_there(work: Path) -> None:
    """As /opt -> /var/opt of image-based hosts: nothing is written outside of the host's root."""
    root = make_host(work / "host", DOCKER)
    (root / "opt").rmdir()
    outside = tempfile.mkdtemp(dir=work)
    (root / outside.lstrip("/")).mkdir(parents=True)
    (root / "opt").symlink_to(outside)
    done(root, "install", f"--bundle={make_bundle(work / 'bundle')}")
    assert os.listdir(outside) == []
    assert (root / outside.lstrip("/") / "gpuruntime/current").is_symlink()


BAD: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "no engine": ({}, (), "no container engine found"),
    "two engines": (
        {**DOCKER, "etc/crio/crio.conf": ""},
        (),
        "found several container engines: docker, crio",
    ),
    "unknown engine": (DOCKER, ("--runtime=lxc",), "unrecognized runtime 'lxc'"),
    "invalid config": ({"etc/docker/daemon.json": "{"}, (), '"/etc/docker/daemon.json"'),
    "no bundle": (DOCKER, ("--bundle=/etc",), '"/etc" is not a bundle'),
    "relative config": (DOCKER, ("--config=a.json",), '"a.json" is not an absolute path'),
    "root as directory": (DOCKER, ("--install-dir=/",), "--install-dir"),
    "signal": (
        {"etc/crio/crio.conf": ""},
        ("--restart-mode=signal",),
        "crio does not read its config again after a signal",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_refused_before_anything_is_written(work: Path, name: str) -> None:
    """With one line, and one that says what to do."""
    files, words, message = BAD[name]
    root = make_host(work / "host", files)
    before = tree_of(root)
    source = f"--bundle={make_bundle(work / 'bundle')}"
    process = gpu_node(root, "install", source, *words)
    assert process.returncode in (1, 2)
    assert message in process.stderr
    assert process.stderr.count("\n") == 2
    assert "hint: " in process.stderr
    assert tree_of(root) == before


def test_a_directory_that_is_not_a_host_is_refused(work: Path) -> None:
    """As where the mount of the host's root is missing."""
    source = f"--bundle={make_bundle(work / 'bundle')}"
    (work / "empty").mkdir()
    process = gpu_node(work / "empty", "install", source)
    assert process.returncode == 1
    assert "is not the root of a host" in process.stderr
    assert list((work / "empty").iterdir()) == []


def test_the_root_of_a_pod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime in the pod's own file system would end with the pod."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with pytest.raises(InstallError, match="this is a pod") as raised:
        installer.enter("/")
    assert "--host-root /host" in (raised.value.hint or "")


def test_two_calls_at_once_are_refused(work: Path) -> None:
    """The second one, which would remove what the first one writes."""
    root = make_host(work / "host", DOCKER)
    source = f"--bundle={make_bundle(work / 'bundle')}"
    done(root, "install", source)
    with contextlib.ExitStack() as stack:
        directory = os.open(root / TOP, os.O_RDONLY)
        stack.callback(os.close, directory)
        fcntl.flock(directory, fcntl.LOCK_EX)
        for words in (("install", source), ("uninstall",)):
            process = gpu_node(root, *words)
            assert process.returncode == 1
            assert 'another process installs or removes "/opt/gpuruntime"' in process.stderr
    done(root, "uninstall")


def test_links_out_of_a_bundle_are_refused(work: Path) -> None:
    """They would be links into the host."""
    root = make_host(work / "host", DOCKER)
    made = make_bundle(work / "bundle")
    (made / "bin/extra").symlink_to("../../../etc/shadow")
    process = gpu_node(root, "install", f"--bundle={made}")
    assert 'the symlink "bin/extra" of the bundle leads out of it' in process.stderr
    assert not (root / TOP).exists()


@contextlib.contextmanager
def listening(path: Path) -> Iterator[None]:
    """Have a socket at *path* that takes connections."""
    with socket.socket(socket.AF_UNIX) as server:
        path.parent.mkdir(parents=True, exist_ok=True)
        server.bind(str(path))
        server.listen(100)
        yield
    path.unlink()


def calls(root: Path, verb: str) -> list[str]:
    """Return the units with which systemctl was called for *verb*."""
    path = root / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.split()[0] == verb]


def with_systemctl(root: Path, program: Path) -> None:
    """Put *program* on the host as systemctl."""
    (root / "usr/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(program, root / "usr/bin/systemctl")


def test_the_engine_is_restarted_when_its_config_has_changed(work: Path, systemctl: Path) -> None:
    """Once, and the unit that is active on this node."""
    root = make_host(work / "host", {RANCHER.format("k3s"): CRI_2, "active": "k3s-agent\n"})
    with_systemctl(root, systemctl)
    words = ("--restart-mode=systemd", f"--bundle={make_bundle(work / 'bundle')}")
    with listening(root / "run/k3s/containerd/containerd.sock"):
        for _ in range(2):
            done(root, "install", *words)
            assert calls(root, "restart") == ["k3s-agent"]
        done(root, "uninstall", "--restart-mode=systemd")
    assert calls(root, "restart") == ["k3s-agent"] * 2


def test_a_restart_that_failed_is_made_by_the_next_call(work: Path, systemctl: Path) -> None:
    """Although the config is as it must be by then."""
    root = make_host(work / "host", {**DOCKER, "broken": ""})
    with_systemctl(root, systemctl)
    words = ("--restart-mode=systemd", f"--bundle={make_bundle(work / 'bundle')}")
    process = gpu_node(root, "install", *words)
    assert '"systemctl restart docker" failed with status 1' in process.stderr
    (root / "broken").unlink()
    with listening(root / "run/docker.sock"):
        assert "restarted docker" in done(root, "install", *words)


def test_an_engine_that_does_not_come_back_is_reported(work: Path, systemctl: Path) -> None:
    """After the time that the option says."""
    root = make_host(work / "host", DOCKER)
    with_systemctl(root, systemctl)
    words = ("--restart-mode=systemd", "--restart-timeout=0.3")
    process = gpu_node(root, "install", *words, f"--bundle={make_bundle(work / 'bundle')}")
    assert process.returncode == 1
    assert 'docker does not answer at "/run/docker.sock"' in process.stderr


@pytest.mark.parametrize(
    ("path", "options"), [("run/docker.sock", ()), ("run/other", ("--socket=/run/other",))]
)
def test_a_signal_goes_to_the_process_behind_the_socket(
    work: Path, path: str, options: tuple[str, ...]
) -> None:
    """It is found by the socket, since names of processes prove nothing."""
    root = make_host(work / "host", DOCKER)
    program = (
        "import signal, socket, sys, time\n"
        "def end(*_): open(sys.argv[2], 'w').close()\n"
        "signal.signal(signal.SIGHUP, end)\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        "server.bind(sys.argv[1]); server.listen(9); print(flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-c", program, str(root / path), str(work / "signalled")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            source = f"--bundle={make_bundle(work / 'b')}"
            done(root, "install", "--restart-mode=signal", source, *options)
            assert (work / "signalled").exists()
        finally:
            process.kill()


def test_a_container_stays_until_its_signal(work: Path) -> None:
    """And ends without an error then, as a DaemonSet that is deleted must."""
    root = make_host(work / "host", {})
    words = [str(GPU_NODE), "uninstall", f"--host-root={root}", "--stay"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "nothing is installed" in process.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.terminate()
        assert process.wait(10) == 0


# ---- calls that are killed ----

WRITES = {"os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir", "os.chmod", "os.chown"}


def killed_at(step: int, body: Callable[[], None]) -> bool:
    """Run *body* in a child that ends at its change number *step*; return whether it did.

    The child ends before that change, at once, as by SIGKILL. Programs that it starts count too.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def look(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            is_write = event in WRITES or event == "subprocess.Popen"
            if event == "open" and isinstance(arguments[2], int):
                is_write = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            count += is_write
            if count > step:
                # Without any clean-up. os.kill would be an event itself.
                os._exit(KILLED)

        try:
            sys.addaudithook(look)
            body()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 (a fork must not return into pytest)
            os.write(2, repr(error).encode())
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED)
    return code != 0


NEVER = 1 << 30
KILLED = 77


def install_of(made: Path, root: Path, mode: str = NONE) -> Callable[[], None]:
    """Return the installation of the bundle *made* on the host *root*."""

    def body() -> None:
        tree = bundle.open_tree(str(made))
        installer.enter(str(root))
        installer.install(tree, Options(), Restarter(mode), lambda _: None)

    return body


def uninstall_of(root: Path, mode: str = NONE) -> Callable[[], None]:
    """Return the removal from the host *root*."""

    def body() -> None:
        installer.enter(str(root))
        installer.uninstall(Options(), Restarter(mode), lambda _: None)

    return body


def without_state(tree: dict[str, tuple[int, object]]) -> dict[str, tuple[int, object]]:
    """Return *tree* without the notes of the fake systemctl."""
    return {path: entry for path, entry in tree.items() if path != "calls"}


@pytest.mark.parametrize("act", ["install", "upgrade", "uninstall"])
def test_a_killed_call_is_finished_by_the_next(work: Path, systemctl: Path, act: str) -> None:
    """At every change of a file; the engine is restarted after the change of its config.

    During an upgrade there is a runtime at its path at any time.
    """
    start = make_host(
        work / "start", {"etc/containerd/config.toml": CRI_2, "run/containerd/x": ""}
    )
    with_systemctl(start, systemctl)
    old, new = make_bundle(work / "old", "1.0.0"), make_bundle(work / "new", "1.1.0")
    original = tree_of(start)
    if act != "install":
        assert not killed_at(NEVER, install_of(old, start))
    expected = work / "expected"

    def body(root: Path) -> Callable[[], None]:
        if act == "uninstall":
            return uninstall_of(root, SYSTEMD)
        return install_of(new, root, SYSTEMD)

    def copied(root: Path) -> None:
        subprocess.run(["cp", "-a", start, root], check=True)

    copied(expected)
    with listening(expected / "run/containerd/containerd.sock"):
        assert not killed_at(NEVER, body(expected))
    reference = without_state(tree_of(expected))
    if act == "uninstall":
        assert reference == original
    step = 0
    is_killed = True
    while is_killed:
        root = work / f"{step}"
        copied(root)
        with listening(root / "run/containerd/containerd.sock"):
            is_killed = killed_at(step, body(root))
            if act == "upgrade":
                assert (root / TOP / "current/bin/gpu-container-runtime").exists()
            assert not killed_at(NEVER, body(root))
        assert without_state(tree_of(root)) == reference, step
        assert len(calls(root, "restart")) >= (act != "upgrade"), step
        shutil.rmtree(root)
        step += 1
    assert step > 10
