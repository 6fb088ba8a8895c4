# SPDX-License-Identifier: Apache-2.0
"""The driver's files by capability: one row a library or program; pure data.

A versioned library that no row names belongs to every capability, so that a driver newer than
this table works on its first day.
"""

from __future__ import annotations

COMPUTE = "compute"
UTILITY = "utility"
VIDEO = "video"
GRAPHICS = "graphics"
NGX = "ngx"
DEFAULT_CAPABILITIES = frozenset({COMPUTE, UTILITY})

# The name before `.so.<driver version>` → capability.
LIBRARIES = {
    "libnvidia-cfg": UTILITY,
    "libnvidia-ml": UTILITY,
    "libnvidia-nscq": UTILITY,
    "libcuda": COMPUTE,
    "libcudadebugger": COMPUTE,
    "libnvidia-allocator": COMPUTE,
    "libnvidia-compiler": COMPUTE,
    "libnvidia-fatbinaryloader": COMPUTE,
    "libnvidia-gpucomp": COMPUTE,
    "libnvidia-nvvm": COMPUTE,
    "libnvidia-opencl": COMPUTE,
    "libnvidia-pkcs11": COMPUTE,
    "libnvidia-pkcs11-openssl3": COMPUTE,
    "libnvidia-ptxjitcompiler": COMPUTE,
    "libnvidia-tileiras": COMPUTE,
    "libnvcuvid": VIDEO,
    "libnvidia-encode": VIDEO,
    "libnvidia-opticalflow": VIDEO,
    "libvdpau_nvidia": VIDEO,
    "libEGL_nvidia": GRAPHICS,
    "libGLESv1_CM_nvidia": GRAPHICS,
    "libGLESv2_nvidia": GRAPHICS,
    "libGLX_nvidia": GRAPHICS,
    "libglxserver_nvidia": GRAPHICS,
    "libnvidia-cbl": GRAPHICS,
    "libnvidia-eglcore": GRAPHICS,
    "libnvidia-fbc": GRAPHICS,
    "libnvidia-glcore": GRAPHICS,
    "libnvidia-glsi": GRAPHICS,
    "libnvidia-glvkspirv": GRAPHICS,
    "libnvidia-gtk2": GRAPHICS,
    "libnvidia-gtk3": GRAPHICS,
    "libnvidia-ifr": GRAPHICS,
    "libnvidia-rtcore": GRAPHICS,
    "libnvidia-tls": GRAPHICS,
    "libnvidia-vulkan-producer": GRAPHICS,
    "libnvidia-wayland-client": GRAPHICS,
    "libnvoptix": GRAPHICS,
    "libnvidia-ngx": NGX,
}

BINARIES = {
    "nv-fabricmanager": UTILITY,
    "nvidia-debugdump": UTILITY,
    "nvidia-persistenced": UTILITY,
    "nvidia-smi": UTILITY,
    "nvidia-cuda-mps-control": COMPUTE,
    "nvidia-cuda-mps-server": COMPUTE,
}
