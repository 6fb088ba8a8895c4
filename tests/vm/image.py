# SPDX-License-Identifier: Apache-2.0
"""The disk of the virtual machine, a Debian root with systemd and engines, and what boots it.

It is made from where this machine's apt fetches its packages, and kept below build/vm until a
package or a file of it changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

GUEST = Path(__file__).resolve().parent / "guest"
BUILD = GUEST.parents[2] / "build" / "vm"
SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13"}
PACKAGES = (
    *("systemd", "systemd-sysv", "libpam-systemd", "dbus", "udev", "kmod", "procps", "util-linux"),
    *("mount", "iproute2", "iptables", "uidmap", "busybox-static", "python3", "xz-utils", "cpio"),
    *("docker.io", "containerd", "podman", "crun", "runc", "python3-grpcio"),
)
MORE_PACKAGES = {"trixie": ("docker-cli",)}
# Of `guest/`, what is on the disk; the rest is copied into the machine that has booted.
PARTS = ("agent.py", "agent.service", "customise", "init")
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "zstd": "zstd",
    "cpio": "cpio",
    "fallocate": "util-linux",
}
DISK_BYTES = 8 << 30


class VmError(Exception):
    """What keeps the virtual machine from being made or used: one line, and a hint line."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\nhint: {hint}" if hint else message)


def missing_tools() -> list[str]:
    """Return the names of the Debian packages whose tools are not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return sorted(
        {package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)}
    )


def make(suite: str, more: Sequence[str]) -> Path:
    """Return the directory of the image of *suite* with the packages *more*; make it if needed.

    It has `root.img`, `kernel` and `initrd.cpio`. Raise VmError if it cannot be made.
    """
    if missing := missing_tools():
        raise VmError(
            f"the virtual machine needs {', '.join(missing)}",
            f"run: apt-get install --no-install-recommends {' '.join(missing)}",
        )
    packages = sorted({*PACKAGES, *MORE_PACKAGES.get(suite, ()), *more})
    final = BUILD / f"{suite}-{_digest(packages)}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{suite}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        print(f"test-vm: making the disk of {SUITES[suite]}", flush=True)
        for old in BUILD.glob(f"{suite}-*"):
            shutil.rmtree(old)
        fresh = Path(tempfile.mkdtemp(prefix=f".{suite}-", dir=BUILD))
        try:
            fresh.chmod(0o755)
            _bootstrap(suite, packages, fresh)
            fresh.rename(final)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return final


def _digest(packages: Sequence[str]) -> str:
    digest = hashlib.sha256(" ".join(packages).encode())
    for file in (Path(__file__), *(GUEST / name for name in PARTS)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _bootstrap(suite: str, packages: Sequence[str], directory: Path) -> None:
    """Make the root file system by mmdebstrap, and of it the disk, in *directory*."""
    root = directory / "root"
    command = [
        *("mmdebstrap", "--mode=root", "--variant=minbase", "--quiet"),
        f"--include={','.join(packages)}",
        *(f"--aptopt={option}" for option in _apt_options()),
        '--aptopt=Acquire::Languages "none"',
        f"--customize-hook={GUEST / 'customise'}",
        *(suite, str(root), f"deb {_mirror()} {suite} main"),
    ]
    environment = {
        **os.environ,
        "VM_BOOT": str(directory),
        "VM_GUEST": str(GUEST),
        "TMPDIR": str(directory),
    }
    _run(command, environment, "mmdebstrap")
    kernel = directory / "vmlinuz"
    (directory / "kernel").write_bytes(_bootable(kernel.read_bytes()))
    kernel.unlink()
    disk = directory / "root.img"
    with disk.open("wb"):
        os.truncate(disk, DISK_BYTES)
    environment["PATH"] = f"{environment.get('PATH', '')}:/usr/sbin:/sbin"
    options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
    _run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(root), "-m", "0", "-E", options, str(disk)],
        environment,
        "mke2fs",
    )
    shutil.rmtree(root)
    disk.chmod(0o444)


def _run(command: Sequence[str], environment: dict[str, str], name: str) -> None:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise VmError(f"{name} failed with exit status {done.returncode}:\n{tail}")


def _mirror() -> str:
    """Return the URI from which this machine's apt fetches its distribution's main packages."""
    codename = re.search(
        r"^VERSION_CODENAME=(\S+)", Path("/etc/os-release").read_text(), re.MULTILINE
    )
    targets = subprocess.run(
        ["apt-get", "indextargets", "Identifier: Packages", "--format",
         "$(ORIGIN) $(COMPONENT) $(CODENAME) $(REPO_URI)"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    for line in targets.splitlines():
        words = line.split()
        if codename and words[:3] == ["Debian", "main", codename[1]]:
            return words[3]
    raise VmError("apt names no source of Debian packages", "run: apt-get update")


def _apt_options() -> list[str]:
    """Return apt's settings that say how this machine reaches its mirror."""
    settings = subprocess.run(
        ["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True
    )
    kept = r'Acquire::(https?::(Proxy|CAInfo)|Check-|Retries).* ".+"'
    return [line for line in settings.stdout.splitlines() if re.match(kept, line)]


def _bootable(image: bytes) -> bytes:
    """Return the ELF kernel packed in a bzImage: unpacking it under emulation takes long.

    Without the entry point that QEMU needs (the ELF note "Xen"), return *image* as it is.
    """
    start = ((image[0x1F1] or 4) + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")
    packed = image[start : start + int.from_bytes(image[0x24C:0x250], "little")]
    if packed.startswith(b"\x28\xb5\x2f\xfd"):
        unpacked = subprocess.run(
            ["zstd", "-dcq"], input=packed, capture_output=True, check=False
        ).stdout
    elif packed.startswith(b"\xfd7zXZ\0"):
        unpacked = lzma.LZMADecompressor().decompress(packed)
    elif packed.startswith(b"\x1f\x8b"):
        unpacked = zlib.decompressobj(31).decompress(packed)
    else:
        unpacked = b""
    return unpacked if unpacked.startswith(b"\x7fELF") and b"Xen\0" in unpacked else image
