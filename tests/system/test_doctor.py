# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime doctor`: each report of users that comes often has a host, and the line for it.

`bug-reports.md` of the reference counts them: F5 and F4 are those of four threads and more.
"""

from __future__ import annotations

import json
import os
import py_compile
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import reachable
from driver_roots import VERSION
from effort import IS_FULL
from hosts_at_fault import (
    BUS_IDS,
    LAUNCHER,
    LIBRARIES,
    MAJORS,
    RUNTIME,
    SPEC,
    Host,
    listing,
)
from shim_host import LAUNCHER as LAUNCHER_PATH
from shim_host import PROGRAM, ShimHost

from gpuruntime.cli.checks import run, toolkits
from gpuruntime.cli.checks.check_table import CHECKS
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Finding, Note, ok
from gpuruntime.discover.user_space import DriverRoot, find_nvml
from gpuruntime.errors import DriverError

pytestmark = pytest.mark.system("mknod")

Fault = Callable[[Host], object]
DEADLINE_S = 20.0
RELOAD = "/run/systemd/system"
DEB = "deb [signed-by={}] https://packages.invalid/libnvidia stable main\n"
TEMPLATE = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
PERSISTENCED = "/run/nvidia-persistenced/socket"
RESOURCES = {"node-generic-resources": ["NVIDIA-GPU=GPU-00000000"]}


def found(host: Host, *names: str) -> list[Finding]:
    """Return what the checks *names*, or all, find on *host*, which they leave as it is."""
    chosen = {name: check for name, check in CHECKS.items() if not names or name in names}
    before = listing(host.path)
    findings = run.run(chosen, ExaminedMachine(str(host.path)), DEADLINE_S)
    assert listing(host.path) == before
    return findings


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a host of which all is well."""
    return Host(tmp_path / "host")


def without_links(host: Host) -> None:
    """Lose the links, under systemd and cgroup v2."""
    host.without("/dev/char")
    host.directory(RELOAD)
    host.file("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")


def after_boot(host: Host) -> None:
    """Be a host that has booted, and on which nobody has used a GPU yet."""
    host.remove("/dev/nvidia-uvm")
    host.remove("/dev/nvidia-uvm-tools")


def with_groups(host: Host) -> None:
    """Have a podman of an LTS distribution, and a spec of a newer toolkit."""
    host.package("podman", "4.9.3+ds1-1ubuntu0.2")
    document = host.spec(cdiVersion="0.7.0")
    edits = {**document["containerEdits"], "additionalGids": [44]}
    host.spec(cdiVersion="0.7.0", containerEdits=edits)


def without_icd(host: Host) -> None:
    """Lose the file by which Vulkan finds the driver."""
    host.without("/usr/share/vulkan")


def root_elsewhere(host: Host) -> None:
    """Name a driver root in which there is nothing."""
    host.directory("/run/nvidia/driver")
    host.config('[nvidia-container-cli]\nroot = "/run/nvidia/driver"\n')


def k3s(host: Host) -> None:
    """Have edited the config that k3s makes itself."""
    host.directory("/etc/rancher/k3s")
    host.file(
        TEMPLATE,
        'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpuruntime.options]'
        f'\nBinaryName = "{RUNTIME}"\n',
    )
    host.file(f"{TEMPLATE}.tmpl", '{{ template "base" . }}\n')


def kubelet(host: Host) -> None:
    """Run pods by containerd, whose default runtime is not ours."""
    host.directory("/var/lib/kubelet")
    host.containerd()


def two_sources(host: Host) -> None:
    """Have the packages' source twice, as of two guides."""
    host.file("/etc/apt/sources.list.d/nvidia-docker.list", DEB.format("/a.gpg"))
    host.file("/etc/apt/sources.list.d/nvidia-container-toolkit.list", DEB.format("/b.gpg"))


def static_cpu_manager(host: Host, *options: str) -> None:
    """Be a node with a device plugin, whose kubelet updates containers."""
    host.file("/var/lib/kubelet/cpu_manager_state", '{"policyName": "static"}')
    host.process(700, "/usr/bin/gpu-node", "device-plugin", *options)


def two_profiles(host: Host) -> None:
    """Be a node with MIG devices of two profiles."""
    host.process(700, "/usr/bin/nvidia-device-plugin", "--mig-strategy=mixed")
    for name in ("mig-1g.5gb", "mig-2g.10gb"):
        host.file(f"/var/lib/kubelet/device-plugins/nvidia-{name}.sock")


def no_gpu(host: Host) -> None:
    """Be one of the hosts without a GPU that the same compose file is for."""
    host.without("/proc/driver")
    host.without("/sys/bus/pci/devices")


def in_user_namespace(host: Host) -> None:
    """Be an unprivileged guest of LXC, with the other toolkit's hook."""
    host.file("/proc/self/uid_map", "0 100000 65536\n")
    host.file("/usr/bin/nvidia-container-cli", "cli", 0o755)


def for_rootless(host: Host) -> None:
    """Have set for one engine what the other does not bear."""
    host.package("nvidia-container-toolkit", "1.16.2-1")
    host.config("[nvidia-container-cli]\nno-cgroups = true\n")


def rootless(host: Host) -> None:
    """Run dockerd as a user, on a config that knows nothing of CDI."""
    host.file("/etc/passwd", "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    host.package("docker-ce", "5:27.1.1-1~debian.12~bookworm")
    host.file("/home/user/.config/docker/daemon.json", "{}")
    host.process(900, "/usr/bin/dockerd", uid=1000)


def wsl(host: Host, release: str, *, dxg: bool) -> None:
    """Be a WSL of that *release*."""
    host.file("/proc/sys/kernel/osrelease", f"{release}\n")
    host.remove("/proc/driver/nvidia/version")
    if dxg:
        host.node("/dev/dxg", 10, 125)


def wsl_with_gpu(host: Host) -> None:
    """Be a WSL that has a GPU."""
    wsl(host, "5.15.1-microsoft-standard-WSL2", dxg=True)
    host.file("/usr/lib/wsl/drivers/nv_dispi.inf_amd64/libcuda.so.1.1")
    host.file("/usr/lib/wsl/lib/libdxcore.so")


def wsl_with_other_gpu(host: Host) -> None:
    """Be a WSL whose GPU is of another vendor."""
    wsl(host, "5.15.1-microsoft-standard-WSL2", dxg=True)
    host.file("/usr/lib/wsl/drivers/iigd_dch.inf_amd64/libze_intel_gpu.so.1")
    host.file("/usr/lib/wsl/lib/libdxcore.so")


def jetson(host: Host) -> None:
    """Be a Jetson whose CSV file names a node that it lacks."""
    host.file("/etc/nv_tegra_release", "# R36 (release)\n")
    directory = "/etc/nvidia-container-runtime/host-files-for-container.d"
    host.file(f"{directory}/devices.csv", "dev, /dev/nvmap\ndev, /dev/nvidiactl\n")
    host.node("/dev/nvmap", 10, 61)
    host.remove("/dev/nvidiactl")
    host.remove("/proc/driver/nvidia/version")


def ldconfig_of_ubuntu(host: Host) -> None:
    """Name Ubuntu's ldconfig on another distribution."""
    host.file("/sbin/ldconfig", "ldconfig", 0o755)
    host.config(
        'ldconfig-mode = "host"\n[nvidia-container-cli]\nldconfig = "@/sbin/ldconfig.real"\n'
    )


def mig_of_later(host: Host) -> None:
    """Have been divided after the spec was written, and no program has made the nodes."""
    host.mig(nodes=False)


def update(host: Host) -> None:
    """Have been updated unattended: the libraries are newer than the module."""
    for place in host.at(LIBRARIES).glob(f"*.so.{host.version}"):
        place.rename(place.with_name(place.name.replace(host.version, "550.190.01")))
    for name in ("libcuda", "libnvidia-ml"):
        host.remove(f"{LIBRARIES}/{name}.so.1")
        host.link(f"{LIBRARIES}/{name}.so.1", f"{name}.so.550.190.01")


# Report, the check that shows it, what makes a good host one of that report, and the line.
REPORTS: list[tuple[str, str, Fault, str]] = [
    (
        "B001",
        "dev-char",
        without_links,
        (
            'fail dev-char no link in "/dev/char" for /dev/nvidia-modeset, /dev/nvidia-uvm, '
            "/dev/nvidia-uvm-tools and 3 more: containers with systemd's cgroups lose them at "
            '"systemctl daemon-reload" (systemd and cgroup v2, where engines use it); run '
            '"gpuruntime system create-dev-char-symlinks" as root'
        ),
    ),
    (
        "B002",
        "nodes",
        after_boot,
        (
            'fail nodes no device node "/dev/nvidia-uvm"; no device node /dev/nvidia-uvm-tools; '
            'run "gpuruntime system create-device-nodes --all --load-kernel-modules" as root'
        ),
    ),
    (
        "B004",
        "spec-readers",
        with_groups,
        (
            'fail spec-readers "/etc/cdi/nvidia.json" has the CDI version 0.7.0 (the spec: group '
            "44 (needs 0.7.0)), and podman 4.9.3+ds1-1ubuntu0.2 supports versions up to 0.6.0; "
            'run "gpuruntime cdi refresh --force --max-spec-version 0.6.0 --output '
            '/etc/cdi/nvidia.json"'
        ),
    ),
    (
        "B005",
        "spec-fresh",
        lambda host: host.spec(version="535.161.07"),
        (
            'fail spec-fresh "/etc/cdi/nvidia.json" is for driver 535.161.07, and 550.163.01 '
            'is loaded; run "gpuruntime cdi refresh --output /etc/cdi/nvidia.json"'
        ),
    ),
    (
        "B006",
        "files",
        without_icd,
        (
            'warn files "/usr/lib/x86_64-linux-gnu/libGLX_nvidia.so.550.163.01" is there, but no '
            '"*nvidia*.json" in a directory "vulkan/icd.d": Vulkan does not find the driver in a '
            "container; install that part of the driver, if containers need it"
        ),
    ),
    (
        "B007",
        "libraries",
        root_elsewhere,
        (
            'fail libraries no "libnvidia-ml.so.1" below the driver root "/run/nvidia/driver"; '
            'directories searched: /; there is one below "/"; use the driver root "/": '
            '"nvidia-container-cli.root" in config.toml, or "--driver-root"'
        ),
    ),
    (
        "B009",
        "engines",
        lambda host: host.docker(written_s=200),
        (
            'fail engines docker was started before "/etc/docker/daemon.json" was written: unless'
            " it was reloaded since, it does not use the new content; engines checked: docker; "
            'run "systemctl restart docker"'
        ),
    ),
    (
        "B009",
        "engines",
        lambda host: host.docker({"runtimes": {}}),
        (
            'warn engines docker does not know our runtime in "/etc/docker/daemon.json"; engines '
            'checked: docker; run "gpuruntime runtime configure --runtime docker", then '
            '"systemctl restart docker"'
        ),
    ),
    (
        "B009",
        "engines",
        lambda host: host.directory("/snap/docker"),
        (
            "fail engines docker from the snap cannot run a program of the host: its dockerd "
            "lives in the snap's own mount namespace, where neither our runtime nor the "
            'driver\'s files are; remove it ("snap remove docker") and install docker from the'
            " distribution's or docker's packages"
        ),
    ),
    (
        "B010",
        "engines",
        k3s,
        (
            "fail engines k3s writes its config again at each start, and drops the runtime "
            '"gpuruntime", which is not in its template; engines checked: k3s; run "gpuruntime '
            'runtime configure --runtime k3s", then "systemctl restart k3s"'
        ),
    ),
    (
        "B011",
        "pods",
        kubelet,
        (
            'warn pods the default runtime of containerd is not "gpuruntime": pods, also those of'
            ' the device plugin, get it only with "runtimeClassName: gpuruntime"; set '
            '"runtimeClassName: gpuruntime" in these pods'
        ),
    ),
    (
        "B012",
        "metrics",
        lambda host: host.process(800, "/usr/bin/dcgm-exporter", "-f", "x"),
        (
            "warn metrics dcgm-exporter runs without virtual GPUs: its metrics do not tell apart "
            'pods that share a GPU; start it with "--kubernetes-virtual-gpus"'
        ),
    ),
    (
        "K21",
        "delivery",
        static_cpu_manager,
        (
            "warn delivery the kubelet's CPU manager is static, and the device plugin delivers by "
            "envvar: when the kubelet updates a container, it loses its GPU; start the device "
            'plugin with "--pass-device-specs", or "--device-list-strategy=cdi-cri"'
        ),
    ),
    (
        "K21",
        "delivery",
        lambda host: static_cpu_manager(host, "--device-list-strategy", "cdi-cri"),
        "ok delivery the engine knows the device nodes of pods (cdi-cri)",
    ),
    (
        "K21",
        "delivery",
        lambda host: static_cpu_manager(host, "--pass-device-specs=true"),
        "ok delivery the engine knows the device nodes of pods (envvar)",
    ),
    (
        "K10",
        "delivery",
        two_profiles,
        (
            "warn delivery the device plugin delivers by envvar: a container that requests MIG "
            "devices of two profiles sees those of one; start the device plugin with "
            '"--device-list-strategy=cdi-cri", or "volume-mounts"'
        ),
    ),
    (
        "B014",
        "packages",
        two_sources,
        (
            'warn packages "/etc/apt/sources.list.d/nvidia-container-toolkit.list" and '
            '"/etc/apt/sources.list.d/nvidia-docker.list" have the same source with different '
            "keys: apt refuses both; remove "
            '"/etc/apt/sources.list.d/nvidia-container-toolkit.list"'
        ),
    ),
    (
        "B015",
        "module",
        no_gpu,
        (
            "fail module no driver is loaded, and no NVIDIA GPU is on the PCI bus; set "
            '"missing-gpu" to "warn" in config.toml to start containers without a GPU'
        ),
    ),
    (
        "B016",
        "builds",
        lambda host: host.file(
            "/etc/buildkit/buildkitd.toml", f'[worker.oci]\n  binary = "{RUNTIME}"\n'
        ),
        (
            'ok builds "/etc/buildkit/buildkitd.toml" names our runtime: '
            "build steps get the GPUs that images request"
        ),
    ),
    (
        "B017",
        "sharing",
        lambda _: None,
        (
            "ok sharing no MIG device and no MPS: containers with the same GPU share all of "
            "its memory"
        ),
    ),
    (
        "B019",
        "user-namespace",
        in_user_namespace,
        (
            "warn user-namespace in a user namespace, 0 100000 65536: the hook of the other "
            "toolkit may not edit cgroups here, and containers fail with bpf_prog_query; "
            "start containers with our runtime, which needs no such right"
        ),
    ),
    (
        "B020",
        "toolkits",
        for_rootless,
        (
            'warn toolkits "nvidia-container-cli.no-cgroups" is set, which takes the GPUs from '
            "rootful containers of nvidia-container-toolkit 1.16.2-1; our runtime does not need "
            'it; run "gpuruntime config --set nvidia-container-cli.no-cgroups=false --in-place"'
        ),
    ),
    (
        "B021",
        "rootless",
        rootless,
        (
            'warn rootless docker of uid 1000 does not read CDI specs: "features.cdi" is not '
            'set in "/home/user/.config/docker/daemon.json"; run "gpuruntime runtime '
            'configure --runtime docker-rootless --cdi.enabled" as that user'
        ),
    ),
    (
        "B021",
        "spec-dirs",
        lambda host: host.at("/etc/cdi").chmod(0o700),
        (
            'warn spec-dirs "/etc/cdi" has mode 0700: rootless engines cannot read it; run "chmod'
            ' 755 /etc/cdi"'
        ),
    ),
    (
        "B022",
        "specs",
        lambda host: host.file("/etc/cdi/broken.yaml", "cdiVersion: [\n"),
        (
            'fail specs "/etc/cdi/broken.yaml" is not used: syntax: line 2: did not find expected'
            ' node content; correct what "gpuruntime cdi validate /etc/cdi/broken.yaml" reports'
        ),
    ),
    (
        "B024",
        "platform",
        lambda h: wsl(h, "4.4.0-19041-Microsoft", dxg=False),
        (
            'fail platform this is WSL 1, which has no GPUs; run "wsl --set-version DISTRIBUTION '
            '2" on Windows'
        ),
    ),
    (
        "B024",
        "platform",
        lambda h: wsl(h, "5.15.1-microsoft-standard-WSL2", dxg=False),
        (
            'fail platform WSL 2 has no "/dev/dxg": Windows has no GPU, or no driver with WSL '
            "support; install the NVIDIA driver on Windows"
        ),
    ),
    (
        "B024",
        "platform",
        lambda h: wsl(h, "5.15.1-microsoft-standard-WSL2", dxg=True),
        (
            'fail platform WSL has "/dev/dxg", but no "libdxcore.so" in "/usr/lib/wsl/lib"; run '
            '"wsl --update" and "wsl --shutdown" on Windows'
        ),
    ),
    (
        "B024",
        "platform",
        wsl_with_other_gpu,
        (
            'fail platform WSL has "/dev/dxg", but no NVIDIA adapter: the NVIDIA driver is not in'
            ' "/usr/lib/wsl/drivers"; install the NVIDIA driver on Windows'
        ),
    ),
    (
        "B050",
        "platform",
        jetson,
        (
            'warn platform "/etc/nvidia-container-runtime/host-files-for-container.d/devices.csv" '
            'line 2: no device node "/dev/nvidiactl"; the platform is Tegra: there is '
            '"/etc/nv_tegra_release"; 1 file; correct that, if containers '
            "need it"
        ),
    ),
    (
        "B024",
        "platform",
        wsl_with_gpu,
        'ok platform WSL with "/dev/dxg" and a driver store of NVIDIA',
    ),
    (
        "B025",
        "ldconfig",
        ldconfig_of_ubuntu,
        (
            'fail ldconfig "/sbin/ldconfig.real", the ldconfig that config.toml names, is not a '
            'program here; set "nvidia-container-cli.ldconfig" to "@/sbin/ldconfig" in '
            "config.toml"
        ),
    ),
    (
        "B026",
        "toolkits",
        lambda h: h.package("nvidia-container-toolkit-base", "1.17.0-1"),
        (
            "fail toolkits nvidia-container-toolkit-base 1.17.0-1 is installed, which fails if an"
            " image already has a symlink that it creates; update it"
        ),
    ),
    (
        "B027",
        "daemons",
        lambda host: host.socket(PERSISTENCED),
        (
            'warn daemons no process listens on "/run/nvidia-persistenced/socket", which '
            'containers get; run "systemctl restart nvidia-persistenced"'
        ),
    ),
    (
        "B029",
        "engines",
        lambda host: host.docker(written_s=50),
        (
            'ok engines docker knows the runtime "gpuruntime", started since its config was '
            "written; engines checked: docker"
        ),
    ),
    (
        "B030",
        "mig",
        mig_of_later,
        (
            'fail mig no device node "/dev/nvidia-caps/nvidia-cap66", which grants a MIG device; '
            'no device node "/dev/nvidia-caps/nvidia-cap67", which grants a MIG device; run '
            '"gpuruntime system create-device-nodes --all --load-kernel-modules" as root'
        ),
    ),
    (
        "B030",
        "spec-fresh",
        lambda host: host.mig(),
        (
            'fail spec-fresh no spec has the MIG instance gpu0/gi7/ci0; run "gpuruntime cdi '
            'refresh --output /etc/cdi/nvidia.json"'
        ),
    ),
    (
        "B031",
        "sharing",
        lambda host: host.directory("/run/nvidia/mps"),
        (
            'warn sharing "/run/nvidia/mps" exists, and no nvidia-cuda-mps-control runs: programs'
            ' that use MPS wait for it forever; run "nvidia-cuda-mps-control -d"'
        ),
    ),
    (
        "B032",
        "gpus",
        lambda host: host.gpu(1, BUS_IDS[1], "NVIDIA T4"),
        (
            "ok gpus 2 models: 1 NVIDIA H100 80GB HBM3, 1 NVIDIA T4: request a certain one by its"
            " UUID"
        ),
    ),
    (
        "B035",
        "snapshot",
        lambda host: host.directory("/run/gpuruntime").chmod(0o777),
        (
            'fail snapshot "/run/gpuruntime" can be written by users other than root: each '
            'container start queries the driver again; run "rm -r /run/gpuruntime" as root'
        ),
    ),
    (
        "B036",
        "versions",
        update,
        (
            "fail versions driver 550.163.01 is loaded, but the libraries are of 550.190.01; "
            "reboot: the kernel loads the installed module then"
        ),
    ),
    (
        "B037",
        "swarm",
        lambda host: host.docker(RESOURCES),
        (
            'fail swarm docker offers "NVIDIA-GPU=GPU-00000000" to a swarm, and this host has no '
            'such GPU; docker offers "NVIDIA-GPU" to a swarm, and "swarm-resource" is not set: a '
            'service does not get the GPUs that it reserves; set "node-generic-resources" in '
            '"/etc/docker/daemon.json" to the UUIDs that "nvidia-smi -L" prints'
        ),
    ),
    (
        "B046",
        "module",
        lambda host: host.file("/proc/devices", "195 nvidia\n"),
        (
            "fail module driver 550.163.01 is loaded without its module nvidia-uvm: CUDA finds no"
            ' GPU; run "gpuruntime system create-device-nodes --all --load-kernel-modules" as '
            "root"
        ),
    ),
    (
        "B047",
        "nodes",
        lambda host: host.node("/dev/nvidia-uvm", 510, 0),
        (
            'fail nodes "/dev/nvidia-uvm" is device 510:0, but the driver has 511:0; remove '
            '"/dev/nvidia-uvm", then run "gpuruntime system create-device-nodes --all '
            '--load-kernel-modules" as root'
        ),
    ),
    (
        "B039",
        "modes",
        lambda host: host.node("/dev/nvidia0", 195, 0, 0o660),
        (
            'warn modes "/dev/nvidia0" has mode 0660, uid 0, gid 0: only its group may open it; '
            "put the users of rootless engines into that group"
        ),
    ),
    (
        "B039",
        "modes",
        lambda host: host.node("/dev/nvidia0", 195, 0, 0o1231),
        (
            'fail modes "/dev/nvidia0" has mode 1231, uid 0, gid 0: not even its group may open '
            'it; run "chmod 666 /dev/nvidia0"'
        ),
    ),
    (
        "B057",
        "spec-hooks",
        lambda host: host.remove("/usr/bin/gpu-cdi-hook"),
        (
            'fail spec-hooks the hook "/usr/bin/gpu-cdi-hook" of "/etc/cdi/nvidia.json" is not a '
            'program on this host; run "gpuruntime cdi refresh --force --output '
            '/etc/cdi/nvidia.json"'
        ),
    ),
    (
        "B149",
        "open-files",
        lambda host: host.docker(files="1073741816"),
        (
            "warn open-files dockerd and its containers may open 1073741816 files: the driver's "
            'tools iterate over all of them at each start; set "LimitNOFILE=1048576" in a drop-in'
            " of dockerd's service"
        ),
    ),
]
# B034 is below, on a driver that is slow.
FREQUENT = (
    *("B001", "B002", "B004", "B005", "B006", "B007", "B009", "B010", "B011", "B012", "B014"),
    *("B015", "B016", "B017", "B019", "B020", "B021", "B022", "B024", "B025", "B026", "B027"),
    *("B029", "B030", "B031", "B032", "B035", "B036", "B037"),
)


def squeezed(finding: Finding) -> str:
    """Return the line of *finding* without what aligns it."""
    return " ".join(finding.line().split())


@pytest.mark.parametrize(
    ("check", "fault", "line"),
    [row[1:] for row in REPORTS],
    ids=[f"{row[0]}-{row[1]}-{index}" for index, row in enumerate(REPORTS)],
)
def test_each_report_has_its_line(host: Host, check: str, fault: Fault, line: str) -> None:
    """People find the line by what they see, and do what it says."""
    fault(host)
    (finding,) = found(host, check)
    assert squeezed(finding) == line
    assert bool(finding.action) == (finding.status != "ok")
    assert f"{finding.what}; {finding.action}".isascii()


def test_all_frequent_reports_are_in_the_table() -> None:
    """A report that comes often must not be forgotten."""
    assert set(FREQUENT) <= {row[0] for row in REPORTS}


def test_a_good_host_is_well(host: Host) -> None:
    """Who sees a warning on each host does not read the next one."""
    host.docker()
    host.written("/etc/docker/daemon.json", 50)
    assert [squeezed(item) for item in found(host) if item.status != "ok"] == []
    done = doctor("--root", str(host.path))
    assert (done.returncode, done.stderr) == (0, "")
    *lines, summary = done.stdout.splitlines()
    assert len(lines) == len(CHECKS)
    assert summary == f"{len(CHECKS)} checks: 0 failed, 0 warnings, {len(CHECKS)} ok"


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [PROGRAM, "doctor", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_exit_status_is_that_of_the_worst_check(host: Host) -> None:
    """Scripts ask for nothing else: 1 is a warning, 2 is a failure."""
    place = str(host.path)
    host.at("/etc/cdi").chmod(0o700)
    done = doctor("--root", place, "--check", "spec-dirs,nodes")
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["warn", "spec-dirs"],
        ["ok", "nodes"],
        ["2", "checks:"],
    ]
    host.remove("/dev/nvidiactl")
    assert doctor("--root", place).returncode == 2
    done = doctor("--root", place, "--check", "nodes", "--json")
    assert done.returncode == 2
    (told,) = json.loads(done.stdout)
    assert list(told) == ["check", "status", "what", "action"]
    assert (told["check"], told["status"]) == ("nodes", "fail")
    assert told["what"] == 'no device node "/dev/nvidiactl"'
    assert "create-device-nodes" in told["action"]


@pytest.mark.parametrize("arguments", [("--check", "nothing"), ("--root", "/nowhere")])
def test_what_cannot_be_checked_is_an_error(arguments: tuple[str, str]) -> None:
    """Nothing that was found out must look like nothing that is wrong."""
    done = doctor(*arguments)
    assert done.returncode == (2 if "--check" in arguments else 1)
    assert done.stdout == ""
    assert re.match(r'error: configuration: .*"(nothing|/nowhere)".*\nhint: ', done.stderr)


def raises(_: ExaminedMachine) -> list[Note]:
    """Be a check with a bug."""
    raise ValueError("some bug")


def hangs(machine: ExaminedMachine) -> list[Note]:
    """Be a check of a driver that does not answer, with a child."""
    child = subprocess.Popen(["sleep", "60"])
    (Path(machine.root) / "child").write_text(str(child.pid))
    child.wait()
    return []


def is_running(pid: int) -> bool:
    """Return whether the process *pid* is there, and no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def dies(_: ExaminedMachine) -> list[Note]:
    """Be a check that the kernel ends."""
    sys.exit(1)


def test_a_check_fails_alone(host: Host) -> None:
    """The others are what is needed most when one part of the host hangs."""
    checks = {
        "first": lambda _: [ok("well")],
        "raises": raises,
        "hangs": hangs,
        "dies": dies,
        "last": lambda _: [ok("well")],
    }
    began = time.monotonic()
    findings = run.run(checks, ExaminedMachine(str(host.path)), 1.0)
    assert time.monotonic() - began < 20
    assert [(item.check, item.status) for item in findings] == [
        ("first", "ok"),
        ("raises", "fail"),
        ("hangs", "fail"),
        ("dies", "fail"),
        ("last", "ok"),
    ]
    assert "this is a bug: ValueError" in findings[1].what
    assert findings[2].what.startswith("no result in 1 s")
    child = int((host.path / "child").read_text())
    end = time.monotonic() + 30
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.05)


# Inputs of checks. No two of a group are of one check, which may stop at the first; and many
# checks stop at config.toml.
INPUTS = (
    (
        *("/etc/docker/daemon.json", "/etc/cdi/more.json"),
        *("/proc/driver/nvidia/version", "/etc/ld.so.cache", "/dev/nvidia0"),
        *("/run/nvidia-persistenced/socket", "/var/lib/dpkg/status"),
    ),
    ("/proc/devices", "/proc/700/cmdline"),
    ("/etc/gpuruntime/config.toml",),
)
SPOILED = tuple((path,) for group in INPUTS for path in group) if IS_FULL else INPUTS


@pytest.mark.parametrize("paths", SPOILED, ids=" ".join)
@pytest.mark.parametrize("kind", ["directory", "garbage", "fifo", "loop"])
def test_no_input_is_a_bug(host: Host, paths: tuple[str, ...], kind: str) -> None:
    """A doctor is called where files are not as they should be."""
    host.docker()
    for path in paths:
        host.remove(path)
        host.directory(str(Path(path).parent))
        if kind == "directory":
            host.directory(path)
        elif kind == "garbage":
            host.file(path, bytes(range(256)) * 40)
        elif kind == "loop":
            host.link(path, Path(path).name)
        else:
            os.mkfifo(host.at(path))
    for finding in found(host):
        assert "this is a bug" not in finding.what, finding
        assert "no result" not in finding.what, finding


def test_a_link_that_leaves_the_tree_does_not(host: Host) -> None:
    """What is this machine's must not be told of another."""
    host.link("/proc/1", "/proc/self")
    host.remove("/proc/driver/nvidia/version")
    host.link("/proc/driver/nvidia/version", "/../../../../../../etc/hostname")
    (finding,) = found(host, "module")
    assert finding.status == "fail"


def test_only_what_is_of_the_host_counts(host: Host) -> None:
    """A dockerd in a container has another config than the one that we read."""
    host.docker(written_s=200, uid=0)
    host.remove("/proc/700/ns/mnt")
    host.link("/proc/700/ns/mnt", "mnt:[1]")
    (finding,) = found(host, "engines")
    assert finding.status == "ok"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"{MAJORS['nvidia-uvm']} nvidia-uvm\n195 nvidia-frontend\n", "ok"),
        ("195 nvidia\n", "fail"),
    ],
)
def test_the_module_has_two_names(host: Host, text: str, status: str) -> None:
    """Before driver 550 its major was that of nvidia-frontend."""
    host.file("/proc/devices", text)
    host.remove("/dev/nvidia-uvm-tools")
    host.node("/dev/nvidia-uvm-tools", 511, 1)
    assert [item.status for item in found(host, "module", "nodes")] == [status, "ok"]


def test_our_own_runtime_below_us(host: Host) -> None:
    """A runtime that calls itself would call for ever."""
    host.file("/usr/bin/runc", LAUNCHER, 0o755)
    (finding,) = found(host, "runtime")
    assert finding.status == "fail"
    host.file("/usr/bin/crun", "crun", 0o755)
    (finding,) = found(host, "runtime")
    assert (finding.status, "it is skipped" in finding.what) == ("warn", True)


@pytest.mark.parametrize(
    ("path", "check", "what"),
    [
        ("/etc/cdi/nvidia.yml", "specs", "is not read: names end in .yaml or .json"),
        (
            "/etc/docker/cdi/nvidia.json",
            "spec-dirs",
            "is in a directory where no engine looks for specs",
        ),
    ],
)
def test_specs_that_nobody_reads(host: Host, path: str, check: str, what: str) -> None:
    """No engine says so: it only does not know the devices."""
    host.spec(path)
    (finding,) = found(host, check)
    assert (finding.status, what in finding.what) == ("warn", True)


@pytest.mark.parametrize(
    ("paths", "stale"),
    [
        (("/etc/cdi/nvidia.json", "/etc/cdi/nvidia-toolkit.json"), 0),
        # What the unit writes would come again.
        (("/var/run/cdi/nvidia.yaml", "/var/run/cdi/toolkit.yaml"), 1),
    ],
)
def test_two_specs_that_take_devices_from_each_other(
    host: Host, paths: tuple[str, str], stale: int
) -> None:
    """Each is good by itself: both are named, and the one to remove."""
    host.remove("/etc/cdi/nvidia.json")
    for at_s, path in enumerate(paths, 1_700_000_000):
        host.spec(path)
        os.utime(host.at(path), (at_s, at_s))
    (finding,) = found(host, "specs")
    assert finding.status == "fail"
    assert finding.what.startswith(f'"{paths[stale]}" and "{paths[1 - stale]}" both define "')
    assert finding.action == f'remove "{paths[stale]}"'


def test_a_spec_for_the_numbers_of_another_boot(host: Host) -> None:
    """B047: they are another device's now."""
    node = {"path": "/dev/nvidia-uvm", "type": "c", "major": 510, "minor": 0}
    devices = [{"name": "0", "containerEdits": {"deviceNodes": [node]}}]
    host.spec(devices=devices)
    (finding,) = found(host, "spec-fresh")
    assert "510:0, which is another device in this boot" in finding.what


def test_hooks_without_env(host: Host) -> None:
    """They run with the image's variables, as root: CVE-2025-23266."""
    document = host.spec()
    del document["containerEdits"]["hooks"][0]["env"]
    host.file(SPEC, json.dumps(document))
    (finding,) = found(host, "spec-hooks")
    assert (finding.status, "has no env" in finding.what) == ("warn", True)


def test_a_loader_cache_of_before(host: Host) -> None:
    """The loader has not been told since: programs look for a library that is gone."""
    path = f"{LIBRARIES}/libcuda.so.1"
    host.cache(("libcuda.so.1", path, "x86-64"))
    assert found(host, "loader-cache")[0].status == "ok"
    host.cache(("libcuda.so.1", "/opt/old/libcuda.so.1", "x86-64"))
    (finding,) = found(host, "loader-cache")
    assert (finding.status, finding.action) == ("warn", 'run "ldconfig"')


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.write_bytes(b""), "not a file that the loader would accept"),
        (lambda path: os.truncate(path, 100 << 20), "File too large"),
        (lambda path: path.unlink() or path.symlink_to(path.name), "Too many levels"),
        (lambda path: path.unlink() or path.mkdir(), "is a directory"),
    ],
)
def test_a_loader_cache_that_cannot_be_used(
    host: Host, damage: Callable[[Path], object], what: str
) -> None:
    """It is not the same as none; libraries that only the cache names are missed because of it."""
    host.cache()
    damage(host.at("/etc/ld.so.cache"))
    (finding,) = found(host, "loader-cache")
    assert (finding.status, finding.action) == ("warn", 'run "ldconfig"')
    assert what in finding.what
    host.without(LIBRARIES)
    root = DriverRoot(str(host.path))
    with pytest.raises(DriverError, match=re.escape(what)):
        find_nvml(root, elsewhere=())


def with_switch(host: Host) -> None:
    """Have an NVSwitch."""
    host.node("/dev/nvidia-nvswitch0", 234, 0)


def with_manager(host: Host) -> None:
    """Have an NVSwitch, and its manager run."""
    with_switch(host)
    host.process(600, "/usr/bin/nv-fabricmanager", "-c", "x")


def with_log(version: str) -> Fault:
    """Have a fabric manager that has ended because the driver was of *version*."""

    def fault(host: Host) -> None:
        with_switch(host)
        line = "fabric manager NVIDIA GPU driver interface version {} don't match with driver "
        lines = [
            f"{line}version {{}}. Please update with matching NVIDIA driver package.".format(*pair)
            for pair in (("525.1.1", "530.2.2"), ("535.1.1", version))
        ]
        host.file("/var/log/fabricmanager.log", "\n".join(["x", *lines, "y"]))

    return fault


def with_imex(host: Host) -> None:
    """Have the driver's channels and their daemon, and no channel."""
    host.file("/proc/devices", "Character devices:\n234 nvidia-caps-imex-channels\n")
    host.process(700, "/usr/bin/nvidia-imex", "-c", "x")


def with_channel(host: Host) -> None:
    """Have a channel as well."""
    with_imex(host)
    host.node("/dev/nvidia-caps-imex-channels/channel0", 234, 0)


@pytest.mark.parametrize(
    ("fault", "status", "what", "action"),
    [
        (lambda _: None, "ok", "no NVLink fabric", ""),
        (with_switch, "fail", "does not run", 'run "systemctl restart nvidia-fabricmanager"'),
        (with_manager, "ok", "nv-fabricmanager runs", ""),
        (
            with_log(VERSION),
            "fail",
            f"nv-fabricmanager 535.1.1 does not start with driver {VERSION}",
            f"install the fabric manager of version {VERSION}",
        ),
        # The driver has been replaced since: that line is old.
        (with_log("531.3.3"), "fail", "does not run", "systemctl restart"),
        (with_imex, "warn", 'no channel in "/dev/nvidia-caps-imex-channels"', "NVreg_CreateImex"),
        (with_channel, "ok", "1 IMEX channel", ""),
    ],
)
def test_the_fabric_and_its_manager(
    host: Host, fault: Fault, status: str, what: str, action: str
) -> None:
    """Without it CUDA fails on every GPU of such a machine."""
    fault(host)
    (finding,) = found(host, "fabric")
    assert (finding.status, what in finding.what) == (status, True), finding
    assert action in (finding.action or "")


def test_the_distribution_and_how_the_driver_is_installed(host: Host) -> None:
    """A package manager is of no use where the system is an image."""
    host.file("/etc/os-release", 'NAME=Bottlerocket\nID="bottlerocket"\n')
    (finding,) = found(host, "platform")
    assert (finding.status, finding.what.endswith(", Bottlerocket")) == ("ok", True)
    host.without(LIBRARIES)
    (finding,) = found(host, "libraries")
    assert (finding.status, finding.action) == (
        "fail",
        "use a variant of Bottlerocket with the NVIDIA driver",
    )


@pytest.mark.parametrize(
    ("model", "mark", "platform", "files"),
    [
        # The module of a Jetson's display lists no GPU, that of Thor the integrated one.
        ("", "/etc/nv_tegra_release", "the platform is Tegra", "the platform is Tegra"),
        ("NVIDIA Thor", "/etc/os-release", "the platform is Tegra", "the platform is Tegra"),
        ("NVIDIA RTX A6000", "/etc/nv_tegra_release", "Linux", "other files"),
        ("NVIDIA RTX A6000", "/dev/dxg", "Linux", "other files"),
    ],
)
def test_the_platform_of_a_machine_with_the_module(
    host: Host, model: str, mark: str, platform: str, files: str
) -> None:
    """It is the one that discovery chooses by NVML's list, which the module's list agrees with."""
    jetson(host)
    host.module(host.version)
    host.remove("/etc/nv_tegra_release")
    host.file(mark, "")
    host.without("/proc/driver/nvidia/gpus")
    if model:
        host.file(INFORMATION, f"Model: {model}\n")
    for name, text in (("platform", platform), ("files", files)):
        assert text in found(host, name)[0].what


INFORMATION = f"/proc/driver/nvidia/gpus/{BUS_IDS[0]}/information"


@pytest.mark.parametrize(
    ("model", "files", "daemon", "status", "what"),
    [
        ("NVIDIA H100 80GB HBM3", {}, False, "ok", "no vGPU"),
        ("NVIDIA RTX A6000", {}, False, "ok", "no vGPU"),
        ("NVIDIA A16-4Q", {}, True, "warn", 'no token in "/etc/nvidia/ClientConfigToken"'),
        ("GRID T4-8C", {"/etc/nvidia/ClientConfigToken/a.tok": "x"}, False, "warn", "not run"),
        ("NVIDIA A100-3-20C", {"/etc/nvidia/ClientConfigToken/a.tok": "x"}, True, "ok", "runs"),
        (
            "NVIDIA A16-4Q",
            {"/etc/nvidia/gridd.conf": "#ServerAddress=x\nServerAddress=lic.invalid\n"},
            True,
            "ok",
            "runs",
        ),
        (
            "NVIDIA A16-4Q",
            {"/etc/nvidia/gridd.conf": "ServerAddress=\n"},
            True,
            "warn",
            "no token",
        ),
        (
            "NVIDIA A16-4Q",
            {
                "/etc/nvidia/gridd.conf": 'ClientConfigTokenPath="/srv/token/"\n',
                "/srv/token/b.tok": "x",
            },
            True,
            "ok",
            "runs",
        ),
    ],
)
def test_the_licence_of_a_vgpu(
    host: Host, model: str, files: dict[str, str], daemon: bool, status: str, what: str
) -> None:
    """Without one, a vGPU becomes slow after some minutes."""
    host.file(INFORMATION, f"Model: \t\t {model}\nIRQ: 16\n")
    for path, text in files.items():
        host.file(path, text)
    if daemon:
        host.process(800, "/usr/bin/nvidia-gridd")
    (finding,) = found(host, "vgpu")
    assert (finding.status, what in finding.what) == (status, True), finding


def test_a_daemon_that_listens(host: Host) -> None:
    """By the sockets that the kernel lists."""
    assert found(host, "daemons")[0].status == "ok"
    host.socket(PERSISTENCED)
    host.file("/proc/net/unix", f"Num\n0000: 00000002 0 10000 0001 01 55 {PERSISTENCED}\n")
    assert found(host, "daemons")[0].status == "ok"


def test_containers_are_kept_from_making_nodes(host: Host) -> None:
    """By our hook, or by the driver's own parameter."""
    host.remove("/usr/bin/gpu-cdi-hook")
    assert found(host, "params")[0].status == "warn"
    host.params(ModifyDeviceFiles="0")
    assert found(host, "params")[0].status == "ok"


def test_bytecode_is_of_the_source_as_it_is(tmp_path: Path) -> None:
    """Python compiles again what was written to since, at each start, and cannot keep it."""
    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    made = Path(py_compile.compile(str(source), doraise=True))
    assert toolkits._is_compiled(str(source), str(made))
    source.write_text("x = 22\n")
    assert not toolkits._is_compiled(str(source), str(made))
    assert not toolkits._is_compiled(str(source), str(tmp_path / "nothing.pyc"))


def test_the_modules_whose_bytecode_is_checked_exist() -> None:
    """A module that has moved would be reported as not compiled, on every host."""
    package = Path(toolkits.__file__).parents[2]
    assert [
        name for name in toolkits.START_MODULES if not (package / f"{name}.py").is_file()
    ] == []


def test_two_toolkits_in_one_engine(host: Host) -> None:
    """Which of them a container gets is a matter of a name."""
    host.file("/usr/bin/nvidia-container-runtime", "theirs", 0o755)
    runtimes = {
        "nvidia": {"path": "/usr/bin/nvidia-container-runtime"},
        "gpuruntime": {"path": RUNTIME},
    }
    host.docker({"runtimes": runtimes})
    (finding,) = found(host, "toolkits")
    assert finding.status == "warn"
    assert "docker knows the runtimes of two toolkits" in finding.what
    # Under the incumbent's names, it is we.
    host.remove("/usr/bin/nvidia-container-runtime")
    host.link("/usr/bin/nvidia-container-runtime", "gpu-container-runtime")
    assert found(host, "toolkits")[0].status == "ok"


@pytest.mark.parametrize(
    ("at", "form", "value", "what"),
    [
        # The size of the first segment in the file.
        (64 + 32, "<Q", 1 << 20, "is truncated: it has {} of 1048576 bytes"),
        # Where the section headers are: the loader does not read them, pyelftools does.
        (40, "<Q", 1 << 40, "is damaged: "),
    ],
)
def test_a_library_that_is_not_whole(
    host: Host, at: int, form: str, value: int, what: str
) -> None:
    """A disk was full: the library has all its names, and its users end by SIGBUS."""
    path = f"{LIBRARIES}/libcuda.so.{VERSION}"
    assert [finding.status for finding in found(host, "files")] == ["ok"]
    data = bytearray(host.at(path).read_bytes())
    struct.pack_into(form, data, at, value)
    host.at(path).write_bytes(data)
    (finding,) = found(host, "files")
    assert finding.status == "fail"
    assert f'"{path}" {what.format(len(data))}' in finding.what
    assert finding.action == "install the driver again"


@pytest.mark.parametrize(("value", "status"), [("0 0", "warn"), ("1 1", "ok")])
def test_selinux(host: Host, value: str, status: str) -> None:
    """A confined container may open no device by default."""
    host.file("/sys/fs/selinux/enforce", "1")
    host.file("/sys/fs/selinux/booleans/container_use_devices", value)
    (finding,) = found(host, "selinux")
    assert finding.status == status


class TestSimulated:
    """The live host: what a tree cannot have, as a driver that answers."""

    def doctor(self, host: ShimHost, *names: str) -> dict[str, dict[str, str]]:
        """Return what the checks find there, by name."""
        done = host.run(PROGRAM, "doctor", "--json", "--check", ",".join(names or CHECKS))
        assert done.stderr == ""
        told = {item["check"]: item for item in json.loads(done.stdout)}
        assert "this is a bug" not in done.stdout
        return told

    def test_b034_a_driver_that_is_slow(self, tmp_path: Path) -> None:
        """Persistence keeps the GPUs up, and each start of a container short."""
        with ShimHost(tmp_path, "--gpus", "1", "--fault", "initdelay_us 2500000") as host:
            told = self.doctor(host, "answer")["answer"]
        assert told["status"] == "warn"
        assert re.match(
            r"NVML took \d\.\d s to respond: the driver initializes the GPUs each time",
            told["what"],
        )
        assert told["action"] == 'run "systemctl enable --now nvidia-persistenced"'

    @pytest.mark.parametrize("fault", ["init-fails 9", "init-hangs", "lost 1"])
    def test_a_driver_that_fails(self, tmp_path: Path, fault: str) -> None:
        """It is told, and everything else as well."""
        with ShimHost(tmp_path, "--gpus", "2", "--fault", fault) as host:
            host.write_config({"discovery-timeout": 2})
            config = str(tmp_path / "config.toml")
            done = host.run(PROGRAM, "doctor", "--json", GPURUNTIME_CONFIG=config)
        told = {item["check"]: item for item in json.loads(done.stdout)}
        assert list(told) == list(CHECKS)
        assert told["answer"]["status"] == "fail"
        assert told["nodes"]["status"] == "ok"
        assert done.returncode == 2

    def test_from_bad_to_good_by_what_it_says(self, tmp_path: Path) -> None:
        """The actions are commands of ours, and they help."""
        with ShimHost(tmp_path, "--gpus", "2", "--mig", "0:1") as host:
            host.shell("rm /dev/nvidia-uvm /dev/nvidia1; rm -r /dev/nvidia-caps")
            names = ("nodes", "mig", "dev-char", "specs", "spec-fresh")
            before = self.doctor(host, *names)
            assert [item["status"] for item in before.values()] == [
                *("fail", "fail", "warn", "warn", "ok"),
            ]
            # The machine's own is in use.
            host.shell("mount -t tmpfs none /var/lib; touch /run/before; sleep 0.1")
            self.doctor(host)
            places = "/dev /etc /run /etc/cdi /run/cdi /run/gpuruntime /var/lib"
            changed = host.shell(f"find {places} -xdev -newer /run/before -not -type c")
            assert changed == ""
            for item in before.values():
                for command in re.findall(r'run "gpuruntime ([^"]*)"', item["action"]):
                    words = command.replace(" --load-kernel-modules", "").split()
                    done = host.run(PROGRAM, *words)
                    assert done.returncode == 0, done.stderr
            after = self.doctor(host, *names)
            assert [item["status"] for item in after.values()] == ["ok"] * 5

    def test_an_engine_that_was_told_and_not_restarted(self, tmp_path: Path) -> None:
        """B009: from the command that configures it to the daemon that knows."""
        with ShimHost(tmp_path, "--gpus", "1") as host:
            # The machine's /var may have a kubelet's directory, with which containerd matters too.
            host.shell("mount -t tmpfs none /var/lib")
            daemon = "printf '#!/bin/sh\nwhile :; do sleep 1; done\n' > /usr/local/bin/dockerd"
            start = "/usr/local/bin/dockerd </dev/null >/dev/null 2>&1 & echo $!; sleep 0.2"
            pid = host.shell(f"{daemon}; chmod 755 /usr/local/bin/dockerd; {start}")
            told = self.doctor(host, "engines")["engines"]
            assert told["status"] == "warn"
            command = re.findall(r'run "gpuruntime ([^"]*)"', told["action"])[0]
            done = host.run(PROGRAM, *command.split(), "--runtime-path", LAUNCHER_PATH)
            assert done.returncode == 0, done.stderr
            told = self.doctor(host, "engines")["engines"]
            assert told["status"] == "fail"
            assert told["action"] == 'run "systemctl restart docker"'
            host.shell(f"kill {int(pid)}; sleep 0.2; {start}")
            told = self.doctor(host, "engines")["engines"]
            assert told["status"] == "ok", told
            assert "started since its config was written" in told["what"]

    @reachable.by_others
    def test_without_root(self, tmp_path: Path) -> None:
        """A user sees less, is told so, and is not told of what only root could have seen."""
        with ShimHost(tmp_path, "--gpus", "1") as host:
            user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
            done = host.run(*user, PROGRAM, "doctor", "--json")
        told = {item["check"]: item["status"] for item in json.loads(done.stdout)}
        assert list(told) == list(CHECKS)
        assert (told["answer"], told["nodes"], told["libraries"]) == ("ok", "ok", "ok")
        assert done.stderr == "note: run as root to check everything\n"

    def test_an_old_engine_by_its_own_word(self, tmp_path: Path) -> None:
        """Where there is a program, it tells its version itself; one that hangs is left."""
        with ShimHost(tmp_path, "--gpus", "1") as host:
            host.shell(
                "printf '#!/bin/sh\\necho podman version 4.2.0\\n' > /usr/bin/podman;"
                "printf '#!/bin/sh\\nsleep 100\\n' > /usr/sbin/dockerd;"
                f"{PROGRAM} cdi refresh --output /etc/cdi/nvidia.yaml"
            )
            told = self.doctor(host, "spec-readers")["spec-readers"]
        assert told["status"] == "fail"
        assert "podman 4.2.0 supports versions up to 0.4.0" in told["what"]
        assert "--max-spec-version 0.4.0" in told["action"]


@pytest.mark.parametrize(
    ("lines", "status", "what"),
    [
        ([], "ok", "no messages"),
        (["T1 warned gpu-cdi-hook: warning: no b"], "ok", "the last warning, at T1: gpu-cdi-hook"),
        (
            ["T1 failed hook: old", "T2 failed hook: mount: no room", "T2 failed hint: do"],
            "warn",
            "at T2 a hook failed: hook: mount: no room",
        ),
    ],
)
def test_what_hooks_have_said(host: Host, lines: list[str], status: str, what: str) -> None:
    """An engine with crun has shown an exit status, and nothing else."""
    if lines:
        host.file("/run/gpuruntime/hook-failures.log", "".join(f"{line}\n" for line in lines))
    (finding,) = found(host, "hook-messages")
    assert (finding.status, what in finding.what) == (status, True), finding


def test_a_host_without_nvidia_smi(host: Host) -> None:
    """Users start with it, and take its absence for that of the GPU."""
    host.remove("/usr/bin/nvidia-smi")
    (finding,) = found(host, "files")
    assert (finding.status, 'no "nvidia-smi"' in finding.what) == ("warn", True)
