# SPDX-License-Identifier: Apache-2.0
"""The table of the driver's files by capability, one row for each file; pure data.

A library without a row whose name has the driver's version belongs to every capability, so that
a driver newer than this table works.
"""

from __future__ import annotations

from gpuruntime.record import Record
from gpuruntime.request.capabilities import COMPUTE, GRAPHICS, NGX, UTILITY, VIDEO

ALL = ""  # every capability
NEVER = "never"

# The kinds of rows; all but the first are also the kinds of `gpuruntime.model.File`.
LIBRARY = "library"
BINARY = "binary"
CONFIG = "config"
FIRMWARE = "firmware"
XORG = "xorg"
IPC = "ipc"

VERSION = "VERSION"  # in names: the driver's version


class Row(Record):
    """A file of the driver: its *capability*, and *why* in a few words.

    The *name* of a library is the part before `.so.`, which one of its *suffixes*, patterns,
    follows; that of another file is a pattern of its path below the directories of its kind. The
    file is part of the drivers *since* to *until*, if these are set. *opens* are the SONAMEs that
    a library loads without listing them in DT_NEEDED; *links* are its symlinks, `TARGET::LINK`
    with the link relative to its directory, where FILE and SONAME stand for its own names.

    Debian installs each driver in a directory of its own, PRIVATE, and its alternatives link one
    driver's files into the usual directories. *private* is that pair of directories, for a host
    where no alternative is set.
    """

    __slots__ = (
        *("capability", "kind", "links", "name", "opens", "private", "since", "suffixes", "until"),
        "why",
    )

    def __init__(  # noqa: PLR0913 (a row of a table)
        self,
        kind: str,
        name: str,
        capability: str,
        why: str,
        *,
        suffixes: tuple[str, ...] = (VERSION,),
        since: str = "",
        until: str = "",
        opens: tuple[str, ...] = (),
        links: tuple[str, ...] = (),
        private: tuple[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.capability = capability
        self.why = why
        self.suffixes = suffixes
        self.since = since
        self.until = until
        self.opens = opens
        self.links = links
        self.private = private


_LIBRARIES = (
    Row(LIBRARY, "libnvidia-cfg", UTILITY, "configures the GPU"),
    Row(LIBRARY, "libnvidia-ml", UTILITY, "NVML, which watches and manages GPUs"),
    Row(LIBRARY, "libnvidia-nscq", UTILITY, "queries NVSwitches", since="450"),
    Row(LIBRARY, "libnvidia-sandboxutils", UTILITY, "says what a container needs", since="560"),
    Row(LIBRARY, "libnvsdm", UTILITY, "queries NVLink switches", since="565"),
    # Programs open libcuda.so by that name, whether or not the host has its development link.
    Row(
        *(LIBRARY, "libcuda", COMPUTE, "CUDA"),
        links=("SONAME::libcuda.so",),
        # Programs that were not compiled for this GPU need it.
        opens=("libnvidia-ptxjitcompiler.so.1",),
    ),
    Row(LIBRARY, "libcudadebugger", COMPUTE, "debugs CUDA programs", since="520"),
    Row(
        *(LIBRARY, "libnvidia-allocator", COMPUTE, "allocates buffers, also for GBM"),
        since="440",
        links=("../SONAME::gbm/nvidia-drm_gbm.so",),
    ),
    Row(LIBRARY, "libnvidia-compiler", COMPUTE, "compiles OpenCL programs", until="530"),
    Row(LIBRARY, "libnvidia-fatbinaryloader", COMPUTE, "loads CUDA programs", until="440"),
    Row(LIBRARY, "libnvidia-gpucomp", COMPUTE, "compiles for all APIs", since="545"),
    Row(
        *(LIBRARY, "libnvidia-nvvm", COMPUTE, "compiles CUDA and OpenCL programs"),
        since="470",
        suffixes=(VERSION, "4.0.0"),  # the latter at first
    ),
    Row(
        *(LIBRARY, "libnvidia-nvvm70", COMPUTE, "compiles NVVM 7 programs"),
        since="590",
        suffixes=("*",),
    ),
    Row(LIBRARY, "libnvidia-opencl", COMPUTE, "OpenCL"),
    Row(LIBRARY, "libnvidia-pkcs11", COMPUTE, "checks signatures, with OpenSSL 1.1", since="530"),
    Row(
        *(LIBRARY, "libnvidia-pkcs11-openssl3", COMPUTE, "checks signatures, with OpenSSL 3"),
        since="535",
    ),
    Row(LIBRARY, "libnvidia-ptxjitcompiler", COMPUTE, "compiles PTX", since="361"),
    Row(LIBRARY, "libnvidia-tileiras", COMPUTE, "compiles Tile IR", since="590"),
    Row(LIBRARY, "libnvcuvid", VIDEO, "decodes video"),
    Row(LIBRARY, "libnvidia-encode", VIDEO, "encodes video"),
    Row(
        *(LIBRARY, "libnvidia-opticalflow", VIDEO, "computes optical flow"),
        since="418",
        links=("SONAME::libnvidia-opticalflow.so",),
    ),
    Row(LIBRARY, "libvdpau_nvidia", VIDEO, "VDPAU"),
    Row(LIBRARY, "libEGL_nvidia", GRAPHICS, "EGL"),
    Row(LIBRARY, "libGLESv1_CM_nvidia", GRAPHICS, "OpenGL ES 1"),
    Row(LIBRARY, "libGLESv2_nvidia", GRAPHICS, "OpenGL ES 2 and 3"),
    Row(
        *(LIBRARY, "libGLX_nvidia", GRAPHICS, "GLX and Vulkan"),
        links=("FILE::libGLX_indirect.so.0",),
    ),
    Row(LIBRARY, "libnvidia-api", GRAPHICS, "NVAPI", suffixes=("1",), since="525"),
    Row(LIBRARY, "libnvidia-cbl", GRAPHICS, "ray tracing", since="410", until="470"),
    Row(
        *(LIBRARY, "libnvidia-egl-gbm", GRAPHICS, "EGL on GBM"),
        suffixes=("*.*",),
        since="495",
        opens=("libnvidia-allocator.so.1",),
    ),
    Row(LIBRARY, "libnvidia-egl-wayland", GRAPHICS, "EGL on Wayland", suffixes=("*.*",)),
    Row(
        *(LIBRARY, "libnvidia-egl-wayland2", GRAPHICS, "EGL on Wayland"),
        suffixes=("*.*",),
        since="590",
    ),
    Row(LIBRARY, "libnvidia-egl-xcb", GRAPHICS, "EGL on X11", suffixes=("*",), since="560"),
    Row(LIBRARY, "libnvidia-egl-xlib", GRAPHICS, "EGL on X11", suffixes=("*",), since="560"),
    Row(LIBRARY, "libnvidia-eglcore", GRAPHICS, "part of EGL"),
    Row(LIBRARY, "libnvidia-fbc", GRAPHICS, "captures frames"),
    Row(LIBRARY, "libnvidia-glcore", GRAPHICS, "part of OpenGL and Vulkan"),
    Row(LIBRARY, "libnvidia-glsi", GRAPHICS, "part of OpenGL"),
    Row(LIBRARY, "libnvidia-glvkspirv", GRAPHICS, "compiles SPIR-V", since="396"),
    Row(LIBRARY, "libnvidia-gtk2", GRAPHICS, "part of nvidia-settings"),
    Row(LIBRARY, "libnvidia-gtk3", GRAPHICS, "part of nvidia-settings"),
    Row(LIBRARY, "libnvidia-ifr", GRAPHICS, "captures frames", until="470"),
    Row(LIBRARY, "libnvidia-present", GRAPHICS, "layer of Vulkan", since="570"),
    Row(LIBRARY, "libnvidia-rtcore", GRAPHICS, "ray tracing", since="410"),
    Row(LIBRARY, "libnvidia-tls", GRAPHICS, "part of OpenGL"),
    Row(LIBRARY, "libnvidia-vksc-core", GRAPHICS, "Vulkan SC", since="520"),
    Row(
        *(LIBRARY, "libnvidia-vulkan-producer", GRAPHICS, "Vulkan on Wayland"),
        since="470",
        until="535",
        links=("FILE::libnvidia-vulkan-producer.so",),
    ),
    Row(LIBRARY, "libnvidia-wayland-client", GRAPHICS, "part of nvidia-settings", since="530"),
    Row(LIBRARY, "libnvoptix", GRAPHICS, "OptiX", since="396"),
    Row(LIBRARY, "libnvidia-ngx", NGX, "NGX, such as DLSS", since="450"),
)

# Vendor-neutral: each driver brings its own copy, and the image has the one it was built for.
_NEUTRAL = tuple(
    Row(LIBRARY, name, NEVER, "vendor-neutral: the image has its own", suffixes=("*",))
    for name in (
        *("libEGL", "libGL", "libGLESv1_CM", "libGLESv2", "libGLX", "libGLdispatch"),
        *("libOpenCL", "libOpenGL"),
    )
)

BINARIES = (
    Row(BINARY, "nv-fabricmanager", UTILITY, "manages NVSwitches"),
    Row(
        *(BINARY, "nvidia-debugdump", UTILITY, "collects debugging data of a GPU"),
        private=("/usr/lib/nvidia/PRIVATE", "/usr/bin"),
    ),
    Row(BINARY, "nvidia-persistenced", UTILITY, "keeps the driver initialised"),
    Row(
        *(BINARY, "nvidia-smi", UTILITY, "shows and manages GPUs"),
        private=("/usr/lib/nvidia/PRIVATE", "/usr/bin"),
    ),
    Row(BINARY, "nvidia-cuda-mps-control", COMPUTE, "starts MPS"),
    Row(BINARY, "nvidia-cuda-mps-server", COMPUTE, "the server of MPS"),
    Row(BINARY, "nvidia-imex", COMPUTE, "shares memory between nodes", since="535"),
    Row(BINARY, "nvidia-imex-ctl", COMPUTE, "controls nvidia-imex", since="535"),
)

# Below a directory of configuration or of data: /etc, /usr/share and the like.
CONFIGS = (
    Row(CONFIG, "OpenCL/vendors/*nvidia*.icd", COMPUTE, "where OpenCL finds the driver"),
    Row(CONFIG, "glvnd/egl_vendor.d/*nvidia*.json", GRAPHICS, "where EGL finds the driver"),
    Row(
        *(CONFIG, "egl/egl_external_platform.d/*nvidia*.json", GRAPHICS),
        "where EGL finds the driver's platforms",
    ),
    Row(CONFIG, "vulkan/icd.d/*nvidia*.json", GRAPHICS, "where Vulkan finds the driver"),
    Row(CONFIG, "vulkan/explicit_layer.d/*nvidia*.json", GRAPHICS, "layers of Vulkan"),
    Row(CONFIG, "vulkan/implicit_layer.d/*nvidia*.json", GRAPHICS, "layers of Vulkan"),
    Row(CONFIG, "vulkansc/icd.d/*nvidia*.json", GRAPHICS, "where Vulkan SC finds the driver"),
    Row(
        *(CONFIG, "nvidia/nvoptix.bin", GRAPHICS, "data of OptiX"),
        since="535",
        private=("/usr/lib/TRIPLET/nvidia/PRIVATE", "/usr/share/nvidia"),
    ),
    Row(
        *(CONFIG, "nvidia/nvidia-application-profiles-VERSION-rc", GRAPHICS),
        "settings for certain applications",
    ),
    Row(CONFIG, "X11/xorg.conf.d/10-nvidia.conf", GRAPHICS, "lets Xorg use the driver"),
    Row(
        *(CONFIG, "X11/xorg.conf.d/*nvidia-drm-outputclass.conf", GRAPHICS),
        "lets Xorg use the driver",
        private=("/etc/nvidia/PRIVATE", "/usr/share/X11/xorg.conf.d"),
    ),
)
# Each name once, in /etc: the loader of Vulkan reads all directories, that of OpenCL only /etc.
ONCE = ("OpenCL/", "vulkan/", "vulkansc/")
# Beside the libraries.
DATA = (Row(CONFIG, "nvidia/wine/*.dll", NGX, "NGX for Wine", since="470"),)
XORGS = (
    Row(
        *(XORG, "nvidia_drv.so", GRAPHICS, "driver of Xorg"),
        suffixes=(),
        private=("/usr/lib/nvidia/PRIVATE", "/usr/lib/xorg/modules/drivers"),
    ),
    Row(
        *(XORG, "libglxserver_nvidia", GRAPHICS, "GLX for Xorg"),
        links=("FILE::libglxserver_nvidia.so",),
        private=("/usr/lib/nvidia/PRIVATE", "/usr/lib/xorg/modules/extensions"),
    ),
)
FIRMWARES = (
    Row(FIRMWARE, "nvidia/VERSION/gsp*.bin", ALL, "firmware of the GPU's system processor"),
)
# Below /run or /var/run.
SOCKETS = (
    Row(IPC, "nvidia-persistenced/socket", UTILITY, "socket of nvidia-persistenced"),
    Row(IPC, "nvidia-fabricmanager/socket", UTILITY, "socket of nv-fabricmanager"),
)
MPS = Row(IPC, "nvidia-mps", COMPUTE, "pipes of MPS")

# Keyed by name; Xorg modules are included, because they are libraries in other directories.
LIBRARIES = {row.name: row for row in (*_LIBRARIES, *_NEUTRAL, *XORGS)}
# Machines in the names of ICDs, such as `nvidia_icd.i686.json`, and their ABIs.
MACHINES = {
    "x86_64": "x86-64",
    "i686": "i386",
    "i386": "i386",
    "aarch64": "aarch64",
    "armv7l": "arm-hard-float",
}


def unknown(name: str) -> Row:
    """Return a row for the library *name*, which is not in the table."""
    return Row(LIBRARY, name, ALL, "not known")


def matches(name: str, pattern: str) -> bool:
    """Return whether *name* matches *pattern*, in which `*` stands for any text.

    fnmatch is slower: it compiles a regular expression for each pattern.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return name == first
    last = rest.pop()
    end = len(name) - len(last)
    if not (name.startswith(first) and name.endswith(last) and len(first) <= end):
        return False
    position = len(first)
    for part in rest:
        position = name.find(part, position, end)
        if position < 0:
            return False
        position += len(part)
    return True


def is_over(name: str, version: str) -> bool:
    """Return whether the library *name* is no longer part of driver *version*."""
    until = LIBRARIES[name].until
    return bool(until) and int(version.partition(".")[0]) > int(until)
