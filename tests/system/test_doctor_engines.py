# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime doctor` judges by the files that engines use, not by those that exist."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_roots import VERSION
from hosts_at_fault import BUS_IDS, LAUNCHER, LIBRARIES, RUNTIME, SPEC, Host
from shim_host import PROGRAM, ShimHost

from gpuruntime import remedies
from gpuruntime.cli.checks import run
from gpuruntime.cli.checks.check_table import CHECKS
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Finding

pytestmark = pytest.mark.system("mknod")

DAEMON = "/etc/docker/daemon.json"
KNOWN = {"runtimes": {"gpuruntime": {"path": RUNTIME}}}
USR, ETC = "/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"
CRIO = "/etc/crio/crio.conf"
CONTAINERS = "/etc/containers/containers.conf"
HOOK = "/usr/bin/gpu-container-runtime-hook"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a host in order, without an engine."""
    return Host(tmp_path / "host")


def result(host: Host, check: str) -> Finding:
    """Return the finding of *check* on *host*."""
    machine = ExaminedMachine(str(host.path))
    (finding,) = run.run({check: CHECKS[check]}, machine, 20.0)
    return finding


def test_every_engine_is_checked_and_named(host: Host) -> None:
    """Containerd beside docker starts containers too, also without Kubernetes."""
    host.docker()
    host.containerd(runtime="/opt/gone")
    host.file("/usr/bin/podman", "podman", 0o755)
    host.file(CRIO, "")
    finding = result(host, "engines")
    assert finding.status == "fail"
    assert finding.what.startswith('containerd has "/opt/gone" as the runtime "gpuruntime"')
    _, _, names = finding.what.partition("engines checked: ")
    assert sorted(names.split(", ")) == ["containerd", "crio", "docker", "podman"]


def test_the_containerd_of_docker_need_not_know_our_runtime(host: Host) -> None:
    """The packages of docker bring one; a warning on every such host would be noise."""
    host.docker()
    host.file("/etc/containerd/config.toml", 'disabled_plugins = ["cri"]\n')
    finding = result(host, "engines")
    assert finding.status == "ok"
    assert "engines checked: docker, containerd" in finding.what
    # Alone, it is what starts the containers.
    host.without("/etc/docker")
    host.without("/proc/700")
    host.remove("/usr/bin/dockerd")
    assert result(host, "engines").status == "warn"


@pytest.mark.parametrize("option", ["/opt/docker.json", "docker.json"])
def test_the_config_that_dockerd_was_started_with_counts(host: Host, option: str) -> None:
    """Another daemon.json exists, in the usual place."""
    host.docker({})
    host.file("/opt/docker.json", json.dumps(KNOWN))
    host.written("/opt/docker.json", 50)
    host.process(700, "/usr/bin/dockerd", "--config-file", option)
    host.link("/proc/700/cwd", "/opt")
    assert result(host, "engines").status == "ok"


def test_a_later_config_of_containerd_replaces_the_table(host: Host) -> None:
    """The runtime is in a file, and containerd does not know it."""
    host.containerd()
    path = "/etc/containerd/config.toml"
    text = host.at(path).read_text()
    host.file(path, f'imports = ["/etc/containerd/conf.d/*.toml"]\n{text}')
    assert result(host, "engines").status == "ok"
    host.file(
        "/etc/containerd/conf.d/50-other.toml",
        'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n',
    )
    finding = result(host, "engines")
    assert finding.status == "warn"
    assert '"/etc/containerd/conf.d/50-other.toml"' in finding.what


def test_the_copy_of_the_runtime_that_an_engine_runs(host: Host) -> None:
    """An old bundle in /usr/local, and the package in /usr/bin."""
    old = "/usr/local/bin/gpu-container-runtime"
    host.file(old, LAUNCHER, 0o755)
    host.docker({"runtimes": {"gpuruntime": {"path": old}}})
    # PATH has it first: it is the installed one.
    assert result(host, "engines").status == "ok"
    host.docker()
    assert result(host, "engines").status == "ok"
    host.file(old, LAUNCHER + b"old", 0o755)
    finding = result(host, "engines")
    assert finding.status == "warn"
    assert f'docker runs "{RUNTIME}", which differs from the installed "{old}"' in finding.what


def test_a_hidden_spec_is_not_checked(host: Host) -> None:
    """Its devices come from a later directory."""
    host.spec(version="535.161.07")
    assert result(host, "spec-fresh").status == "fail"
    host.spec("/var/run/cdi/nvidia.json")
    finding = result(host, "spec-fresh")
    assert finding.status == "ok"
    assert f'"{SPEC}" is not used' in finding.what
    # An engine that reads /etc/cdi only gets the stale one.
    host.containerd()
    path = "/etc/containerd/config.toml"
    table = '[plugins."io.containerd.grpc.v1.cri"]\ncdi_spec_dirs = ["/etc/cdi"]\n'
    host.file(path, host.at(path).read_text().replace("version = 2\n", f"version = 2\n{table}"))
    assert result(host, "spec-fresh").status == "fail"


def test_an_engine_may_find_the_devices_elsewhere(host: Host) -> None:
    """That it does not read a directory matters for devices that are defined only there."""
    host.docker({**KNOWN, "cdi-spec-dirs": ["/opt/cdi"]})
    finding = result(host, "spec-dirs")
    assert finding.status == "fail"
    assert f'"{SPEC}" defines "nvidia.com/gpu=0", and docker looks' in finding.what
    host.spec("/opt/cdi/nvidia.json")
    assert result(host, "spec-dirs").status == "ok"


def test_the_config_that_the_environment_of_an_engine_names(host: Host) -> None:
    """The runtime has the environment of dockerd, not that of the shell."""
    host.docker()
    host.config("")
    assert result(host, "config").status == "ok"
    host.file("/opt/config.toml", "")
    host.file("/proc/700/environ", "GPURUNTIME_CONFIG=/opt/config.toml\0PATH=/bin\0")
    finding = result(host, "config")
    assert finding.status == "warn"
    assert 'dockerd has containers use the config "/opt/config.toml"' in finding.what


def test_the_low_level_runtime_on_the_path_of_the_engine(host: Host) -> None:
    """It is found there by our runtime, and not by a shell."""
    host.docker()
    host.remove("/usr/bin/runc")
    host.file("/opt/bin/runc", "runc", 0o755)
    assert result(host, "runtime").status == "fail"
    host.file("/proc/700/environ", "PATH=/opt/bin:/usr/bin\0")
    assert result(host, "runtime").what == '"/opt/bin/runc"'


def test_the_toolkit_that_docker_calls_for_gpus(host: Host) -> None:
    """Two are installed; docker runs the first hook of that name on its PATH."""
    name = "nvidia-container-runtime-hook"
    host.package("nvidia-container-toolkit", "1.17.8-1")
    host.file(f"/usr/bin/{name}", "theirs", 0o755)
    assert result(host, "toolkits").status == "ok"
    host.docker()
    finding = result(host, "toolkits")
    assert finding.status == "warn"
    assert f'"docker run --gpus" runs "/usr/bin/{name}"' in finding.what
    host.file(f"/opt/bin/{name}", LAUNCHER, 0o755)
    host.file("/proc/700/environ", "PATH=/opt/bin:/usr/bin\0")
    assert result(host, "toolkits").status == "ok"


@pytest.mark.parametrize(
    ("configure", "status"),
    [
        (lambda host: host.docker({"exec-opts": ["native.cgroupdriver=systemd"]}), "fail"),
        (lambda host: host.docker(), "warn"),
        (lambda host: host.file(CRIO, '[crio.runtime]\ncgroup_manager = "systemd"\n'), "fail"),
    ],
)
def test_who_loses_devices_without_links(
    host: Host, configure: Callable[[Host], object], status: str
) -> None:
    """An engine has systemd's cgroups if the config that it uses says so."""
    host.without("/dev/char")
    host.directory("/run/systemd/system")
    # Not the one that dockerd was started with.
    host.file("/etc/docker/other.json", '{"exec-opts": ["native.cgroupdriver=systemd"]}')
    configure(host)
    assert result(host, "dev-char").status == status


def test_a_node_with_a_device_plugin_is_in_order(host: Host) -> None:
    """Its pods name the RuntimeClass, which only Kubernetes knows: the plugin has found GPUs."""
    host.directory("/var/lib/kubelet")
    host.containerd()
    assert result(host, "pods").status == "warn"
    host.socket("/var/lib/kubelet/device-plugins/nvidia-gpu.sock")
    assert result(host, "pods").status == "ok"


@pytest.mark.parametrize(
    ("driver", "libraries", "action"),
    [
        ("nouveau", True, 'write "blacklist nouveau" to a file'),
        ("nouveau", False, "install the NVIDIA driver, and reboot"),
        ("vfio-pci", True, "take the GPUs out of the options of vfio-pci"),
    ],
)
def test_all_checks_name_one_action_for_one_fault(
    host: Host, driver: str, libraries: bool, action: str
) -> None:
    """The module, the libraries and the spec's nodes are missing for one reason."""
    host.without("/proc/driver")
    host.without("/dev")
    for bus_id in BUS_IDS:
        link = f"/sys/bus/pci/devices/{bus_id}/driver"
        host.remove(link)
        host.link(link, f"../../../../bus/pci/drivers/{driver}")
    if libraries:
        host.file("/lib/modules/6.1.0-18-amd64/modules.dep", "dkms/nvidia.ko:\n")
    else:
        host.without(LIBRARIES)
    machine = ExaminedMachine(str(host.path))
    failures = [item for item in run.run(CHECKS, machine, 20.0) if item.status != "ok"]
    assert len(failures) >= 2
    assert {item.action.startswith(action) for item in failures} == {True}, failures


DOCUMENTS = Path(__file__).parents[2] / "docs"


def in_disorder(host: Host) -> None:
    """Be a host after its boot, with a spec directory for root only."""
    host.remove("/dev/nvidia-uvm")
    host.remove("/dev/nvidia-uvm-tools")
    host.docker()
    host.containerd()
    host.at("/etc/cdi").chmod(0o700)


def with_nouveau(host: Host) -> None:
    """Be a host whose GPUs belong to nouveau."""
    host.without("/proc/driver")
    host.without("/dev")
    for bus_id in BUS_IDS:
        link = f"/sys/bus/pci/devices/{bus_id}/driver"
        host.remove(link)
        host.link(link, "../../../../bus/pci/drivers/nouveau")
    host.file("/lib/modules/6.1.0-18-amd64/modules.dep", "dkms/nvidia.ko:\n")


def half_upgraded(host: Host) -> None:
    """Be a host with newer libraries than the loaded module."""
    for name in ("libcuda", "libnvidia-ml"):
        host.remove(f"{LIBRARIES}/{name}.so.{VERSION}")
        host.remove(f"{LIBRARIES}/{name}.so.1")
        host.file(f"{LIBRARIES}/{name}.so.550.190.01", "")
        host.link(f"{LIBRARIES}/{name}.so.1", f"{name}.so.550.190.01")


def test_no_refresh_before_the_driver_is_in_order(host: Host) -> None:
    """After an update the libraries are newer than the module: a refresh would be refused."""
    host.remove(f"{LIBRARIES}/libcuda.so.{VERSION}")
    assert "cdi refresh" in result(host, "spec-fresh").action
    half_upgraded(host)
    assert result(host, "spec-fresh").action == remedies.REBOOT


@pytest.mark.parametrize(
    ("document", "change", "checks"),
    [
        ("reference/doctor.md", in_disorder, "nodes,spec-dirs,engines"),
        ("guides/troubleshooting.md", with_nouveau, "module,versions,spec-fresh"),
        ("guides/troubleshooting.md", half_upgraded, "versions,spec-fresh"),
    ],
)
def test_the_documents_show_what_is_printed(
    host: Host, document: str, change: Callable[[Host], None], checks: str
) -> None:
    """An operator compares the lines."""
    change(host)
    command = [PROGRAM, "doctor", "--root", str(host.path), "--check", checks]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    transcript = f"```console\n$ gpuruntime doctor --check {checks}\n{done.stdout}```\n"
    assert transcript in (DOCUMENTS / document).read_text()


def test_an_ldconfig_that_is_not_run_is_not_missed(host: Host) -> None:
    """The usual mode runs none, whatever the option names."""
    table = '[nvidia-container-cli]\nldconfig = "@/gone"\n'
    host.config(table)
    assert result(host, "ldconfig").status == "ok"
    host.config(f'ldconfig-mode = "host"\n{table}')
    finding = result(host, "ldconfig")
    assert finding.action == 'set "ldconfig-mode" to "merge" in config.toml'


def test_the_config_that_buildkitd_was_started_with_counts(host: Host) -> None:
    """That of the usual place is left over."""
    host.file("/etc/buildkit/buildkitd.toml", f'[worker.oci]\n  binary = "{RUNTIME}"\n')
    assert "names our runtime" in result(host, "builds").what
    host.file("/opt/buildkitd.toml", "")
    host.process(710, "/usr/bin/buildkitd", "--config", "/opt/buildkitd.toml")
    assert "not configured" in result(host, "builds").what


def hook_file(host: Host, path: str, program: str = HOOK) -> None:
    """Write an OCI hook file."""
    host.file(path, json.dumps({"version": "1.0.0", "hook": {"path": program}}))


def crio(host: Host, *directories: str, drop_in: str = "") -> None:
    """Install CRI-O with *directories* as its hooks_dir."""
    text = f"[crio.runtime]\nhooks_dir = {json.dumps(directories)}\n"
    host.file(f"/etc/crio/crio.conf.d/{drop_in}" if drop_in else CRIO, text)


@pytest.mark.parametrize(
    ("directories", "status"),
    [([], "warn"), ([("/opt/a", "")], "ok"), ([("/opt/a", ""), ("/opt/b", "9.conf")], "warn")],
)
def test_crio_finds_hooks_where_its_config_says(
    host: Host, directories: list[tuple[str, str]], status: str
) -> None:
    """The list of a drop-in replaces that of crio.conf."""
    host.file(CRIO, "")
    hook_file(host, "/opt/a/nvidia.json")
    for directory, drop_in in directories:
        crio(host, directory, drop_in=drop_in)
    assert result(host, "engines").status == status
    assert ("crio runs" in result(host, "oci-hooks").what) == (status == "ok")


def test_a_hook_file_that_crio_does_not_read(host: Host) -> None:
    """It exists in the usual place, and the config names another."""
    hook_file(host, f"{USR}/nvidia.json")
    crio(host, "/opt/hooks")
    finding = result(host, "oci-hooks")
    assert finding.status == "warn"
    assert f'crio does not read "{USR}/nvidia.json"' in finding.what
    assert finding.action == f'add "{USR}" to "hooks_dir" of crio'
    crio(host, "/opt/hooks", USR, drop_in="10.conf")
    assert result(host, "oci-hooks").status == "ok"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", f"{ETC}/nvidia.json"),
        (f'[engine]\nhooks_dir = ["{USR}"]\n', f"{USR}/nvidia.json"),
        ('[engine]\nhooks_dir = ["/opt", {append = true}]\n', "/opt/nvidia.json"),
    ],
)
def test_the_hook_file_that_podman_uses(host: Host, text: str, path: str) -> None:
    """Of files with one name, that of the last directory."""
    host.file("/usr/bin/podman", "podman", 0o755)
    for directory in (USR, ETC, "/opt"):
        hook_file(host, f"{directory}/nvidia.json")
    host.file(CONTAINERS, text)
    assert result(host, "oci-hooks").what == f'podman runs "{HOOK}" because of "{path}"'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"hook": {"path": "/usr/bin/nvidia-container-toolkit"}}', "is not a program here"),
        ("{", "is not a valid hook file"),
        ('{"hook": []}', "is not a valid hook file"),
    ],
)
def test_a_hook_file_with_which_no_container_starts(host: Host, content: str, text: str) -> None:
    """A removed toolkit has left its hook file behind."""
    host.file("/usr/bin/podman", "podman", 0o755)
    host.file(f"{USR}/nvidia.json", content)
    finding = result(host, "oci-hooks")
    assert (finding.status, text in finding.what) == ("fail", True), finding
    assert finding.action == f'remove "{USR}/nvidia.json"'


@pytest.mark.parametrize(
    ("variables", "has_color"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_color_on_a_terminal(host: Host, variables: dict[str, str], has_color: bool) -> None:
    """Nothing but the status has a color; a pipe has none (the other tests read one)."""
    reader, writer = pty.openpty()
    command = [PROGRAM, "doctor", "--root", str(host.path), "--check", "nodes"]
    subprocess.run(command, stdout=writer, env=variables, check=True, timeout=60)
    os.close(writer)
    text = os.read(reader, 4096).decode()
    os.close(reader)
    assert text.startswith("\x1b[32mok  \x1b[0m  nodes" if has_color else "ok    nodes")
    assert text.count("\x1b") == (2 if has_color else 0)


def test_spec_fresh_and_refresh_agree(tmp_path: Path) -> None:
    """A directory of libraries has changed, and nothing that the spec names."""
    with ShimHost(tmp_path, "--gpus", "2") as simulated:
        path = "/etc/cdi/nvidia.yaml"
        simulated.shell(f"{PROGRAM} cdi refresh --output {path}")
        simulated.shell("touch /usr/lib/x86_64-linux-gnu/other.txt")
        (before,) = json.loads(
            simulated.run(PROGRAM, "doctor", "--json", "--check", "spec-fresh").stdout
        )
        refreshed = simulated.run(PROGRAM, "cdi", "refresh", "--output", path).stderr
        assert "changed since: " in refreshed
        assert f'unchanged "{path}"' in refreshed
        assert before["status"] == "ok", before
        # Control: a library that the spec mounts.
        libraries = "/usr/lib/x86_64-linux-gnu"
        simulated.shell(f"rm {libraries}/libnvidia-cfg.so*")
        (after,) = json.loads(
            simulated.run(PROGRAM, "doctor", "--json", "--check", "spec-fresh").stdout
        )
        assert after["status"] == "fail", after


def test_a_refresh_by_the_action_keeps_the_options_of_the_spec(tmp_path: Path) -> None:
    """With the default options, containers would no longer find their devices by UUID alone."""
    with ShimHost(tmp_path, "--gpus", "2") as simulated:
        options = ["--output", "/etc/cdi/nvidia.yaml", "--device-name-strategy", "uuid"]
        options += ["--device-id", "1", "--no-all-device"]
        simulated.run(PROGRAM, "cdi", "refresh", *options)
        names = simulated.run(PROGRAM, "cdi", "list").stdout
        simulated.shell("rm /usr/lib/x86_64-linux-gnu/libnvidia-cfg.so*")
        (finding,) = json.loads(
            simulated.run(PROGRAM, "doctor", "--json", "--check", "spec-fresh").stdout
        )
        command = re.findall(r'run "gpuruntime ([^"]*)"', finding["action"])[0]
        done = simulated.run(PROGRAM, *shlex.split(command))
        assert done.returncode == 0, done.stderr
        assert f'wrote "{options[1]}"' in done.stderr
        assert simulated.run(PROGRAM, "cdi", "list").stdout == names
