# SPDX-License-Identifier: Apache-2.0
"""The directories in which the distributions put the driver's files."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re

from gpuruntime.discover.root import Directory, DriverRoot, normal
from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_CACHE_BYTES = 8 << 20
MAX_CONF_BYTES = 64 << 10
MAX_CONF_FILES = 200
NVML_NAME = "libnvidia-ml.so.1"
CUDA_NAME = "libcuda.so.1"
_ABI_OF_MACHINE = {"x86_64": "x86-64", "aarch64": "aarch64"}
# An ABI and those that its machines can run, 64 bit first.
ABIS = {
    "x86-64": ("x86-64", "i386"),
    "aarch64": ("aarch64", "arm-hard-float", "arm-soft-float"),
}
_TRIPLETS = {
    "x86-64": ("x86_64-linux-gnu", "i386-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf"),
}
# Where distributions put libraries, behind what the loader's own files name. T: each triplet.
_LIBRARIES = (
    "/usr/lib64",
    "/usr/lib/T",
    "/usr/lib/T/nvidia/current",  # Debian, whose alternatives choose among drivers
    "/lib64",
    "/lib/T",
    "/lib/T/nvidia/current",
    "/usr/lib",  # 32-bit beside /usr/lib64, 64-bit beside /usr/lib32
    "/lib",
    "/usr/lib32",
    "/lib32",
    "/usr/lib64/nvidia",
    "/usr/lib/nvidia",
    "/usr/local/lib64",
    "/usr/local/lib",
    "/usr/X11R6/lib64",  # SUSE, long ago
    "/usr/X11R6/lib",
    "/usr/local/glibc/lib",  # Talos
    "/usr/local/glibc/usr/lib",
    "/run/opengl-driver/lib",  # NixOS
    "/run/opengl-driver-32/lib",
    "/",
)
_LIBRARY_DIRECTORY = re.compile(r"lib(32|64|x32)?\Z")
# Where the PATH of an image finds programs.
IMAGE_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Where that of a host does; the last is of NixOS.
BINARIES = (*IMAGE_PATH, "/opt/bin", "/run/current-system/sw/bin")
_DATA = ("/usr/local/share", "/usr/share")
# Below /sys.
FIRMWARE_PATH = "/module/firmware_class/parameters/path"
_NIXOS_DATA = "/run/opengl-driver/share"


def native_abi() -> str:
    """Return the ABI name of this machine's 64-bit programs."""
    return _ABI_OF_MACHINE.get(os.uname().machine, os.uname().machine)


def abis(native: str) -> tuple[str, ...]:
    """Return the ABIs that a machine of ABI *native* runs, that one first."""
    return ABIS.get(native, (native,))


def libraries(
    root: DriverRoot, search_path: Sequence[str] = (), native: str = ""
) -> list[Directory]:
    """Return the directories there are to look for libraries in, in order, each once.

    *search_path*, host paths, is in place of the usual ones. Where the well-known libraries are
    links, the directories that they lead to come next. Raises DiscoveryError.
    """
    found: dict[tuple[str, str], Directory] = {}
    for base, path in _library_candidates(root, search_path, native):
        directory = base.directory(path)
        if directory is None:
            continue
        found.setdefault((base.path, directory.path), directory)
        for name in (CUDA_NAME, NVML_NAME):
            if name in directory.names:
                real = base.locate(directory.join(name))
                led = base.directory(posixpath.dirname(real)) if real else None
                if led is not None:
                    found.setdefault((base.path, led.path), led)
        vdpau = base.directory(directory.join("vdpau")) if "vdpau" in directory.names else None
        if vdpau is not None:
            found.setdefault((base.path, vdpau.path), vdpau)
    return list(found.values())


def library_candidates(root: DriverRoot, native: str = "") -> list[str]:
    """Return where libraries can be: the loader's directories, then the known; there or not."""
    if root.loader_directories is None:
        root.loader_directories = [*_cached(root), *_configured(root, "/etc/ld.so.conf", set())]
    return list(dict.fromkeys([*root.loader_directories, *_known(native or native_abi())]))


def _library_candidates(
    root: DriverRoot, search_path: Sequence[str], native: str
) -> list[tuple[DriverRoot, str]]:
    if search_path:
        return [root.around(path) for path in search_path]
    return [(root, path) for path in library_candidates(root, native)]


def _known(native: str) -> Iterable[str]:
    for path in _LIBRARIES:
        if "/T" in path:
            for triplet in _TRIPLETS.get(native, ()):
                yield path.replace("/T", f"/{triplet}", 1)
        else:
            yield path


def _cached(root: DriverRoot) -> list[str]:
    """Return where the root's own ld.so.cache, if it has one, has libraries of the driver."""
    data = root.read("/etc/ld.so.cache", MAX_CACHE_BYTES)
    try:
        entries = ldcache_merge.parse(data, is_drivers) if data else []
    except LdcacheError:
        # Of an old format or another byte order: what looks like a path in it is worth a look.
        known = tuple(f"/{name}".encode() for name in (CUDA_NAME, NVML_NAME))
        paths = [text for text in (data or b"").split(b"\0") if text.endswith(known)]
        found = [os.fsdecode(path[path.index(b"/") :]) for path in paths]
        return [posixpath.dirname(path) for path in found]
    return [posixpath.dirname(row[1]) for row in entries]


def is_drivers(name: str) -> bool:
    """Return whether *name* is that of a library of the driver."""
    return "nvidia" in name or name.startswith(("libcuda.so", "libcudadebugger", "libnvoptix"))


def _configured(root: DriverRoot, path: str, seen: set[str]) -> list[str]:
    """Return the directories that the ld.so.conf *path* and what it includes name.

    Each file is read once: includes may go round, or come to more than there are files. *seen*
    gets the files, and the directories in which others can be included.
    """
    if path in seen or len(seen) > MAX_CONF_FILES:
        return []
    seen.add(path)
    data = root.read(path, MAX_CONF_BYTES)
    found: list[str] = []
    for line in (data or b"").decode("utf-8", "surrogateescape").splitlines():
        words = line.partition("#")[0].split()
        if not words or words[0] == "hwcap":
            continue
        if words[0] != "include":
            # A directory, behind which old files have "=TYPE".
            found.append(words[0].partition("=")[0].rstrip("/") or "/")
        else:
            for word in words[1:]:
                pattern = posixpath.join(posixpath.dirname(path), word)
                for included in _matching(root, pattern):
                    found += _configured(root, included, seen)
                seen.add(posixpath.dirname(pattern) if "*" in pattern else pattern)
    return [path for path in found if path.startswith("/")]


def programs_beside(libraries: str) -> list[str]:
    """Return where a driver with its *libraries* in that directory can have its programs.

    That is "bin" beside "lib", "lib64" and the like, or else beside the directory, or in it. None
    of BINARIES is returned.
    """
    prefix = libraries
    while prefix not in ("", "/") and not _LIBRARY_DIRECTORY.match(posixpath.basename(prefix)):
        prefix = posixpath.dirname(prefix)
    if prefix in ("", "/"):
        found = [libraries, posixpath.join(posixpath.dirname(libraries), "bin")]
    else:
        found = [posixpath.join(posixpath.dirname(prefix), "bin")]
    return [path for path in found if path != "/" and path not in BINARIES]


def loader_configuration(root: DriverRoot) -> list[str]:
    """Return the files that say where the loader looks, and the directories that can have more."""
    found: set[str] = set()
    _configured(root, "/etc/ld.so.conf", found)
    return sorted(found)


def _matching(root: DriverRoot, pattern: str) -> list[str]:
    directory = root.directory(posixpath.dirname(pattern))
    if directory is None:
        return []
    names = fnmatch.filter(directory.names, posixpath.basename(pattern))
    return [directory.join(name) for name in sorted(names)]


def configurations(
    root: DriverRoot, search_path: Sequence[str] = (), data_dirs: str = ""
) -> list[tuple[DriverRoot, str]]:
    """Return the directories of configuration and data; *data_dirs* is XDG_DATA_DIRS.

    *search_path*, host paths, is in place of the usual ones. Raises DiscoveryError.
    """
    if search_path:
        return [root.around(path) for path in search_path]
    given = [normal(path) for path in data_dirs.split(":") if path.startswith("/")]
    return [(root, path) for path in dict.fromkeys(["/etc", *given, *_DATA, _NIXOS_DATA])]


def xorg(
    root: DriverRoot, libraries: Iterable[tuple[DriverRoot, str]]
) -> list[tuple[DriverRoot, str]]:
    """Return where modules of Xorg can be, *libraries* being the directories of those."""
    modules = ("drivers", "extensions", "updates/drivers", "updates/extensions")
    found = []
    for base, directory in libraries:
        found.append((base, f"{directory}/nvidia/xorg"))
        found += [(base, f"{directory}/xorg/modules/{module}") for module in modules]
    for prefix in ("/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64"):
        found += [(root, f"{prefix}/modules/{module}") for module in modules]
    return list(dict.fromkeys(found))


def firmware(root: DriverRoot, kernel_release: str) -> list[str]:
    """Return where the kernel *kernel_release* looks for firmware, below *root*."""
    parameter = root.read(f"/sys{FIRMWARE_PATH}", MAX_CONF_BYTES)
    if parameter is None:
        parameter = root.host.read(f"/sys{FIRMWARE_PATH}", MAX_CONF_BYTES) or b""
    path = parameter.decode("utf-8", "surrogateescape").strip()
    if root.path != "/" and path.startswith(f"{root.path}/"):
        # A driver container has told the host's kernel to look in it.
        path = path[len(root.path) :]
    releases = ("updates/" + kernel_release, "updates", kernel_release, "")
    usual = [
        f"{lib}/firmware/{name}".rstrip("/") for lib in ("/lib", "/usr/lib") for name in releases
    ]
    return list(dict.fromkeys([*([path.rstrip("/")] if path.startswith("/") else []), *usual]))
