# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's driver in the virtual machine: user space, /proc, /sys, and no kernel module.

    simulated_driver.py install VERSION     put the user space of a driver in place
    simulated_driver.py remove              take it away
    simulated_driver.py load                show what the kernel module would: a service, at boot
    simulated_driver.py insert              insert a module with the driver's name: udev sees it

The trees of `tests/simhost` are below /srv/vm. Nothing makes device nodes: that is what our unit
is for. Opening one fails with ENXIO where the container may open it, and with EPERM where not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

FILES = Path("/srv/vm")
sys.path.insert(0, str(FILES / "simhost"))
import kernelside  # noqa: E402

GPUS = 2
VERSION = Path("/etc/simulated-driver")
LIST = Path("/var/lib/simulated-driver.list")
STATE = Path("/run/simulated-driver")
CONF = Path("/usr/lib/x86_64-linux-gnu/fakenvml.conf")
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset")
# Has modprobe succeed for modules that do not exist.
MODPROBE = Path("/etc/modprobe.d/simulated-driver.conf")
# Of a module's file: linux/module.h, linux/module_signature.h.
DONOR = "nls_utf8"
MODULE_NAME_BYTES = 56
SIGNED, SIGNATURE_HEADER_BYTES = b"~Module signature appended~\n", 12
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def main() -> None:
    """Run the command line."""
    action, *arguments = sys.argv[1:]
    {"install": install, "remove": remove, "load": load, "insert": insert}[action](*arguments)


def install(version: str) -> None:
    """Put the files of driver *version* below /, in place of those of another."""
    remove()
    tree = FILES / "driver" / version
    paths = []
    for source in sorted(tree.rglob("*")):
        target = Path("/") / source.relative_to(tree)
        if source.is_dir() and not source.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        elif target.parts[1] != "lib":
            shutil.copy2(source, target, follow_symlinks=False)
            paths.append(str(target))
    LIST.write_text("\n".join(paths))
    VERSION.write_text(version)
    MODPROBE.write_text(
        "".join(f"install {name.replace('_', '-')} /bin/true\n" for name in MODULES)
    )
    CONF.write_text(kernelside.nvml_conf(host()))
    subprocess.run(["/sbin/ldconfig"], check=True)


def remove() -> None:
    """Remove the files of the driver."""
    paths = LIST.read_text().splitlines() if LIST.exists() else []
    for path in (*paths, LIST, VERSION, MODPROBE, CONF):
        Path(path).unlink(missing_ok=True)
    subprocess.run(["/sbin/ldconfig"], check=True)


def host() -> kernelside.Host:
    """Return the machine whose driver is installed."""
    return kernelside.plan_host(VERSION.read_text(), GPUS, modify_device_files=True)


def load() -> None:
    """Mount what the driver's modules show in /proc and /sys."""
    if not VERSION.exists():
        return
    STATE.mkdir()
    machine = host()
    kernelside.write_proc_driver(machine, STATE / "driver")
    (STATE / "devices").write_text(
        kernelside.proc_devices(machine, Path("/proc/devices").read_text(encoding="ascii"))
    )
    kernelside.write_pci_devices(machine, STATE / "pci")
    modules = STATE / "module"
    modules.mkdir()
    # Links to one mount: systemd mounts all of this again for each start of our units, and took a
    # minute for a hundred mounts.
    others = STATE / "other-modules"
    others.mkdir()
    mount(Path("/sys/module"), others)
    for path in others.iterdir():
        (modules / path.name).symlink_to(path)
    for name in MODULES:
        (modules / name).mkdir()
    (modules / "nvidia" / "version").write_text(f"{machine.version}\n")
    mount(STATE / "driver", "/proc/driver")
    mount(STATE / "devices", "/proc/devices")
    mount(STATE / "pci", "/sys/bus/pci/devices")
    mount(modules, "/sys/module")


def insert() -> None:
    """Insert a small module of the kernel under the name of the driver's."""
    # The kernel announces the module by its directory in its own /sys.
    subprocess.run(["umount", "--lazy", "/sys/module"], check=True)
    [donor] = Path("/lib/modules").glob(f"*/kernel/fs/nls/{DONOR}.ko")
    code = donor.read_bytes()
    # A signature that is wrong is refused, a module without one is not.
    if code.endswith(SIGNED):
        size = int.from_bytes(code[-len(SIGNED) - 4 : -len(SIGNED)], "big")
        code = code[: -len(SIGNED) - SIGNATURE_HEADER_BYTES - size]
    name = DONOR.encode().ljust(MODULE_NAME_BYTES, b"\0")
    if code.count(name) != 1:
        raise ValueError(f"{donor}: the name of the module occurs {code.count(name)} times")
    module = STATE / "nvidia.ko"
    module.write_bytes(code.replace(name, b"nvidia".ljust(MODULE_NAME_BYTES, b"\0")))
    subprocess.run(["/sbin/insmod", str(module)], check=True)


def mount(source: Path, target: Path | str) -> None:
    """Bind *source* with all that is mounted below it on *target*, apart from *source*.

    What is mounted on one of the two later is not mounted on the other: without this, the mount on
    /sys/module hides the modules to which its links lead, and systemd does not end a shutdown.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (MS_BIND | MS_REC, MS_PRIVATE | MS_REC):
        arguments = (os.fsencode(source), os.fsencode(target), b"", ctypes.c_ulong(flags), None)
        if libc.mount(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"mount on {target}")


if __name__ == "__main__":
    main()
