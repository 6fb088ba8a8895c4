# SPDX-License-Identifier: Apache-2.0
"""The directories in which the distributions put the driver's files."""

from __future__ import annotations

import fnmatch
import functools
import os
import posixpath
import re

from gpuruntime.discover.root import Directory, DriverRoot, normal
from gpuruntime.errors import DiscoveryError, LdcacheError
from gpuruntime.formats import ldcache_merge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_CACHE_BYTES = 8 << 20
MAX_CONF_BYTES = 64 << 10
MAX_CONF_FILES = 200
NVML_NAME = "libnvidia-ml.so.1"
CUDA_NAME = "libcuda.so.1"
# The machine in the names of musl's files, by ABI.
_MUSL = {"x86-64": "x86_64", "aarch64": "aarch64"}
_ABI_OF_MACHINE = {"x86_64": "x86-64", "aarch64": "aarch64"}
# Each ABI and the ABIs that its machines can run, 64-bit first.
ABIS = {
    "x86-64": ("x86-64", "i386"),
    "aarch64": ("aarch64", "arm-hard-float", "arm-soft-float"),
}
_TRIPLETS = {
    "x86-64": ("x86_64-linux-gnu", "i386-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf"),
}
# Library directories of distributions, after those that the loader's files name. T: each triplet.
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
    "/usr/X11R6/lib64",  # old SUSE releases
    "/usr/X11R6/lib",
    "/usr/local/glibc/lib",  # Talos
    "/usr/local/glibc/usr/lib64",
    "/usr/local/glibc/usr/lib",
    "/run/opengl-driver/lib",  # NixOS
    "/run/opengl-driver-32/lib",
    "/",
)
_LIBRARY_DIRECTORY = re.compile(r"lib(32|64|x32)?\Z")
# The usual PATH of an image.
IMAGE_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# The usual PATH of a host; the last directory is NixOS's.
BINARIES = (*IMAGE_PATH, "/opt/bin", "/run/current-system/sw/bin")
_DATA = ("/usr/local/share", "/usr/share")
# The kernel's setting, below /sys.
FIRMWARE_PATH = "/module/firmware_class/parameters/path"
_NIXOS_DATA = "/run/opengl-driver/share"


def native_abi() -> str:
    """Return the ABI name of this machine's 64-bit programs."""
    return _ABI_OF_MACHINE.get(os.uname().machine, os.uname().machine)


def abis(native: str) -> tuple[str, ...]:
    """Return the ABIs that a machine of ABI *native* runs, *native* first."""
    return ABIS.get(native, (native,))


def libraries(
    root: DriverRoot, search_path: Sequence[str] = (), native: str = ""
) -> list[Directory]:
    """Return the existing library directories, in the order of the search, each once.

    *search_path*, host paths, replaces the usual ones. A directory in which the well-known
    libraries are symlinks is followed by the directories of their targets. Raises DiscoveryError.
    """
    directories: dict[tuple[str, str], Directory] = {}
    for base, path in _library_candidates(root, search_path, native):
        directory = base.directory(path)
        if directory is None:
            continue
        directories.setdefault((base.path, directory.path), directory)
        for name in (CUDA_NAME, NVML_NAME):
            if name in directory.names:
                real = base.locate(directory.join(name))
                resolved = base.directory(posixpath.dirname(real)) if real else None
                if resolved is not None:
                    directories.setdefault((base.path, resolved.path), resolved)
        vdpau = base.directory(directory.join("vdpau")) if "vdpau" in directory.names else None
        if vdpau is not None:
            directories.setdefault((base.path, vdpau.path), vdpau)
    return list(directories.values())


def library_candidates(root: DriverRoot, native: str = "") -> list[str]:
    """Return where libraries can be: the loader's directories, then the usual ones.

    The directories need not exist.
    """
    if root.loader_directories is None:
        root.loader_directories = [
            *_cached(root),
            *_configured(root, "/etc/ld.so.conf", set()),
            *_of_musl(root, native),
        ]
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
    """Return the directories of the driver's libraries in the root's ld.so.cache, if any."""
    data = root.read("/etc/ld.so.cache", MAX_CACHE_BYTES)
    return list(_directories_in(data)) if data else []


# The fingerprint and the discovery of one process read the same cache.
@functools.lru_cache(maxsize=1)
def _directories_in(data: bytes) -> tuple[str, ...]:
    """Return the directory of each library of the driver in the loader cache *data*."""
    try:
        entries = ldcache_merge.parse(data, is_drivers)
    except LdcacheError:
        # An old format or another byte order: use every string that looks like a library's path.
        names = tuple(f"/{name}".encode() for name in (CUDA_NAME, NVML_NAME))
        paths = [text for text in data.split(b"\0") if text.endswith(names)]
        host_paths = [os.fsdecode(path[path.index(b"/") :]) for path in paths]
        return tuple(posixpath.dirname(path) for path in host_paths)
    return tuple(posixpath.dirname(row[1]) for row in entries)


def cache_fault(root: DriverRoot) -> str:
    """Return why the loader cache of *root* cannot be used, "" if it can or there is none."""
    path = "/etc/ld.so.cache"
    try:
        if root.file(path) is None:
            return ""
        data = root.content(path, MAX_CACHE_BYTES)
    except DiscoveryError as error:
        return error.message
    try:
        ldcache_merge.parse(data)
    except LdcacheError as error:
        return f'"{root.host_path(path)}": {error.message}'
    return ""


def is_drivers(name: str) -> bool:
    """Return whether *name* is that of a library of the driver."""
    return "nvidia" in name or name.startswith(("libcuda.so", "libcudadebugger", "libnvoptix"))


def _configured(root: DriverRoot, path: str, files: set[str]) -> list[str]:
    """Return the directories that the ld.so.conf *path* and its included files name.

    Each file is read once, because includes may form a cycle. The paths of the files read, and of
    the directories that include patterns search, are added to *files*.
    """
    if path in files or len(files) > MAX_CONF_FILES:
        return []
    files.add(path)
    data = root.read(path, MAX_CONF_BYTES)
    directories: list[str] = []
    for line in (data or b"").decode("utf-8", "surrogateescape").splitlines():
        words = line.partition("#")[0].split()
        if not words or words[0] == "hwcap":
            continue
        if words[0] != "include":
            # A directory; old files append "=TYPE" to it.
            directories.append(words[0].partition("=")[0].rstrip("/") or "/")
        else:
            for word in words[1:]:
                pattern = posixpath.join(posixpath.dirname(path), word)
                for included in _matching(root, pattern):
                    directories += _configured(root, included, files)
                files.add(posixpath.dirname(pattern) if "*" in pattern else pattern)
    return [path for path in directories if path.startswith("/")]


def _musl_path(root: DriverRoot, native: str) -> str:
    """Return the file with the search path of musl's loader, "" if *root* does not use musl."""
    machine = _MUSL.get(native or native_abi(), "")
    has_musl = machine and root.locate(f"/lib/ld-musl-{machine}.so.1")
    return f"/etc/ld-musl-{machine}.path" if has_musl else ""


def _of_musl(root: DriverRoot, native: str) -> list[str]:
    """Return the directories of musl's loader, [] if *root* does not use musl."""
    path = _musl_path(root, native)
    data = (root.read(path, MAX_CONF_BYTES) or b"") if path else b""
    names = data.decode("utf-8", "surrogateescape").replace(":", "\n").split("\n")
    return [
        name.rstrip("/") for name in names[:MAX_CONF_FILES] if len(name) > 1 and name[0] == "/"
    ]


def _prefix(libraries: str) -> str:
    """Return *libraries* or the directory above it that is "lib" or similar, "/" or "" if none."""
    prefix = libraries
    while prefix not in ("", "/") and not _LIBRARY_DIRECTORY.match(posixpath.basename(prefix)):
        prefix = posixpath.dirname(prefix)
    return prefix


def programs_beside(libraries: str) -> list[str]:
    """Return where a driver can have its programs if its libraries are in *libraries*.

    That is "bin" beside "lib", "lib64" or similar; without one, the directory itself and "bin"
    beside it. Libraries in a directory of the driver below "lib" can have programs there, or in
    the same directory below "libexec". No directory of BINARIES is returned.
    """
    prefix = _prefix(libraries)
    if prefix in ("", "/"):
        candidates = [libraries, posixpath.join(posixpath.dirname(libraries), "bin")]
    else:
        parent, below = posixpath.dirname(prefix), libraries[len(prefix) + 1 :]
        candidates = [posixpath.join(parent, "bin")]
        if below.startswith("nvidia"):
            candidates += [f"{libraries}/bin", posixpath.join(parent, "libexec", below, "bin")]
    return [path for path in candidates if path != "/" and path not in BINARIES]


def configurations_beside(
    libraries: Iterable[tuple[DriverRoot, str]],
) -> list[tuple[DriverRoot, str]]:
    """Return where a driver can have configuration and data if *libraries* are its directories.

    That is "etc" and "share" beside "lib", "lib64" or similar, and "etc" beside a "usr" above it.
    """
    directories = []
    for base, path in libraries:
        prefix = _prefix(path)
        if prefix in ("", "/"):
            continue
        parent = posixpath.dirname(prefix)
        parents = [parent]
        if posixpath.basename(parent) == "usr":
            parents.append(posixpath.dirname(parent))
        directories += [(base, posixpath.join(above, "etc")) for above in parents]
        directories.append((base, posixpath.join(parent, "share")))
    return list(dict.fromkeys(directories))


def container_data(directory: str) -> str:
    """Return where a container has what is in *directory*, one of configuration or data.

    The loaders of an image look in /etc and /usr/share, whatever the host's look in.
    """
    return "/etc" if posixpath.basename(directory) == "etc" else "/usr/share"


def loader_configuration(root: DriverRoot) -> list[str]:
    """Return the files that configure the loader's search, and the directories of drop-ins."""
    files: set[str] = set()
    _configured(root, "/etc/ld.so.conf", files)
    musl = _musl_path(root, "")
    return sorted({*files, musl} if musl else files)


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

    *search_path*, host paths, replaces the usual ones. Raises DiscoveryError.
    """
    if search_path:
        return [root.around(path) for path in search_path]
    xdg_directories = [normal(path) for path in data_dirs.split(":") if path.startswith("/")]
    return [
        (root, path) for path in dict.fromkeys(["/etc", *xdg_directories, *_DATA, _NIXOS_DATA])
    ]


def xorg(
    root: DriverRoot, libraries: Iterable[tuple[DriverRoot, str]]
) -> list[tuple[DriverRoot, str]]:
    """Return where Xorg modules can be; *libraries* are the directories of libraries."""
    modules = ("drivers", "extensions", "updates/drivers", "updates/extensions")
    directories = []
    for base, directory in libraries:
        directories.append((base, f"{directory}/nvidia/xorg"))
        directories += [(base, f"{directory}/xorg/modules/{module}") for module in modules]
    for prefix in ("/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64"):
        directories += [(root, f"{prefix}/modules/{module}") for module in modules]
    return list(dict.fromkeys(directories))


def firmware(root: DriverRoot, kernel_release: str) -> list[str]:
    """Return where the kernel *kernel_release* looks for firmware, below *root*."""
    parameter = root.read(f"/sys{FIRMWARE_PATH}", MAX_CONF_BYTES)
    if parameter is None:
        parameter = root.host.read(f"/sys{FIRMWARE_PATH}", MAX_CONF_BYTES) or b""
    path = parameter.decode("utf-8", "surrogateescape").strip()
    if root.path != "/" and path.startswith(f"{root.path}/"):
        # A driver container has set its own root in the host's kernel.
        path = path[len(root.path) :]
    releases = ("updates/" + kernel_release, "updates", kernel_release, "")
    usual = [
        f"{lib}/firmware/{name}".rstrip("/") for lib in ("/lib", "/usr/lib") for name in releases
    ]
    return list(dict.fromkeys([*([path.rstrip("/")] if path.startswith("/") else []), *usual]))
