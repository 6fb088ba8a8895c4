# SPDX-License-Identifier: Apache-2.0
"""Which engine is here and where its config is: hosts as people have them."""

from __future__ import annotations

import socket
import threading
import tomllib
from pathlib import Path

import pytest

from gpuruntime.engines import (
    config_paths,
    containerd_document,
    containerd_imports,
    daemons,
    file_sets,
    rancher,
)
from gpuruntime.engines.config_paths import EngineConfig, HostFacts
from gpuruntime.engines.daemons import Daemon
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ConfigError

ENTRY = RuntimeEntry("gpuruntime", "/usr/bin/gpu-container-runtime")
SNAP = Daemon("docker", "/snap/docker/2915/bin/dockerd", None)


def host(
    *paths: str, uid: int = 0, running: tuple[Daemon, ...] = (), home: str = "/home/u"
) -> HostFacts:
    """Return a host where *paths* exist."""
    return HostFacts({"HOME": home}, uid, set(paths).__contains__, running)


@pytest.mark.parametrize(
    ("here", "name"),
    [
        (host("/etc/docker/daemon.json"), "docker"),
        (host(running=(Daemon("docker", "/usr/bin/dockerd", None),)), "docker"),
        # Docker's package brings a containerd and its config.
        (host("/usr/bin/dockerd", "/etc/containerd/config.toml"), "docker"),
        (host("/etc/containerd/config.toml"), "containerd"),
        (host("/run/containerd/containerd.sock"), "containerd"),
        (host("/etc/crio"), "crio"),
        (host("/usr/bin/podman"), "podman"),
        (host("/etc/rancher/k3s"), "k3s"),
        (host("/var/lib/rancher/rke2/agent/etc/containerd"), "rke2"),
        (host("/var/snap/microk8s"), "microk8s"),
        (host("/var/lib/k0s"), "k0s"),
        (host("/home/u/.config/docker/daemon.json", uid=1000), "docker-rootless"),
        (
            host("/home/u/.config/docker/daemon.json", "/usr/bin/dockerd", uid=1000),
            "docker-rootless",
        ),
        (host("/snap/docker"), "snap-docker"),
    ],
)
def test_the_one_engine_that_is_here_is_meant(here: HostFacts, name: str) -> None:
    """Most hosts have one."""
    assert config_paths.choose(here) == name


@pytest.mark.parametrize(
    ("here", "what"),
    [
        (host("/usr/bin/dockerd", "/usr/bin/podman"), "docker, podman"),
        (
            host("/usr/bin/dockerd", "/etc/containerd/config.toml", "/var/lib/kubelet"),
            "docker, containerd",
        ),
        (host(), "no container engine found"),
    ],
)
def test_several_engines_or_none_are_listed(here: HostFacts, what: str) -> None:
    """To take the first would configure the wrong one in silence."""
    with pytest.raises(ConfigError, match=what) as caught:
        config_paths.choose(here)
    assert "--runtime" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "config", "drop_in", "restart"),
    [
        ("docker", "/etc/docker/daemon.json", "", "systemctl restart docker"),
        (
            "containerd",
            "/etc/containerd/config.toml",
            "/etc/containerd/conf.d/99-nvidia.toml",
            "systemctl restart containerd",
        ),
        (
            "cri-o",
            "/etc/crio/crio.conf",
            "/etc/crio/crio.conf.d/99-nvidia.toml",
            "systemctl restart crio",
        ),
        (
            "podman",
            "/etc/containers/containers.conf",
            "/etc/containers/containers.conf.d/99-nvidia.conf",
            "",
        ),
        ("k3s", "/var/lib/rancher/k3s/agent/etc/containerd", "", "systemctl restart k3s"),
        (
            "rke2",
            "/var/lib/rancher/rke2/agent/etc/containerd",
            "",
            "systemctl restart rke2-server",
        ),
        (
            "microk8s",
            "/var/snap/microk8s/current/args/containerd-template.toml",
            "",
            "snap restart microk8s.daemon-containerd",
        ),
        (
            "k0s",
            "/etc/k0s/containerd.toml",
            "/etc/k0s/containerd.d/99-nvidia.toml",
            "systemctl restart k0sworker",
        ),
        (
            "docker-rootless",
            "/home/u/.config/docker/daemon.json",
            "",
            "systemctl --user restart docker",
        ),
    ],
)
def test_each_engine_has_its_places(name: str, config: str, drop_in: str, restart: str) -> None:
    """Files that the engine does not read are the most frequent complaint."""
    found = config_paths.find(name, host(), "nvidia")
    assert (found.config, found.drop_in, found.restart) == (config, drop_in, restart)


def test_a_user_s_podman_has_the_user_s_places() -> None:
    """Rootless podman reads no drop-in that a user could write elsewhere."""
    found = config_paths.find("podman", host(uid=1000), "gpuruntime")
    assert found.config == "/home/u/.config/containers/containers.conf"
    assert found.drop_in == "/home/u/.config/containers/containers.conf.d/99-gpuruntime.conf"
    environ = {"HOME": "/home/u", "XDG_CONFIG_HOME": "/x"}
    other = config_paths.find(
        "podman", HostFacts(environ, 1000, lambda _: False, ()), "gpuruntime"
    )
    assert other.config == "/x/containers/containers.conf"


def test_the_file_that_the_running_daemon_was_told_to_read_is_meant() -> None:
    """`dockerd --config-file` makes /etc/docker/daemon.json a file that nobody reads."""
    told = Daemon("docker", "/usr/bin/dockerd", "/srv/daemon.json")
    assert config_paths.find("docker", host(running=(told,)), "x").config == "/srv/daemon.json"
    told = Daemon("containerd", "/usr/bin/containerd", "/srv/c.toml")
    found = config_paths.find("containerd", host(running=(told,)), "x")
    assert (found.config, found.drop_in) == ("/srv/c.toml", "/srv/conf.d/99-x.toml")
    both = (told, Daemon("containerd", "/usr/bin/containerd", "/srv/other.toml"))
    found = config_paths.find("containerd", host(running=both), "x")
    assert found.config == "/etc/containerd/config.toml"


@pytest.mark.parametrize(
    "here",
    [
        host("/snap/docker"),
        host("/snap/docker", "/usr/bin/dockerd", running=(SNAP,)),
    ],
)
def test_the_docker_snap_is_refused(here: HostFacts) -> None:
    """Its dockerd cannot run our program, wherever the config is."""
    with pytest.raises(ConfigError, match="mount namespace") as caught:
        config_paths.find("docker", here, "gpuruntime")
    assert "snap remove docker" in str(caught.value.hint)


def test_a_docker_beside_the_snap_is_configured() -> None:
    """The one that runs is meant."""
    ours = Daemon("docker", "/usr/bin/dockerd", None)
    here = host("/snap/docker", "/usr/bin/dockerd", running=(ours,))
    assert config_paths.find("docker", here, "gpuruntime").config == "/etc/docker/daemon.json"


def _process(
    proc: Path,
    pid: int,
    comm: str,
    words: list[str],
    namespace: str = "mnt:[1]",
    parent: int = 0,
) -> None:
    directory = proc / str(pid)
    (directory / "ns").mkdir(parents=True)
    (directory / "stat").write_text(f"{pid} (a) b) S {parent} 1 1 0")
    (proc / "self" / "ns").mkdir(parents=True, exist_ok=True)
    ours = proc / "self" / "ns" / "mnt"
    if not ours.is_symlink():
        ours.symlink_to("mnt:[1]")
    (directory / "comm").write_text(comm + "\n")
    (directory / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (directory / "exe").symlink_to(words[0])
    (directory / "ns" / "mnt").symlink_to(namespace)


def test_daemons_are_told_by_the_kernel(tmp_path: Path) -> None:
    """Not those in containers, not the containerd that dockerd or k3s has started."""
    _process(tmp_path, 1, "dockerd", ["/usr/bin/dockerd", "--config-file=/srv/d.json"])
    _process(tmp_path, 2, "containerd", ["/usr/bin/containerd", "-c", "/srv/c.toml"])
    _process(tmp_path, 3, "containerd", ["/x", "--config", "/var/run/docker/containerd/c.toml"])
    _process(tmp_path, 4, "containerd", ["/x", "-c", "/var/lib/rancher/k3s/agent/etc/c.toml"])
    _process(tmp_path, 5, "dockerd", ["/usr/bin/dockerd"], "mnt:[2]")
    _process(tmp_path, 6, "bash", ["/bin/bash"])
    _process(tmp_path, 7, "crio", ["/usr/bin/crio", "--config", "relative"])
    assert list(daemons.running(str(tmp_path))) == [
        Daemon("docker", "/usr/bin/dockerd", "/srv/d.json"),
        Daemon("containerd", "/usr/bin/containerd", "/srv/c.toml"),
        Daemon("crio", "/usr/bin/crio", None),
    ]


@pytest.mark.parametrize(
    ("there", "generated", "wanted"),
    [
        ([], "version = 2\n", "config.toml.tmpl"),
        ([], "version = 3\n", "config-v3.toml.tmpl"),
        ([], None, "config.toml.tmpl"),
        (["config.toml.tmpl"], "version = 3\n", "config.toml.tmpl"),
        (["config-v3.toml.tmpl"], "version = 2\n", "config-v3.toml.tmpl"),
        (["config.toml.tmpl", "config-v3.toml.tmpl"], "version = 2\n", "config.toml.tmpl"),
        (["config.toml.tmpl", "config-v3.toml.tmpl"], "version = 3\n", "config-v3.toml.tmpl"),
    ],
)
def test_the_template_in_use_is_edited(
    tmp_path: Path, there: list[str], generated: str | None, wanted: str
) -> None:
    """A new file of the other name would take the user's template out of use."""
    for name in there:
        (tmp_path / name).write_text('{{ template "base" . }}\n')
    if generated is not None:
        (tmp_path / "config.toml").write_text(generated)
    place = EngineConfig("k3s", "template", str(tmp_path), "", "")
    (target,) = file_sets.to_configure(place, ENTRY).files
    assert target.path == str(tmp_path / wanted)
    plugin = "cri.v1.runtime" if "v3" in wanted else "grpc.v1.cri"
    assert plugin in str(target.configure(None))


def test_a_runtime_that_is_in_the_template_already_is_an_error() -> None:
    """Twice the same table, and containerd does not start: the node is gone."""
    text = f'{rancher.BASE}[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."gpuruntime"]'
    place = EngineConfig("k3s", "template", "/x/config.toml.tmpl", "", "")
    (target,) = file_sets.to_configure(place, ENTRY).files
    with pytest.raises(Exception, match="that this program did not add"):
        target.configure(text)


def test_a_template_of_one_s_own_has_only_what_it_knows() -> None:
    """A field that its program does not know would keep k3s from starting."""
    place = EngineConfig("k3s", "template", "/x/config.toml.tmpl", "", "")
    (target,) = file_sets.to_configure(place, ENTRY).files
    assert "SystemdCgroup" not in str(target.configure("version = 2\n"))
    assert "{{ .SystemdCgroup }}" in str(target.configure('x = "{{ .SystemdCgroup }}"\n'))


def test_what_k3s_finds_itself_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the default has to be asked for, in k3s's own config."""
    monkeypatch.setattr(rancher, "DETECTED_IN", ("/usr/bin",))
    monkeypatch.setitem(rancher.DETECTED, "nvidia", "env")
    entry = RuntimeEntry("nvidia", "/usr/bin/nvidia-container-runtime")
    place = config_paths.find("k3s", host(), "nvidia")
    found = file_sets.to_configure(place, entry)
    assert found.files == []
    assert "itself when it starts" in found.notes[0]
    (target,) = file_sets.to_configure(
        place, RuntimeEntry("nvidia", "/usr/bin/x", is_default=True)
    ).files
    assert target.path == "/etc/rancher/k3s/config.yaml.d/99-nvidia.yaml"
    assert target.configure(None) == "default-runtime: nvidia\n"


def test_a_kubelet_with_systemd_cgroups_is_heard(tmp_path: Path) -> None:
    """Without it pods flap after the next reboot, if there is no runtime to copy that from."""
    place = EngineConfig("containerd", "containerd", str(tmp_path / "config.toml"), "", "")
    entry = RuntimeEntry("gpuruntime", "/usr/bin/x", has_systemd_cgroup=True)
    found = file_sets.to_configure(place, entry)
    assert found.notes == []
    assert "SystemdCgroup = true" in str(found.files[0].configure(None))
    assert "SystemdCgroup" in file_sets.to_configure(place, ENTRY).notes[0]


def test_a_new_drop_in_has_the_kubelet_s_cgroups_and_runc(tmp_path: Path) -> None:
    """The runc that is added, as containerd has it, is not one to copy."""
    drop_in = str(tmp_path / "conf.d" / "99-x.toml")
    place = EngineConfig("containerd", "containerd", str(tmp_path / "config.toml"), drop_in, "")
    entry = RuntimeEntry("gpuruntime", "/usr/bin/x", has_systemd_cgroup=True)
    text = str(file_sets.to_configure(place, entry).files[0].configure(None))
    plugin = tomllib.loads(text)["plugins"]["io.containerd.grpc.v1.cri"]
    runtimes = plugin["containerd"]["runtimes"]
    assert runtimes["runc"] == {"runtime_type": "io.containerd.runc.v2"}
    assert runtimes["gpuruntime"]["options"] == {"BinaryName": "/usr/bin/x", "SystemdCgroup": True}


def test_a_drop_in_that_is_read_after_ours_is_named(tmp_path: Path) -> None:
    """Before containerd 2.1 the last file has the CRI plugin for itself."""
    path = tmp_path / "config.toml"
    path.write_text(f'version = 2\nimports = ["{tmp_path}/conf.d/*.toml"]\n')
    (tmp_path / "conf.d").mkdir()
    other = tmp_path / "conf.d" / "99-nvidia.toml"
    other.write_text('version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nx = 1\n')
    drop_in = str(tmp_path / "conf.d" / "99-gpuruntime.toml")
    place = EngineConfig("containerd", "containerd", str(path), drop_in, "")
    assert any(str(other) in note for note in file_sets.to_configure(place, ENTRY).notes)
    other.write_text("version = 2\n[debug]\nlevel = 'x'\n")
    assert not any(str(other) in note for note in file_sets.to_configure(place, ENTRY).notes)


def test_a_drop_in_of_another_version_is_not_copied(tmp_path: Path) -> None:
    """It says the same under another name."""
    path = tmp_path / "config.toml"
    path.write_text('version = 3\nimports = ["conf.d/*.toml"]\n')
    (tmp_path / "conf.d").mkdir()
    other = tmp_path / "conf.d" / "10-x.toml"
    other.write_text('version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nx = 1\n')
    place = EngineConfig(
        "containerd", "containerd", str(path), str(tmp_path / "conf.d" / "99-x.toml"), ""
    )
    with pytest.raises(ConfigError, match="another version"):
        file_sets.to_configure(place, ENTRY)


def test_a_containerd_whose_cri_plugin_is_off_is_named(tmp_path: Path) -> None:
    """The config that docker's package of containerd installs."""
    path = tmp_path / "config.toml"
    path.write_text('disabled_plugins = ["cri"]\n')
    place = EngineConfig("containerd", "containerd", str(path), "", "")
    assert "disabled_plugins" in file_sets.to_configure(place, ENTRY).notes[0]


@pytest.mark.parametrize(
    ("version", "imports", "added"),
    [
        (2, ["/etc/containerd/conf.d/*.toml"], False),
        (2, ["/etc/containerd/conf.d/99-*.toml"], False),
        (2, ["/etc/containerd/conf.d/99-x.toml"], False),
        (2, ["conf.d/99-x.toml"], False),
        (2, ["/etc/containerd/*.toml"], True),
        (2, ["/etc/containerd/*/99-x.toml"], False),
        (2, ["/etc/containerd/conf.d/10-*.toml"], True),
        (2, [], True),
        # containerd 1.x looks for it in its working directory, 2.x beside the file.
        (2, ["conf.d/*.toml"], True),
        (3, ["conf.d/*.toml"], False),
    ],
)
def test_an_import_is_added_if_none_matches(
    version: int, imports: list[str], *, added: bool
) -> None:
    """Written into a directory that nobody reads, a drop-in does nothing."""
    document = {"version": version, "imports": imports}
    found = containerd_imports.added(
        document, "/etc/containerd/config.toml", "/etc/containerd/conf.d/99-x.toml", version
    )
    wanted = [(("imports",), [*imports, "/etc/containerd/conf.d/*.toml"])]
    assert found == (wanted if added else [])


class Answer:
    """A socket on which the first caller gets *data*."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.thread = threading.Thread(target=self._serve, args=(data,))
        self.thread.start()

    def _serve(self, data: bytes) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            # What is left unread would reset the connection.
            while connection.recv(1 << 16):
                pass

    def close(self) -> None:
        """Wait for the caller to have been answered."""
        self.thread.join()
        self.listener.close()


def _answer(version: bytes) -> bytes:
    message = b"\x0a" + bytes([len(version)]) + version
    data = b"\0" + len(message).to_bytes(4, "big") + message
    settings = bytes.fromhex("000000 04 00 00000000")
    head = bytes.fromhex("000001 01 04 00000001") + b"\x88"
    body = len(data).to_bytes(3, "big") + bytes.fromhex("00 00 00000001") + data
    return settings + head + body + bytes.fromhex("000001 01 05 00000001") + b"\x88"


@pytest.mark.parametrize(
    ("data", "version"),
    [
        (_answer(b"v2.1.9"), 3),
        (_answer(b"2.0.0+x"), 3),
        (_answer(b"1.6.20~ds1"), 2),
        (_answer(b"nothing"), 2),
        (_answer(b""), 2),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 2),
        (b"", 2),
        # The stream is reset: the service is not there.
        (bytes.fromhex("000004 03 00 00000001 00000002"), 2),
    ],
    ids=["2.1", "2.0", "1.6", "no number", "no text", "HTTP/1", "closed", "reset"],
)
def test_a_new_config_has_the_version_of_the_containerd_that_runs(
    tmp_path: Path, data: bytes, version: int
) -> None:
    """Whatever is on PATH; and of version 2 if nobody answers, which all of them read."""
    path = tmp_path / "s"
    server = Answer(path, data)
    config, drop_in = (str(tmp_path / name) for name in ("config.toml", "99-x.toml"))
    place = EngineConfig("containerd", "containerd", config, drop_in, "", socket=str(path))
    texts = [str(target.configure(None)) for target in file_sets.to_configure(place, ENTRY).files]
    server.close()
    assert all(f"version = {version}\n" in text for text in texts)
    assert containerd_document.plugin_path(version)[1] in texts[0]


def test_a_file_says_more_than_the_containerd_that_runs(tmp_path: Path) -> None:
    """It is asked for nothing, then."""
    (tmp_path / "config.toml").write_text("version = 2\n")
    config, drop_in = (str(tmp_path / name) for name in ("config.toml", "99-x.toml"))
    place = EngineConfig(
        "containerd", "containerd", config, drop_in, "", socket=str(tmp_path / "s")
    )
    text = file_sets.to_configure(place, ENTRY).files[0].configure(None)
    assert str(text).startswith("version = 2\n")


def test_the_containerd_of_dockerd_is_known_by_its_parent(tmp_path: Path) -> None:
    """Wherever its config is."""
    _process(tmp_path, 1, "dockerd", ["/usr/bin/dockerd"])
    _process(tmp_path, 2, "containerd", ["/x", "--config", "/srv/c.toml"], parent=1)
    _process(tmp_path, 3, "k3s-server", ["/usr/bin/k3s"])
    _process(tmp_path, 4, "containerd", ["/x", "--config", "/srv/k.toml"], parent=3)
    assert [daemon.name for daemon in daemons.running(str(tmp_path))] == ["docker"]


def test_a_child_that_has_not_executed_its_program_yet_is_not_a_daemon(tmp_path: Path) -> None:
    """Between clone and exec it has the name and the command line of the daemon."""
    _process(tmp_path, 1, "dockerd", ["/usr/bin/dockerd"])
    _process(tmp_path, 2, "dockerd", ["/usr/bin/dockerd"], parent=1)
    assert [daemon.name for daemon in daemons.running(str(tmp_path))] == ["docker"]


@pytest.mark.parametrize("is_option", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_containerd_of_dockerd_is_known_by_the_exec_root(
    tmp_path: Path, mark: bytes, *, is_option: bool
) -> None:
    """After a restart of dockerd with live-restore it has another parent."""
    config = tmp_path / "daemon.json"
    config.write_bytes(mark + b'{"exec-root": "/srv/run/"}')
    words = ["/usr/bin/dockerd", "--config-file", str(config)]
    words = ["/usr/bin/dockerd", "--exec-root=/srv/run"] if is_option else words
    _process(tmp_path, 1, "dockerd", words)
    own = "/srv/run/containerd/containerd.toml"
    _process(tmp_path, 2, "containerd", ["containerd", "--config", own], parent=9)
    _process(tmp_path, 3, "containerd", ["containerd", "--config", "/srv/running.toml"])
    assert [daemon.config for daemon in daemons.running(str(tmp_path))][1:] == [
        "/srv/running.toml"
    ]


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"exec-root": 1}', b"\xff", b"[" * 100_000])
def test_a_daemon_json_without_an_exec_root_has_the_default_one(data: bytes) -> None:
    """Whatever else is wrong with it."""
    assert daemons.configured_exec_root(data) == ""
