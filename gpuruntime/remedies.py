# SPDX-License-Identifier: Apache-2.0
"""Faults of a host that several commands report, and the one action that cures each.

The runtime, its hooks, `doctor` and `explain` take their hints for these faults from here, so that
they agree. Loaded only when something is wrong. An action can depend on the host: nobody can load
a module of a GPU that another driver has. Reads only, and raises nothing.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO, Protocol

    class Host(Protocol):
        """The host that an action is for: this machine, or a tree of files."""

        def read(self, path: str) -> str | None:
            """Return the text of the file *path*, None if it cannot be read."""

        def open(self, path: str) -> BinaryIO | None:
            """Return the regular file *path*, open for reading; None if that fails."""

        def names(self, directory: str) -> list[str]:
            """Return the names in *directory*, sorted; none if it cannot be read."""

        def link(self, path: str) -> str | None:
            """Return the target of the symlink *path*, None if it is not one."""

        def exists(self, path: str) -> bool:
            """Return whether there is anything at *path*."""


CHECK_LOG = 'look for NVRM and Xid lines in "dmesg"'
RESET_GPU = 'look for NVRM and Xid lines in "dmesg"; reset the GPU with "nvidia-smi -r", or reboot'
CHECK_NVIDIA_SMI = 'check that "nvidia-smi -L" works on the host'
CREATE_NODES = 'run "gpuruntime system create-device-nodes --all --load-kernel-modules{}" as root'
CREATE_LINKS = 'run "gpuruntime system create-dev-char-symlinks" as root'
ALLOW_MISSING_GPU = 'set "missing-gpu" to "warn" in config.toml to start containers without a GPU'
INSTALL_DRIVER = "install the NVIDIA driver"
INSTALL_FOR_MACHINE = "install the driver for the architecture of this machine"
REINSTALL_DRIVER = "install the driver again"
RESTART_WSL = 'run "wsl --shutdown" on Windows, and update its NVIDIA driver'
REBOOT = "reboot: the kernel loads the installed module then"
SIGN_MODULE = (
    "sign the module with a key that the firmware accepts "
    '("mokutil --import" enrolls one at the next boot)'
)
DEFAULT_SPECS = ("/var/run/cdi/nvidia.yaml", "/run/cdi/nvidia.yaml")

VENDOR_ID, DISPLAY_CLASS = "0x10de", "0x03"
PCI_DEVICES = "/sys/bus/pci/devices"
_DRIVER_ROOT = '"nvidia-container-cli.root" in config.toml, or "--driver-root"'
_IDENTITY_MAP = ["0", "0", "4294967295"]
# What systemd and podman leave in a container.
_GUEST_MARKS = ("/run/systemd/container", "/run/.containerenv")
_FREE_DRIVERS = ("nouveau", "nova_core")
# In the order in which a file hides those of the same name in the others: modprobe.d(5).
_MODPROBE_DIRECTORIES = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d")
# Patterns are compiled where they are used: every discovery imports this module.
_DISABLED = r"(?m)^\s*(alias\s+nvidia\s+off|install\s+nvidia\s+(?:/usr)?/bin/(?:true|false))\s*$"
# Debian's package calls the module nvidia-current, with the alias nvidia.
_MODULE_FILE = r"(?m)^(\S*/nvidia(?:-current)?\.ko(?:\.\w+)?):"
_SIGNATURE_MARK = b"~Module signature appended~\n"
_VERSION_MARK = rb"\0version=([0-9][0-9.]{2,30})\0"
_MAX_MODULE_BYTES = 256 << 20
_GPU_NODE = r"nvidia([0-9]{1,6})\Z"
_CONTROL_NODE = r"nvidia(ctl|-uvm|-uvm-tools|-modeset|-caps/nvidia-cap[0-9]+)\Z"
# Class of a kind → the mode of `cdi generate` that makes it.
_MODES = {name: name for name in ("gds", "mofed", "gdrcopy", "nvswitch", "cc")}
_MODES["imex-channel"] = "imex"
DEFAULT_KIND, _MANAGEMENT_KIND = "nvidia.com/gpu", "management.nvidia.com/gpu"


class LiveHost:
    """This machine; *root* is the directory that has its /proc and /sys, "" for "/"."""

    def __init__(self, root: str = "") -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        """Return the text of the file *path*, None if it cannot be read."""
        try:
            with open(self._root + path, encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except OSError:
            return None

    def open(self, path: str) -> BinaryIO | None:
        """Return the file *path*, open for reading; None if that fails."""
        try:
            return open(self._root + path, "rb")
        except OSError:
            return None

    def names(self, directory: str) -> list[str]:
        """Return the names in *directory*, sorted; none if it cannot be read."""
        try:
            return sorted(os.listdir(self._root + directory))
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """Return the target of the symlink *path*, None if it is not one."""
        try:
            return os.readlink(self._root + path)
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Return whether there is anything at *path*."""
        return os.path.lexists(self._root + path)


def drivers_on_bus(host: Host, kind: str = DISPLAY_CLASS) -> dict[str, str]:
    """Return PCI address → kernel driver ("" for none) of NVIDIA's devices of the class *kind*.

    Virtual functions are omitted, because they belong to virtual machines.
    """
    drivers = {}
    for address in host.names(PCI_DEVICES):
        device = f"{PCI_DEVICES}/{address}"
        is_nvidia = (host.read(f"{device}/vendor") or "").strip() == VENDOR_ID
        is_of_kind = (host.read(f"{device}/class") or "").startswith(kind)
        if is_nvidia and is_of_kind and not host.exists(f"{device}/physfn"):
            drivers[address] = os.path.basename(host.link(f"{device}/driver") or "")
    return drivers


def in_user_namespace(host: Host) -> bool:
    """Return whether *host* is in a user namespace, where no device node can be made."""
    return (host.read("/proc/self/uid_map") or "").split() not in ([], _IDENTITY_MAP)


def is_guest(host: Host) -> bool:
    """Return whether *host* is a container, whose kernel and modules are those of another host."""
    return in_user_namespace(host) or any(map(host.exists, _GUEST_MARKS))


def create_nodes(driver_root: str = "/", dev_root: str = "") -> str:
    """Return the action that loads the modules and makes every missing node of the driver."""
    driver_root, options = driver_root or "/", ""
    if driver_root != "/":
        options += f" --driver-root {driver_root}"
    if dev_root and dev_root != driver_root:
        options += f" --dev-root {dev_root}"
    return CREATE_NODES.format(options)


def other_kernel_driver(driver: str) -> str:
    """Return the action where the kernel driver *driver* has a GPU, "" if none has it."""
    if not driver:
        return CHECK_LOG
    if driver in _FREE_DRIVERS:
        return (
            f'write "blacklist {driver}" to a file in "/etc/modprobe.d", build the initramfs '
            "again, and reboot"
        )
    return (
        f'take the GPUs out of the options of {driver} in "/etc/modprobe.d" or on the kernel '
        "command line, and reboot, if containers are to use them"
    )


def unloaded_module(host: Host, driver_root: str = "/") -> tuple[str, str]:
    """Return why no module of the driver is loaded, and the action against that."""
    if is_guest(host):
        return (
            "no driver is loaded on the host of this container",
            "load the NVIDIA driver on that host",
        )
    drivers = drivers_on_bus(host)
    if not drivers:
        return "no driver is loaded, and no NVIDIA GPU is on the PCI bus", ALLOW_MISSING_GPU
    release = (host.read("/proc/sys/kernel/osrelease") or "").strip()
    modules = f"{driver_root.rstrip('/')}/lib/modules/{release}"
    return (
        _of_other_driver(host, drivers, modules)
        or _of_installed_module(host, modules, release, driver_root)
        or _of_missing_module(host, modules, release, len(drivers))
    )


def _of_other_driver(host: Host, drivers: dict[str, str], modules: str) -> tuple[str, str] | None:
    """Return the fault if another driver has every GPU; None if at least one is free."""
    owners = sorted(set(drivers.values()))
    if "" in owners or "nvidia" in owners:
        return None
    names, count = ", ".join(owners), len(drivers)
    text = f"no NVIDIA driver is loaded: {names} has {count} GPU(s)"
    free = next((name for name in owners if name in _FREE_DRIVERS), "")
    if free and not _module_file(host, modules):
        # Its packages do the rest.
        return f"{text}, and the NVIDIA driver is not installed", f"{INSTALL_DRIVER}, and reboot"
    return text, other_kernel_driver(free or names)


def _of_installed_module(
    host: Host, modules: str, release: str, driver_root: str
) -> tuple[str, str] | None:
    """Return why a module that is installed is not loaded; None if none is installed."""
    file = _module_file(host, modules)
    if not file:
        return None
    line, path = _disabling_line(host)
    if line:
        return (
            f'no driver is loaded: "{path}" has "{line}"',
            f'remove that line from "{path}", and reboot',
        )
    if _accepts_signed_only(host) and not _is_signed(host, file):
        return (
            (
                "no driver is loaded: the kernel accepts signed modules only (Secure Boot), and "
                f'"{file}" is not signed'
            ),
            SIGN_MODULE,
        )
    return f"no driver is loaded, although kernel {release} has the module", create_nodes(
        driver_root
    )


def _of_missing_module(host: Host, modules: str, release: str, count: int) -> tuple[str, str]:
    """Return why kernel *release* has no module of the driver, and what installs it."""
    text = f"no driver is loaded, and kernel {release} has no module nvidia, for {count} GPU(s)"
    top = os.path.dirname(modules)
    others = [name for name in host.names(top) if _module_file(host, f"{top}/{name}")]
    if others and not host.names(modules):
        return (
            f"no driver is loaded: the modules of the running kernel {release} have been removed",
            f"reboot into kernel {others[-1]}, which has the driver's module",
        )
    if not _dkms_versions(host):
        return text, f"{INSTALL_DRIVER} with its module for kernel {release}"
    if not host.names(f"{modules}/build"):
        return (
            f"{text}: DKMS has not built it, and the headers of that kernel are not installed",
            f"install the headers of kernel {release}: DKMS builds the module then",
        )
    return f"{text}: DKMS has not built it", f'run "dkms autoinstall -k {release}" as root'


def _dkms_versions(host: Host) -> list[str]:
    """Return the versions of the driver whose module DKMS has the source of."""
    tree = [name for name in host.names("/var/lib/dkms/nvidia") if name[:1].isdigit()]
    sources = [name for name in host.names("/usr/src") if re.match(r"nvidia-[0-9.]+\Z", name)]
    return tree or [name.partition("-")[2] for name in sources]


def _module_file(host: Host, modules: str) -> str:
    """Return the path of the driver's module in the directory *modules*, "" if it has none."""
    match = re.search(_MODULE_FILE, host.read(f"{modules}/modules.dep") or "")
    return os.path.join(modules, match[1]) if match else ""


def _disabling_line(host: Host) -> tuple[str, str]:
    """Return the line that keeps modprobe from loading the module, and its file; ("", "")."""
    files: dict[str, str] = {}
    for directory in _MODPROBE_DIRECTORIES:
        for name in host.names(directory):
            files.setdefault(name, f"{directory}/{name}")
    for name, path in sorted(files.items()):
        match = re.search(_DISABLED, host.read(path) or "") if name.endswith(".conf") else None
        if match:
            return " ".join(match[1].split()), path
    return "", ""


def _accepts_signed_only(host: Host) -> bool:
    enforced = (host.read("/sys/module/module/parameters/sig_enforce") or "").strip() == "Y"
    lockdown = host.read("/sys/kernel/security/lockdown") or ""
    return enforced or "[integrity]" in lockdown or "[confidentiality]" in lockdown


def _is_signed(host: Host, file: str) -> bool:
    """Return whether the module *file* is signed; True for one that is compressed, and unknown."""
    stream = host.open(file) if file.endswith(".ko") else None
    if stream is None:
        return True
    with stream:
        try:
            stream.seek(-len(_SIGNATURE_MARK), os.SEEK_END)
            return stream.read() == _SIGNATURE_MARK
        except OSError:
            # Shorter than a signature.
            return False


def version_mismatch(host: Host, loaded: str, installed: str) -> str:
    """Return the action where module *loaded* runs with libraries of the version *installed*."""
    if is_guest(host):
        return f"install the driver's libraries of version {loaded} in this container"
    release = (host.read("/proc/sys/kernel/osrelease") or "").strip()
    if _installed_version(host, release) == loaded:
        # A reboot would load the same module again.
        if installed in _dkms_versions(host):
            return f'run "dkms install nvidia/{installed} -k {release}" as root, and reboot'
        return f"install the driver's kernel module of version {installed}, and reboot"
    return REBOOT


def other_libraries(host: Host, linked: str) -> str:
    """Return the action where programs use libraries of *linked*, beside those of the module."""
    release = (host.read("/proc/sys/kernel/osrelease") or "").strip()
    if _installed_version(host, release) == linked:
        return REBOOT
    return f"remove the libraries of driver {linked}"


def missing_libraries(host: Host, loaded: str, driver_root: str = "/") -> str:
    """Return the action where the driver root has no libraries; *loaded* may be ""."""
    if driver_root not in ("", "/"):
        return f"use the driver root below which the driver is installed: {_DRIVER_ROOT}"
    place = " in this container" if is_guest(host) else ""
    if loaded:
        return f"install the driver's libraries of version {loaded}{place}"
    if place:
        return f"install the driver's libraries{place}"
    # With its module, if that is missing as well.
    _, action = unloaded_module(host)
    return action if action.startswith(INSTALL_DRIVER) else INSTALL_DRIVER


def other_driver_root(path: str) -> str:
    """Return the action where the driver is below *path*, which is not the driver root."""
    return f'use the driver root "{path}": {_DRIVER_ROOT}'


def _installed_version(host: Host, release: str) -> str:
    """Return the version of the module that kernel *release* would load, "" if unknown."""
    for version in host.names("/var/lib/dkms/nvidia"):
        if release in host.names(f"/var/lib/dkms/nvidia/{version}"):
            return version
    file = _module_file(host, f"/lib/modules/{release}")
    stream = host.open(file) if file.endswith(".ko") else None
    if stream is None:
        return ""
    with stream:
        try:
            return _marked_version(stream)
        except OSError:
            return ""


def _marked_version(stream: BinaryIO) -> str:
    """Return the version in the section .modinfo of *stream*, "" if there is none."""
    overlap = b""
    for chunk in _chunks(stream):
        match = re.search(_VERSION_MARK, overlap + chunk)
        if match:
            return match[1].decode("ascii")
        overlap = chunk[-64:]
    return ""


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    size = 0
    while size < _MAX_MODULE_BYTES and (chunk := stream.read(1 << 20)):
        size += len(chunk)
        yield chunk


def missing_node(host: Host, path: str, driver_root: str = "/") -> str:
    """Return the action where the node *path* of the loaded driver does not exist."""
    if in_user_namespace(host):
        return f'pass "{path}" into this container on its host'
    return create_nodes(driver_root, path.rpartition("/dev/")[0] or "/")


def foreign_node(host: Host, path: str, driver_root: str = "/") -> str:
    """Return the action where *path* is not the device node that the driver has there."""
    if in_user_namespace(host):
        return missing_node(host, path, driver_root)
    return f'remove "{path}", then {missing_node(host, path, driver_root)}'


def missing_spec_node(
    host: Host,
    path: str,
    spec: str = "",
    kind: str | None = DEFAULT_KIND,
    driver_root: str = "/",
) -> str:
    """Return the action where a CDI spec of *kind* names the node *path*, which does not exist.

    A GPU that the driver has needs its node; for one that is gone, the *spec* is stale. *kind* is
    None for that of another vendor.
    """
    name = path.rpartition("/dev/")[2]
    gpu = re.match(_GPU_NODE, name)
    if kind is None or not (gpu or re.match(_CONTROL_NODE, name)):
        return stale_spec(spec, kind)
    if not host.exists("/proc/driver/nvidia/version"):
        return unloaded_module(host, driver_root)[1]
    if gpu and int(gpu[1]) not in _gpu_minors(host):
        return stale_spec(spec, kind)
    return missing_node(host, path, driver_root)


def _gpu_minors(host: Host) -> list[int]:
    """Return the minors of the GPUs that the driver has."""
    gpus = "/proc/driver/nvidia/gpus"
    minors: list[int] = []
    for address in host.names(gpus):
        text = host.read(f"{gpus}/{address}/information") or ""
        minors += map(int, re.findall(r"^Device Minor:\s*(\d{1,6})", text, re.MULTILINE))
    return minors


def stale_spec(path: str = "", kind: str | None = DEFAULT_KIND, *options: str) -> str:
    """Return the action that writes the CDI spec *path* of *kind* again.

    *path* is "" for the usual one, *kind* None for that of another vendor.
    """
    if kind is None:
        return f'write "{path}" again with the program of its vendor'
    vendor, _, class_ = kind.partition("/")
    words = ["gpuruntime cdi refresh"]
    if kind == _MANAGEMENT_KIND:
        words.append("--mode management")
    elif class_ in _MODES:
        words.append(f"--mode {_MODES[class_]}")
    elif kind != DEFAULT_KIND:
        words.append(f"--vendor {vendor} --class {class_}")
    words += options
    if path and path not in DEFAULT_SPECS:
        words.append(f"--output {path}")
    return f'run "{" ".join(words)}"'
