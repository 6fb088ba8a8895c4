# SPDX-License-Identifier: Apache-2.0
"""The one action against each fault: it never contradicts what the host shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gpuruntime import remedies
from gpuruntime.plan import injection

RELEASE = "6.1.0-18-amd64"
MODULES = f"lib/modules/{RELEASE}"
GPU = "sys/bus/pci/devices/0000:1a:00.0"
MODULE = f"{MODULES}/updates/dkms/nvidia.ko"
DEPENDENCIES = {f"{MODULES}/modules.dep": "updates/dkms/nvidia.ko: kernel/drivers/drm.ko\n"}
SIGNED = "ELF ... ~Module signature appended~\n"
CREATE = 'run "gpuruntime system create-device-nodes --all --load-kernel-modules" as root'
HOST = {
    "proc/sys/kernel/osrelease": f"{RELEASE}\n",
    "proc/self/uid_map": "         0          0 4294967295\n",
    f"{GPU}/vendor": "0x10de\n",
    f"{GPU}/class": "0x030200\n",
}
DRIVERS = "../../../bus/pci/drivers"


def tree(root: Path, files: dict[str, str], driver: str = "") -> remedies.LiveHost:
    """Return the host of HOST and *files*, whose GPU belongs to the kernel driver *driver*."""
    for path, text in {**HOST, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    if driver:
        (root / GPU / "driver").symlink_to(f"{DRIVERS}/{driver}")
    return remedies.LiveHost(str(root))


@pytest.mark.parametrize(
    ("driver", "files", "reason", "action"),
    [
        ("", DEPENDENCIES, f"although kernel {RELEASE} has the module", CREATE),
        (
            "nouveau",
            DEPENDENCIES,
            "nouveau has 1 GPU(s)",
            (
                'write "blacklist nouveau" to a file in "/etc/modprobe.d", build the initramfs '
                "again, and reboot"
            ),
        ),
        ("nouveau", {}, "is not installed", "install the NVIDIA driver, and reboot"),
        (
            "vfio-pci",
            DEPENDENCIES,
            "vfio-pci has 1 GPU(s)",
            (
                'take the GPUs out of the options of vfio-pci in "/etc/modprobe.d" or on the '
                "kernel command line, and reboot, if containers are to use them"
            ),
        ),
        (
            "",
            {**DEPENDENCIES, "etc/modprobe.d/no.conf": "alias nvidia off\n"},
            '"/etc/modprobe.d/no.conf" has "alias nvidia off"',
            'remove that line from "/etc/modprobe.d/no.conf", and reboot',
        ),
        (
            # The file of the same name in /etc hides this one.
            "",
            {
                **DEPENDENCIES,
                "etc/modprobe.d/no.conf": "# nothing\n",
                "usr/lib/modprobe.d/no.conf": "install nvidia /bin/false\n",
            },
            "has the module",
            CREATE,
        ),
        (
            "",
            {
                **DEPENDENCIES,
                MODULE: "ELF, without a signature, and longer than its mark",
                "sys/kernel/security/lockdown": "none [integrity] confidentiality\n",
            },
            "is not signed",
            remedies.SIGN_MODULE,
        ),
        (
            "",
            {
                **DEPENDENCIES,
                MODULE: SIGNED,
                "sys/module/module/parameters/sig_enforce": "Y\n",
            },
            "has the module",
            CREATE,
        ),
        (
            "",
            {},
            f"kernel {RELEASE} has no module nvidia",
            f"install the NVIDIA driver with its module for kernel {RELEASE}",
        ),
        (
            "",
            {"usr/src/nvidia-550.163.01/dkms.conf": ""},
            "the headers of that kernel are not installed",
            f"install the headers of kernel {RELEASE}: DKMS builds the module then",
        ),
        (
            "",
            {"usr/src/nvidia-550.163.01/dkms.conf": "", f"{MODULES}/build/Makefile": ""},
            "DKMS has not built it",
            f'run "dkms autoinstall -k {RELEASE}" as root',
        ),
        (
            "",
            {"lib/modules/6.1.0-21-amd64/modules.dep": "updates/dkms/nvidia.ko.xz:\n"},
            "the modules of the running kernel",
            "reboot into kernel 6.1.0-21-amd64, which has the driver's module",
        ),
        (
            "",
            {**DEPENDENCIES, "proc/self/uid_map": "0 100000 65536\n"},
            "on the host of this container",
            "load the NVIDIA driver on that host",
        ),
        (
            "",
            {**DEPENDENCIES, "run/systemd/container": "lxc\n"},
            "on the host of this container",
            "load the NVIDIA driver on that host",
        ),
        (
            "",
            {**DEPENDENCIES, f"{GPU}/class": "0x020000\n"},
            "no NVIDIA GPU is on the PCI bus",
            remedies.ALLOW_MISSING_GPU,
        ),
    ],
)
def test_a_driver_that_is_not_loaded(
    tmp_path: Path, driver: str, files: dict[str, str], reason: str, action: str
) -> None:
    """`modprobe nvidia` cures one of these faults only."""
    text, cure = remedies.unloaded_module(tree(tmp_path, files, driver))
    assert cure == action
    assert reason in text


def test_modules_of_a_driver_root_are_loaded_from_there(tmp_path: Path) -> None:
    """A driver container has its modules; the host has none."""
    host = tree(tmp_path, {f"drv/{path}": text for path, text in DEPENDENCIES.items()})
    _, action = remedies.unloaded_module(host, "/drv")
    assert action == (
        'run "gpuruntime system create-device-nodes --all --load-kernel-modules '
        '--driver-root /drv" as root'
    )


@pytest.mark.parametrize(
    ("files", "action"),
    [
        ({}, remedies.REBOOT),
        ({**DEPENDENCIES, MODULE: "x\0version=550.190.01\0y"}, remedies.REBOOT),
        (
            {**DEPENDENCIES, MODULE: "x\0version=550.163.01\0y"},
            "install the driver's kernel module of version 550.190.01, and reboot",
        ),
        (
            {
                f"var/lib/dkms/nvidia/550.163.01/{RELEASE}/log": "",
                "var/lib/dkms/nvidia/550.190.01/source": "",
            },
            f'run "dkms install nvidia/550.190.01 -k {RELEASE}" as root, and reboot',
        ),
        (
            {"run/.containerenv": ""},
            "install the driver's libraries of version 550.163.01 in this container",
        ),
    ],
)
def test_libraries_of_another_version(tmp_path: Path, files: dict[str, str], action: str) -> None:
    """A reboot helps only if the kernel loads another module afterwards."""
    host = tree(tmp_path, files)
    assert remedies.version_mismatch(host, "550.163.01", "550.190.01") == action


LOADED = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA ... 550.163.01\n",
    "proc/driver/nvidia/gpus/0000:1a:00.0/information": "Device Minor: \t 0\n",
}
STALE = 'run "gpuruntime cdi refresh --output /etc/cdi/a.yaml"'


@pytest.mark.parametrize(
    ("path", "files", "action"),
    [
        ("/dev/nvidia0", LOADED, CREATE),
        ("/dev/nvidia-uvm", LOADED, CREATE),
        ("/dev/nvidia-caps/nvidia-cap66", LOADED, CREATE),
        (
            "/drv/dev/nvidia-uvm",
            LOADED,
            (
                'run "gpuruntime system create-device-nodes --all --load-kernel-modules '
                '--dev-root /drv" as root'
            ),
        ),
        ("/dev/nvidia1", LOADED, STALE),
        ("/dev/dri/card7", LOADED, STALE),
        ("/dev/nvidia0", {}, f"install the NVIDIA driver with its module for kernel {RELEASE}"),
        (
            "/dev/nvidia0",
            {**LOADED, "proc/self/uid_map": "0 100000 65536\n"},
            'pass "/dev/nvidia0" into this container on its host',
        ),
    ],
)
def test_a_node_of_a_spec_that_does_not_exist(
    tmp_path: Path, path: str, files: dict[str, str], action: str
) -> None:
    """Writing the spec again makes no node, and a node of a GPU that is gone cannot be made."""
    host = tree(tmp_path, files)
    assert remedies.missing_spec_node(host, path, "/etc/cdi/a.yaml") == action


@pytest.mark.parametrize(
    ("path", "kind", "action"),
    [
        ("/var/run/cdi/nvidia.yaml", "nvidia.com/gpu", 'run "gpuruntime cdi refresh"'),
        ("/etc/cdi/a.yaml", "nvidia.com/gpu", STALE),
        (
            "/etc/cdi/m.json",
            "management.nvidia.com/gpu",
            'run "gpuruntime cdi refresh --mode management --output /etc/cdi/m.json"',
        ),
        (
            "/etc/cdi/i.json",
            "nvidia.com/imex-channel",
            'run "gpuruntime cdi refresh --mode imex --output /etc/cdi/i.json"',
        ),
        (
            "/etc/cdi/p.json",
            "nvidia.com/pgpu",
            (
                'run "gpuruntime cdi refresh --vendor nvidia.com --class pgpu --output '
                '/etc/cdi/p.json"'
            ),
        ),
        (
            "/etc/cdi/amd.json",
            None,
            'write "/etc/cdi/amd.json" again with the program of its vendor',
        ),
    ],
)
def test_the_spec_that_is_stale_is_the_one_to_write_again(
    path: str, kind: str | None, action: str
) -> None:
    """The usual output is another file, and another kind would be another spec."""
    assert remedies.stale_spec(path, kind) == action


# Advice against faults that this table is for.
ADVICE = re.compile(
    r'run "(modprobe|nvidia-modprobe|gpuruntime system create|gpuruntime cdi refresh)'
    r"|^reboot|NVRM and Xid|^install the (NVIDIA )?driver( again)?$|\"nvidia-smi.*\" works"
)
TREE = Path(remedies.__file__).parents[1]
SOURCES = sorted(
    path.relative_to(TREE)
    for room in ("gpuruntime", "hooks")
    for path in (TREE / room).rglob("*.py")
    if path.name != "remedies.py"
)


def texts(path: Path) -> list[str]:
    """Return the text constants of the module *path*."""
    nodes = ast.walk(ast.parse((TREE / path).read_text()))
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_no_other_module_has_an_action_of_its_own() -> None:
    """The runtime, doctor and explain would give different advice for one fault again."""
    assert len(SOURCES) > 100
    actions = {
        (str(path), text) for path in SOURCES for text in texts(path) if ADVICE.search(text)
    }
    # The start path warns of this without loading the table.
    assert actions == {("gpuruntime/plan/injection.py", remedies.CREATE_LINKS)}
    assert injection._CREATE_LINKS == remedies.CREATE_LINKS
