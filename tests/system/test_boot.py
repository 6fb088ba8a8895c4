# SPDX-License-Identifier: Apache-2.0
"""What happens at boot: nodes, links by which systemd knows them, units. On simulated hosts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shim_host import PROGRAM, TREE, ShimHost, asking

UNITS = TREE / "packaging" / "systemd"
NAMES = sorted(
    path.name for path in UNITS.iterdir() if path.suffix in (".service", ".path", ".timer")
)
RULES = "71-gpuruntime.rules"
REFRESH = "gpuruntime-cdi-refresh.service"
# As `systemd-analyze security` counts: 0 is nothing to be afraid of, 10 is all.
MAX_EXPOSURE = 1.5
NODES = ("system", "create-device-nodes")
LINKS = ("system", "create-dev-char-symlinks")
SYSTEMD = {"cgroupsPath": "system.slice:docker:0123"}
EVERYTHING = (
    "NVIDIA_DRIVER_CAPABILITIES=all",
    "NVIDIA_GDS=enabled",
    "NVIDIA_MOFED=enabled",
    "NVIDIA_GDRCOPY=enabled",
    "NVIDIA_NVSWITCH=enabled",
    "NVIDIA_IMEX_CHANNELS=0,2,10",
)
FEATURES = ("gds", "mofed", "gdrcopy", "nvswitch", "imex")

pytestmark = pytest.mark.system("systemd-analyze", "setpriv", "unshare")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ShimHost]:
    """Return a host with two GPUs, one of them divided."""
    with ShimHost(tmp_path, "--gpus", "2", "--mig", "1:2") as started:
        yield started


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Return a directory of our units that call the program of this tree."""
    for name in NAMES:
        text = (UNITS / name).read_text().replace("/usr/bin/gpuruntime", PROGRAM)
        (tmp_path / name).write_text(text)
    return tmp_path


def nodes(host: ShimHost) -> dict[str, str]:
    """Return path → mode, owner and numbers of the driver's nodes."""
    told = host.shell("find /dev -name 'nvidia*' -type c -exec stat -c '%n %a %u:%g %t:%T' {} +")
    return dict(line.split(" ", 1) for line in sorted(told.splitlines()))


def rules(config: dict[str, Any]) -> set[str]:
    """Return M:m of the devices that *config* allows by number."""
    return {
        f"{rule['major']}:{rule['minor']}"
        for rule in config["linux"]["resources"]["devices"]
        if rule["allow"]
    }


def missing_links(host: ShimHost, numbers: set[str]) -> set[str]:
    """Return those of *numbers* that runc's systemd driver would skip: those without a path."""
    told = host.shell("cd /dev/char 2>/dev/null && ls; ls /sys/dev/char").split()
    return numbers - set(told)


def test_systemd_understands_the_units(units: Path) -> None:
    """A line that it does not know is a warning in a log that nobody reads."""
    done = subprocess.run(
        ["systemd-analyze", "verify", *(units / name for name in NAMES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # The control: it does say so.
    broken = units / REFRESH
    broken.write_text(broken.read_text().replace("[Service]\n", "[Service]\nProtectAll=yes\n"))
    done = subprocess.run(
        ["systemd-analyze", "verify", broken], capture_output=True, text=True, check=False
    )
    assert "ProtectAll" in done.stderr


def test_the_refresh_may_do_little(units: Path) -> None:
    """It runs as root on every node, by a timer."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", units / REFRESH],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert found
    assert float(found[1]) <= MAX_EXPOSURE


def test_every_unit_is_enabled_and_the_rule_starts_what_there_is() -> None:
    """An installed unit that nobody starts is no unit."""
    preset = (UNITS / "90-gpuruntime.preset").read_text()
    assert re.findall(r"^enable (\S+)$", preset, re.MULTILINE) == [
        "gpuruntime-nodes.service",
        "gpuruntime-cdi-refresh.service",
        "gpuruntime-cdi-refresh.path",
        "gpuruntime-cdi-refresh.timer",
    ]
    for name in NAMES:
        assert f"enable {name}\n" in preset
        assert "\n[Install]\nWantedBy=" in (UNITS / name).read_text()
    lines = [
        line
        for line in (UNITS / "71-gpuruntime.rules").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(r'([A-Z]+(\{\w+\})?(==|\+=)"[^"]*"(, |$))+', line)
        wanted = re.search(r'ENV\{SYSTEMD_WANTS\}\+="([^"]*)"', line)
        assert wanted
        assert all((UNITS / name).exists() for name in wanted[1].split())


def test_engines_start_after_the_nodes() -> None:
    """A container that is started again at boot needs them."""
    for name in ("gpuruntime-nodes.service", REFRESH):
        text = (UNITS / name).read_text()
        before = re.findall(r"^Before=(.*)$", text, re.MULTILINE)[0].split()
        assert {"docker.service", "containerd.service", "crio.service"} <= set(before)


def test_the_refresh_needs_no_more_than_its_unit_gives(host: ShimHost) -> None:
    """Without any capability, and with nothing to write to but its two directories."""
    script = f"""
        for place in /usr /etc /dev /run; do
            mount --bind $place $place
            mount -o remount,bind,ro $place
            if touch $place/x; then exit 9; fi
        done 2>/dev/null
        mount -t tmpfs -o mode=755 own /run/cdi
        mount -t tmpfs -o mode=755 own /run/gpuruntime
        exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs {PROGRAM} cdi refresh
    """
    done = host.run("unshare", "-m", "--propagation", "private", "sh", "-euc", script)
    assert done.returncode == 0, done.stderr
    assert 'wrote "/var/run/cdi/nvidia.yaml"' in done.stderr
    assert "required and missing: none" in done.stderr


def test_a_fresh_boot_has_all_nodes(host: ShimHost) -> None:
    """By number, mode and owner as the driver's own program makes them."""
    expected = nodes(host)
    host.shell("rm -r /dev/nvidia*")
    planned = host.run(PROGRAM, *NODES, "--all", "--dry-run")
    assert planned.returncode == 0
    assert nodes(host) == {}
    assert sorted(line.split()[2] for line in planned.stdout.splitlines()) == sorted(expected)
    done = host.run(PROGRAM, *NODES, "--all")
    assert done.returncode == 0, done.stderr
    assert nodes(host) == expected
    assert len(done.stderr.splitlines()) == len(expected)
    again = host.run(PROGRAM, *NODES, "--all")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert nodes(host) == expected
    assert host.create(asking("NVIDIA_VISIBLE_DEVICES=all")).returncode == 0


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("mount -t tmpfs none /sys/bus/pci/devices", "has no NVIDIA GPU"),
        ("rm -r /usr/lib/*-linux-gnu/lib*nvidia* /usr/lib/*-linux-gnu/libcuda*", "not installed"),
    ],
    ids=["no GPU", "no driver"],
)
@pytest.mark.parametrize("unit", ["gpuruntime-nodes.service", REFRESH])
def test_a_unit_with_nothing_to_do_does_not_fail(
    host: ShimHost, unit: str, script: str, why: str
) -> None:
    """Each command that it calls says so in a line; the module is not loaded in either case."""
    host.shell(
        f"rm -r /dev/nvidia* /dev/dri; {script}; grep -v nvidia /proc/devices > /run/devices;"
        "mount --bind /run/devices /proc/devices; mount -t tmpfs none /proc/driver/nvidia"
    )
    commands = re.findall(
        r"^ExecStart=/usr/bin/gpuruntime (.*)$", (UNITS / unit).read_text(), re.MULTILINE
    )
    assert commands
    for command in commands:
        done = host.run(PROGRAM, *command.split())
        assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (0, 1, ""), done
        assert why in done.stderr or "no device nodes" in done.stderr
    assert host.shell("ls /run/cdi 2>/dev/null; ls /dev | grep nvidia || true") == ""


def test_nothing_is_started_again_and_again_without_the_driver() -> None:
    """Neither each minute nor with each package; udev starts them when the module comes."""
    (rule,) = re.findall(
        r'^ACTION=="add", SUBSYSTEM=="module".*$', (UNITS / RULES).read_text(), re.MULTILINE
    )
    for name in NAMES:
        if not name.endswith(".service"):
            assert "\nConditionPathExists=/sys/module/nvidia\n" in (UNITS / name).read_text()
            assert re.search(rf"[ \"]{name}[ \"]", rule)


def test_control_nodes_in_the_order_of_the_incumbent(host: ShimHost) -> None:
    """Its flag, its commands: scripts that call it go on."""
    host.shell("rm -r /dev/nvidia*")
    done = host.run(PROGRAM, *NODES, "--control-devices", DRY_RUN="1")
    uvm = re.search(r"^ *(\d+) nvidia-uvm$", host.shell("cat /proc/devices"), re.MULTILINE)
    assert uvm
    assert done.stdout.splitlines() == [
        "mknod --mode=0666 /dev/nvidiactl c 195 255",
        "mknod --mode=0666 /dev/nvidia-modeset c 195 254",
        f"mknod --mode=0666 /dev/nvidia-uvm c {uvm[1]} 0",
        f"mknod --mode=0666 /dev/nvidia-uvm-tools c {uvm[1]} 1",
    ]
    done = host.run(PROGRAM, *NODES, "--control-devices", "--dev-root", "/mnt")
    assert done.returncode == 0, done.stderr
    assert host.shell("ls /mnt/dev").split() == [
        *("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"),
    ]
    host.shell("rm -r /mnt/dev")


def test_what_is_in_the_way_stays(host: ShimHost) -> None:
    """It may be in use, and what a link leads to is not ours; the others are made."""
    host.shell(
        "rm -r /dev/nvidia*; mknod /dev/nvidia-uvm c 1 3; touch /dev/nvidia0 /run/target;"
        "ln -s /run/target /dev/nvidia1"
    )
    done = host.run(PROGRAM, *NODES, "--all")
    assert done.returncode == 1
    for problem in (
        '"/dev/nvidia-uvm" is device 1:3, not ',
        '"/dev/nvidia0" is not a device node',
        '"/dev/nvidia1" is not a device node',
    ):
        assert problem in done.stderr
    assert host.shell("stat -c '%t:%T' /dev/nvidia-uvm; cat /run/target; ls /dev/nvidiactl") == (
        "1:3\n/dev/nvidiactl\n"
    )
    host.shell(
        "rm -r /dev/nvidia-caps; mkdir /run/elsewhere; ln -s /run/elsewhere /dev/nvidia-caps"
    )
    assert host.run(PROGRAM, *NODES, "--mig-devices").returncode == 1
    assert host.shell("ls /run/elsewhere") == ""


def test_nodes_belong_to_whom_the_driver_is_told(host: ShimHost) -> None:
    """An administrator who took them from others does not find them open after a boot."""
    params = "DeviceFileUID: 0\\nDeviceFileGID: 44\\nDeviceFileMode: 432\\nModifyDeviceFiles: 1\\n"
    host.shell(
        f"printf '{params}' > /run/params; mount --bind /run/params /proc/driver/nvidia/params;"
        "rm /dev/nvidia0 /dev/nvidiactl"
    )
    done = host.run(PROGRAM, *NODES, "--gpu-devices", "--control-devices")
    assert done.returncode == 0, done.stderr
    told = host.shell("stat -c '%a %g' /dev/nvidia0 /dev/nvidiactl")
    assert told == "660 44\n660 44\n"


def test_modules_are_loaded_first_and_stop_it_if_they_cannot_be(host: ShimHost) -> None:
    """Without them there are no majors to make nodes of."""
    host.shell("printf '#!/bin/sh\\necho $* >> /run/loaded' > /usr/sbin/modprobe")
    host.shell("chmod 755 /usr/sbin/modprobe; rm /dev/nvidiactl")
    done = host.run(PROGRAM, *NODES, "--control-devices", "--load-kernel-modules")
    assert done.returncode == 0, done.stderr
    assert host.shell("cat /run/loaded") == "nvidia\nnvidia-uvm\nnvidia-modeset\n"
    done = host.run(PROGRAM, *NODES, "--load-kernel-modules", "--dry-run", "--root", "/drv")
    assert done.stdout.splitlines()[0] == "chroot /drv /sbin/modprobe nvidia"
    host.shell("printf '#!/bin/sh\\necho no such module >&2; exit 1' > /usr/sbin/modprobe")
    done = host.run(PROGRAM, *NODES, "--control-devices", "--load-kernel-modules")
    assert done.returncode == 1
    assert 'cannot load the module "nvidia": no such module' in done.stderr


@pytest.mark.parametrize("majors", ["", "195 nvidia\n", "195 nvidia\n511 nvidia-uvm\n"])
def test_no_nodes_without_majors(host: ShimHost, majors: str) -> None:
    """A guess would be another device's node."""
    host.shell(f"printf 'Character devices:\\n{majors}' > /run/majors; rm -r /dev/nvidia*")
    host.shell("mount --bind /run/majors /proc/devices")
    done = host.run(PROGRAM, *NODES, "--all")
    assert done.returncode == 1
    expected = "missing required device major nvidia-" if majors else "no NVIDIA devices found"
    assert expected in done.stderr
    assert done.stderr.count("\n") == 2
    assert host.run(PROGRAM, *LINKS, "--create-all").returncode == 1


@pytest.mark.parametrize("options", [(), ("--create-all",)])
def test_every_rule_of_a_container_has_its_link(host: ShimHost, options: tuple[str, ...]) -> None:
    """The systemd driver of runc passes over a rule without one: it is lost at the next reload."""
    document = asking(
        "NVIDIA_VISIBLE_DEVICES=0,1:0,1:1", "NVIDIA_DRIVER_CAPABILITIES=compute", linux=SYSTEMD
    )
    call = host.create(document)
    numbers = rules(call.config)
    assert len(numbers) > 8
    # The control: all of them are lost but for those that sysfs has.
    assert missing_links(host, numbers) >= {"195:0", "195:255"}
    assert "the container loses them" in call.said("warning")[0]
    done = host.run(PROGRAM, *LINKS, *options)
    assert done.returncode == 0, done.stderr
    if options:
        # All that the driver can ever make; those of others need to be there first.
        assert host.run(PROGRAM, *LINKS).returncode == 0
    assert missing_links(host, numbers) == set()
    call = host.create(document)
    assert call.said("warning") == []
    for line in host.shell("cd /dev/char && stat -L -c '%n %Hr:%Lr' * 2>/dev/null || true").split(
        "\n"
    ):
        name, _, led = line.partition(" ")
        assert name == led


def test_features_have_links_too(tmp_path: Path) -> None:
    """Nodes of storage, network, NVLink and IMEX are given by the same rules."""
    options = [word for name in FEATURES for word in ("--feature", name)]
    with ShimHost(tmp_path, "--gpus", "1", *options) as host:
        host.shell("mkdir -p /sys/dev/char")
        document = asking("NVIDIA_VISIBLE_DEVICES=all", *EVERYTHING, linux=SYSTEMD)
        numbers = rules(host.create(document).config)
        assert len(numbers) > 15
        assert host.run(PROGRAM, *LINKS).returncode == 0
        assert missing_links(host, numbers) == set()


def test_links_for_mig_devices_to_come(host: ShimHost) -> None:
    """A link to a node that is not there yet is right when it is; nothing has to run then."""
    done = host.run(PROGRAM, *LINKS, "--create-all")
    assert done.returncode == 0, done.stderr
    minors = host.shell(
        "grep -cE '^(config|monitor|gpu[01]/)' /proc/driver/nvidia-caps/mig-minors"
    )
    told = host.shell("ls /dev/char").split()
    gpus = [name for name in told if name.startswith("195:")]
    assert sorted(gpus) == ["195:0", "195:1", "195:254", "195:255"]
    uvm = 2
    assert len(told) == int(minors) + len(gpus) + uvm


def test_links_are_idempotent_and_mended(host: ShimHost) -> None:
    """A module that was loaded again has other majors; what is no link stays."""
    assert host.run(PROGRAM, *LINKS).returncode == 0
    before = host.shell("cd /dev/char && ls -l")
    again = host.run(PROGRAM, *LINKS)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert host.shell("cd /dev/char && ls -l") == before
    host.shell("ln -sfn /dev/null /dev/char/195:0; ln -sfn ../nvidia1 /dev/char/195:1")
    done = host.run(PROGRAM, *LINKS)
    assert done.stderr == 'created "/dev/char/195:0" -> "/dev/nvidia0"\n'
    assert host.shell("readlink /dev/char/195:0 /dev/char/195:1") == "/dev/nvidia0\n../nvidia1\n"
    host.shell("rm /dev/char/195:0 /dev/char/195:1; mkdir /dev/char/195:0")
    done = host.run(PROGRAM, *LINKS)
    assert done.returncode == 1
    assert '"/dev/char/195:0"' in done.stderr
    assert host.shell("readlink /dev/char/195:1") == "/dev/nvidia1\n"


def test_links_elsewhere_and_only_said(host: ShimHost) -> None:
    """The incumbent's flags and variables."""
    done = host.run(PROGRAM, *LINKS, "--dry-run", DEV_CHAR_PATH="/run/char")
    assert done.returncode == 0
    assert "ln -sfn /dev/nvidia0 /run/char/195:0" in done.stdout.splitlines()
    assert host.shell("ls -d /run/char || true") == ""
    assert host.run(PROGRAM, *LINKS, "--dev-char-path", "/run/char").returncode == 0
    assert "195:0" in host.shell("ls /run/char")
    done = host.run(PROGRAM, *LINKS, "--load-kernel-modules", "--create-device-nodes")
    assert done.stderr.startswith(
        "warning: --load-kernel-modules is ignored without --create-all\n"
        "warning: --create-device-nodes is ignored without --create-all\n"
    )
    host.shell("rm /dev/nvidiactl")
    done = host.run(PROGRAM, *LINKS, "--create-all", "--create-device-nodes")
    assert done.returncode == 0
    assert host.shell("stat -c %t:%T /dev/nvidiactl") == "c3:ff\n"
