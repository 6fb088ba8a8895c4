# SPDX-License-Identifier: Apache-2.0
"""Miniature driver roots, one for each way in which distributions lay a driver out.

The libraries are real ELF files of a few hundred bytes, written here, with the real ones' names,
SONAMEs and needed libraries; `readelf -hd FILE` shows them. No compiler, no root, any machine.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from simhost.artefacts import CONFIGS, LIBRARIES, TOOLS, Library

from gpuruntime.formats import ldcache_merge

VERSION = "550.163.01"
OTHER = "535.261.03"
NVML = Library("libnvidia-ml", "libnvidia-ml.so.1", plain_link=True)
ALL = (NVML, *LIBRARIES)
# A headless server's.
COMPUTE = tuple(
    library
    for library in ALL
    if library.name.startswith(("libcuda", "libnvidia-ml", "libnvidia-cfg", "libnvidia-ptx"))
)
# What of it there is for 32-bit programs.
COMPAT32 = tuple(
    library
    for library in ALL
    if library.name not in ("libcudadebugger", "libnvidia-cfg", "libnvoptix", "libnvidia-rtcore")
)
PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", *TOOLS)
TRIPLETS = {
    "x86-64": "x86_64-linux-gnu",
    "i386": "i386-linux-gnu",
    "aarch64": "aarch64-linux-gnu",
    "arm-hard-float": "arm-linux-gnueabihf",
}
# ABI → class, machine, flags of the ELF header.
_MACHINES = {
    "x86-64": (2, 62, 0),
    "i386": (1, 3, 0),
    "aarch64": (2, 183, 0),
    "arm-hard-float": (1, 40, 0x5000400),
    "riscv64": (2, 243, 4),
}
_MODULE_TEXT = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Sep  4 22:32:05 UTC 2024\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)
OPEN_MODULE_TEXT = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  "
    "(builder@host)  Wed Sep  4\nGCC version:  gcc version 12.2.0\n"
)


def elf(
    soname: str | None, needed: Iterable[str] = (), abi: str = "x86-64", interpreter: str = ""
) -> bytes:
    """Return a library or program for *abi* that has nothing but its names."""
    names = b"\0"
    offsets = []
    for name in (soname or "", *needed, interpreter):
        offsets.append(len(names))
        names += name.encode() + b"\0"
    interpreter_at = offsets.pop()
    width, machine, flags = _MACHINES[abi]
    wide = width == 2
    header, segment, row = (64, 56, 16) if wide else (52, 32, 8)
    count = 3 if interpreter else 2
    start = header + count * segment
    rows = [(14, offsets[0])] if soname else []
    rows += [(1, offset) for offset in offsets[1:]]
    length = (len(rows) + 3) * row
    rows += [(5, start + length), (10, len(names)), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ" if wide else "<II", *pair) for pair in rows)
    size = start + length + len(names)
    # Type, flags, offset and length of each.
    parts = [(1, 5, 0, size), (2, 6, start, length)]
    if interpreter:
        parts.append((3, 4, start + length + interpreter_at, len(interpreter) + 1))
    segments = [
        (kind, access, at, at, at, long, long, 8)
        if wide
        else (kind, at, at, at, long, long, access, 4)
        for kind, access, at, long in parts
    ]
    return b"".join(
        [
            struct.pack("<4sBBBB8x", b"\x7fELF", width, 1, 1, 0),
            struct.pack(
                "<HHIQQQIHHHHHH" if wide else "<HHIIIIIHHHHHH",
                *(3, machine, 1, 0, header, 0, flags, header, segment, count, 0, 0, 0),
            ),
            *(struct.pack("<IIQQQQQQ" if wide else "<8I", *fields) for fields in segments),
            dynamic,
            names,
        ]
    )


class Tree:
    """A driver root at *path*, made file by file; paths are those in the root."""

    def __init__(self, path: Path, version: str = VERSION) -> None:
        self.path = path
        self.version = version
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)

    def at(self, path: str) -> Path:
        """Return where *path* is on the host."""
        return self.path / path.lstrip("/")

    def file(self, path: str, content: bytes | str = "", mode: int = 0o644) -> Path:
        """Make a file, and its directories."""
        place = self.at(path)
        self.directory(os.path.dirname(path))
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        place.chmod(mode)
        return place

    def directory(self, path: str) -> Path:
        """Make a directory that only its owner can write to."""
        place = self.at(path)
        for parent in (place, *place.parents):
            if parent == self.path or parent.is_dir():
                break
        place.mkdir(parents=True, exist_ok=True)
        for made in (place, *place.parents):
            if made == parent:
                break
            made.chmod(0o755)
        return place

    def link(self, path: str, target: str) -> Path:
        """Make a link."""
        place = self.at(path)
        self.directory(os.path.dirname(path))
        place.symlink_to(target)
        return place

    def library(
        self,
        directory: str,
        library: Library,
        *,
        abi: str = "x86-64",
        version: str = "",
        links: bool = True,
        flat: bool = False,
    ) -> Path:
        """Make a library with its links in *directory*, or below unless *flat*."""
        version = version or self.version
        directory = directory if flat else os.path.normpath(f"{directory}/{library.directory}")
        file = library.file(version)
        soname = library.soname or file
        needed = [name.soname or name.file(version) for name in _named(library.needed)]
        made = self.file(f"{directory}/{file}", elf(soname, [*needed, "libc.so.6"], abi))
        if links and soname != file:
            self.link(f"{directory}/{soname}", file)
        if links and library.plain_link:
            self.link(f"{directory}/{library.name}.so", soname)
        return made

    def libraries(
        self,
        directory: str,
        libraries: Iterable[Library] = ALL,
        *,
        abi: str = "x86-64",
        flat: bool = False,
    ) -> None:
        """Make libraries with their links in *directory*."""
        for library in libraries:
            self.library(directory, library, abi=abi, flat=flat)

    def programs(self, directory: str = "/usr/bin", *, abi: str = "x86-64") -> None:
        """Make the driver's programs."""
        for name in PROGRAMS:
            self.file(f"{directory}/{name}", elf(None, abi=abi), 0o755)

    def configs(self, *paths: str) -> None:
        """Make the usual files of configuration, or those at *paths*."""
        for path in paths or CONFIGS:
            self.file(f"/{path.replace('VERSION', self.version)}", "{}\n")

    def firmware(self, directory: str = "/lib/firmware") -> None:
        """Make the firmware."""
        for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
            self.file(f"{directory}/nvidia/{self.version}/{name}", "firmware\n")

    def module(self, version: str, text: str = _MODULE_TEXT) -> None:
        """Let /proc tell that the module of *version* is loaded."""
        self.file("/proc/driver/nvidia/version", text.format(version))

    def cache(self, *rows: tuple[str, str, str]) -> None:
        """Make the loader's cache of (name, path, ABI)."""
        entries = [
            ldcache_merge.CacheEntry(name, path, ldcache_merge.ABI_FLAGS[abi])
            for name, path, abi in rows
        ]
        self.file("/etc/ld.so.cache", ldcache_merge.merge(None, entries))


def _named(names: Iterable[str]) -> list[Library]:
    return [next(library for library in ALL if library.name == name) for name in names]


def _ubuntu(tree: Tree) -> None:
    """Multi-arch, 64 and 32 bit, all in one directory; /lib and /bin are links into /usr."""
    for name in ("lib", "bin", "sbin"):
        tree.directory(f"/usr/{name}")
        tree.link(f"/{name}", f"usr/{name}")
    tree.libraries("/usr/lib/x86_64-linux-gnu")
    tree.libraries("/usr/lib/i386-linux-gnu", COMPAT32, abi="i386")
    tree.programs()
    tree.configs()
    tree.firmware("/usr/lib/firmware")


def _debian(tree: Tree) -> None:
    """Alternatives: private directories, and links from where programs look."""
    for triplet, abi, libraries in (
        ("x86_64-linux-gnu", "x86-64", ALL),
        ("i386-linux-gnu", "i386", COMPAT32),
    ):
        tree.libraries(f"/usr/lib/{triplet}/nvidia/current", libraries, abi=abi, flat=True)
        for library in libraries:
            name = library.soname or library.file(tree.version)
            alternative = f"/etc/alternatives/glx--{name}-{triplet}"
            tree.link(
                os.path.normpath(f"/usr/lib/{triplet}/{library.directory}/{name}"), alternative
            )
            tree.link(alternative, f"/usr/lib/{triplet}/nvidia/current/{name}")
    for name in PROGRAMS:
        tree.file(f"/usr/lib/nvidia/current/{name}", elf(None), 0o755)
        tree.link(f"/usr/bin/{name}", f"/etc/alternatives/nvidia--{name}")
        tree.link(f"/etc/alternatives/nvidia--{name}", f"/usr/lib/nvidia/current/{name}")
    tree.configs(*(path for path in CONFIGS if "X11" not in path))
    tree.firmware()


def _rhel(tree: Tree) -> None:
    """64 bit in /usr/lib64, 32 bit beside it in /usr/lib; an ICD for each machine."""
    tree.libraries("/usr/lib64")
    tree.libraries("/usr/lib", COMPAT32, abi="i386")
    tree.programs()
    tree.configs(*(path for path in CONFIGS if "nvidia_icd" not in path))
    tree.configs(
        "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
        "usr/share/vulkan/icd.d/nvidia_icd.i686.json",
    )
    tree.firmware()


def _arch(tree: Tree) -> None:
    """64 bit in /usr/lib, 32 bit in /usr/lib32; /usr/lib64 is a link."""
    tree.libraries("/usr/lib")
    tree.libraries("/usr/lib32", COMPAT32, abi="i386")
    tree.link("/usr/lib64", "lib")
    tree.programs()
    tree.configs()
    tree.firmware("/usr/lib/firmware")


def _suse(tree: Tree) -> None:
    """As RHEL, with a directory for what the loader's own files name."""
    tree.libraries("/usr/lib64", (library for library in ALL if library not in COMPUTE))
    tree.libraries("/usr/lib64/nvidia-gl", COMPUTE)
    tree.file("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    tree.file("/etc/ld.so.conf.d/nvidia-gl.conf", "# ours\n/usr/lib64/nvidia-gl\n")
    tree.programs()
    tree.configs()
    tree.firmware()


def _cache_only(tree: Tree) -> None:
    """In a directory that only the loader's cache names (Container-Optimized OS)."""
    tree.libraries("/var/lib/nvidia/lib64")
    tree.cache(
        *(
            (library.soname, f"/var/lib/nvidia/lib64/{library.soname}", "x86-64")
            for library in ALL
            if library.soname
        )
    )
    tree.programs("/usr/bin")
    tree.configs()
    tree.firmware()


def _opt(tree: Tree) -> None:
    """Have a root of its own with lib64, bin and the files of Vulkan (GKE, /opt/nvidia)."""
    tree.libraries("/lib64")
    tree.programs("/bin")
    tree.configs("vulkan/icd.d/nvidia_icd.json", "etc/glvnd/egl_vendor.d/10_nvidia.json")
    tree.firmware()


def _nixos(tree: Tree) -> None:
    """Have a farm of links into the store; programs use a loader there, except their copies."""
    store = "/nix/store/0a1b2c3d4e5f-nvidia-x11-550.163.01-6.6.30"
    loader = "/nix/store/1a2b3c4d5e6f-glibc-2.39-52/lib/ld-linux-x86-64.so.2"
    tree.libraries(f"{store}/lib", flat=True)
    for library in ALL:
        for name in {library.file(tree.version), library.soname or library.file(tree.version)}:
            tree.link(f"/run/opengl-driver/lib/{name}", f"{store}/lib/{name}")
    for name in PROGRAMS:
        tree.file(f"{store}-bin/bin/{name}", elf(None, interpreter=loader), 0o755)
        tree.file(f"{store}-bin/origBin/{name}", elf(None), 0o755)
        tree.link(f"/run/current-system/sw/bin/{name}", f"{store}-bin/bin/{name}")
    for path in (
        "etc/OpenCL/vendors/nvidia.icd",
        "share/vulkan/icd.d/nvidia_icd.x86_64.json",
        "share/glvnd/egl_vendor.d/10_nvidia.json",
    ):
        tree.file(f"{store}/{path}", "{}\n")
        tree.link(f"/run/opengl-driver/{path}", f"{store}/{path}")
    tree.firmware()


def _talos(tree: Tree) -> None:
    """Have all beside a C library of its own, in an image without one."""
    tree.directory("/usr/lib")
    tree.link("/lib", "usr/lib")
    tree.libraries("/usr/local/glibc/usr/lib64")
    tree.programs("/usr/local/glibc/usr/bin")
    tree.configs(
        *(f"usr/local/glibc/{path}" for path in CONFIGS if "vulkan" not in path),
        *(f"usr/local/glibc/etc/{path[10:]}" for path in CONFIGS if "vulkan" in path),
    )
    tree.firmware("/usr/lib/firmware")


def _bottlerocket(tree: Tree) -> None:
    """Below a sys-root that is a link to /; the cache has the libraries, PATH the programs."""
    tree.link("/x86_64-bottlerocket-linux-gnu/sys-root", "/")
    place = "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla"
    tree.libraries("/usr/lib/nvidia/tesla", flat=True)
    tree.cache(
        *(
            (library.soname, f"{place}/{library.soname}", "x86-64")
            for library in ALL
            if library.soname
        )
    )
    tree.programs("/usr/libexec/nvidia/tesla/bin")
    tree.configs()
    tree.firmware()


def _cos(tree: Tree) -> None:
    """In a directory of the installer, named as the driver root (GKE's Container-Optimized OS)."""
    tree.libraries("/lib64")
    tree.programs("/bin")
    tree.configs("vulkan/icd.d/nvidia_icd.json", "share/glvnd/egl_vendor.d/10_nvidia.json")
    tree.link("/usr/share", "../share")
    tree.firmware()


def _flatcar(tree: Tree) -> None:
    """In /opt/nvidia, whose current driver is a link; /usr cannot be written."""
    driver = f"/opt/nvidia/6.6.30/{tree.version}"
    tree.libraries(f"{driver}/lib64")
    tree.link("/opt/nvidia/current", f"6.6.30/{tree.version}")
    tree.file("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    tree.file("/etc/ld.so.conf.d/nvidia.conf", "/opt/nvidia/current/lib64\n")
    for name in PROGRAMS:
        tree.file(f"{driver}/bin/{name}", elf(None), 0o755)
        tree.link(f"/opt/bin/{name}", f"/opt/nvidia/current/bin/{name}")
    tree.configs(*(f"etc/{path.split('/', 2)[2]}" for path in CONFIGS if "usr/share" in path))
    tree.firmware()


def _ostree(tree: Tree) -> None:
    """As RHEL, with links from / into /usr and from /opt and /usr/local into /var."""
    for name in ("lib", "lib64", "bin", "sbin"):
        tree.directory(f"/usr/{name}")
        tree.link(f"/{name}", f"usr/{name}")
    tree.directory("/var/opt")
    tree.directory("/var/usrlocal/bin")
    tree.link("/opt", "var/opt")
    tree.link("/usr/local", "../var/usrlocal")
    tree.libraries("/usr/lib64")
    tree.programs()
    tree.configs()
    tree.firmware("/usr/lib/firmware")


def _gentoo(tree: Tree) -> None:
    """64 bit in /usr/lib64, programs in /opt/bin."""
    tree.libraries("/usr/lib64")
    tree.libraries("/usr/lib", COMPAT32, abi="i386")
    tree.programs("/opt/bin")
    tree.configs()
    tree.firmware()


def _void(tree: Tree) -> None:
    """As Arch; /lib and /bin are links too, and /usr/sbin is one to /usr/bin."""
    for name in ("lib", "bin"):
        tree.directory(f"/usr/{name}")
        tree.link(f"/{name}", f"usr/{name}")
    for link, target in (("/lib64", "usr/lib"), ("/usr/lib64", "lib"), ("/usr/sbin", "bin")):
        tree.link(link, target)
    tree.libraries("/usr/lib")
    tree.libraries("/usr/lib32", COMPAT32, abi="i386")
    tree.programs()
    tree.configs()
    tree.firmware("/usr/lib/firmware")


def _alpine(tree: Tree) -> None:
    """Have a C library for the driver beside musl, whose loader has a file of directories."""
    tree.file("/lib/ld-musl-x86_64.so.1", elf("libc.musl-x86_64.so.1"), 0o755)
    tree.file("/etc/ld-musl-x86_64.path", "/lib:/usr/local/lib:/usr/lib\n/usr/glibc-compat/lib\n")
    tree.libraries("/usr/glibc-compat/lib")
    tree.programs("/usr/glibc-compat/bin")
    tree.configs()
    tree.firmware()


def _prefix(tree: Tree) -> None:
    """In a prefix of the operator's own, which the loader's configuration names."""
    tree.libraries("/srv/gpu/550/lib/x86_64")
    tree.file("/etc/ld.so.conf", "/srv/gpu/550/lib/x86_64\n")
    tree.programs("/srv/gpu/550/bin")
    tree.configs()
    tree.firmware()


def _own_tree(tree: Tree) -> None:
    """In a read-only tree; links to libraries and data, and scripts that start the programs."""
    for name in ("lib", "bin"):
        tree.directory(f"/usr/{name}")
        tree.link(f"/{name}", f"usr/{name}")
    own = "/usr/local/nvidia"
    tree.libraries(f"{own}/lib64", flat=True)
    tree.link(f"{own}/lib", "lib64")
    names = [library.soname for library in ALL if library.soname]
    for name in (*names, *(f"{library.name}.so" for library in ALL if library.plain_link)):
        tree.link(f"/usr/lib/{name}", f"{own}/lib64/{name}")
    places = (f"{own}/lib64", "/lib")
    tree.cache(*((name, f"{place}/{name}", "x86-64") for place in places for name in names))
    tree.programs(f"{own}/bin")
    for name in PROGRAMS:
        tree.file(f"/usr/bin/{name}", f'#!/bin/sh\nexec {own}/bin/{name} "$@"\n', 0o755)
    data = ("vulkan/icd.d/nvidia_icd.json", "glvnd/egl_vendor.d/10_nvidia.json")
    for path in data:
        tree.link(f"/usr/share/{path}", f"{own}/share/{path}")
    tree.configs(*(f"{own}/share/{path}" for path in data))
    tree.configs(f"{own}/share/vulkan/implicit_layer.d/nvidia_layers.json")
    tree.firmware(f"{own}/firmware")
    tree.file("/sys/module/firmware_class/parameters/path", f"{own}/firmware\n")


def _aarch64(tree: Tree) -> None:
    """Multi-arch on 64-bit ARM, with libraries for 32 bit."""
    tree.libraries("/usr/lib/aarch64-linux-gnu", abi="aarch64")
    tree.libraries("/usr/lib/arm-linux-gnueabihf", COMPAT32, abi="arm-hard-float")
    tree.programs(abi="aarch64")
    tree.configs()
    tree.firmware()


# Name → what makes it.
LAYOUTS: dict[str, Callable[[Tree], None]] = {
    "aarch64": _aarch64,
    "alpine": _alpine,
    "arch": _arch,
    "bottlerocket": _bottlerocket,
    "cache-only": _cache_only,
    "cos": _cos,
    "debian": _debian,
    "flatcar": _flatcar,
    "gentoo": _gentoo,
    "nixos": _nixos,
    "opt": _opt,
    "ostree": _ostree,
    "own-tree": _own_tree,
    "prefix": _prefix,
    "rhel": _rhel,
    "suse": _suse,
    "talos": _talos,
    "ubuntu": _ubuntu,
    "void": _void,
}


def build(path: Path, layout: str, version: str = VERSION) -> Tree:
    """Make the driver root of *layout* at *path*."""
    tree = Tree(path, version)
    LAYOUTS[layout](tree)
    return tree
