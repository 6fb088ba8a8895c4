# SPDX-License-Identifier: Apache-2.0
"""Recognise WSL and Tegra, where GPUs are not used through NVML and device nodes."""

from __future__ import annotations

import posixpath

from gpuruntime.discover import search_paths
from gpuruntime.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuruntime.discover.device_nodes import DevRoot
    from gpuruntime.discover.root import DriverRoot
    from gpuruntime.model import Gpu

_DXCORE = "libdxcore.so"
_WSL_LIBRARIES = "/usr/lib/wsl/lib"
_TEGRA_RELEASE = "/etc/nv_tegra_release"
_TEGRA_FAMILY = "/sys/devices/soc0/family"
_MAX_FAMILY_BYTES = 256
# Parts of the names of GPUs that are part of a Tegra.
_INTEGRATED = ("(nvgpu)", "NVIDIA Thor")


def refuse_wsl(root: DriverRoot, dev: DevRoot) -> None:
    """Raise ConfigError on the Windows Subsystem for Linux, which has no driver of its own."""
    if not dev.exists("/dev/dxg"):
        return
    directories = (_WSL_LIBRARIES, *search_paths.library_candidates(root))
    if any(root.locate(posixpath.join(directory, _DXCORE)) for directory in directories):
        raise _not_yet("wsl", f'WSL, with "/dev/dxg" and "{_DXCORE}"')


def refuse_tegra(root: DriverRoot) -> None:
    """Raise ConfigError if *root*, which lacks NVML, is the driver root of a Tegra."""
    family = root.read(_TEGRA_FAMILY, _MAX_FAMILY_BYTES) or b""
    if root.locate(_TEGRA_RELEASE):
        raise _not_yet("csv", f'a Tegra, with "{root.host_path(_TEGRA_RELEASE)}" and no NVML')
    if family.lower().startswith(b"tegra"):
        raise _not_yet("csv", f'a Tegra, as "{root.host_path(_TEGRA_FAMILY)}" says')


def refuse_integrated(gpus: Iterable[Gpu]) -> None:
    """Raise ConfigError if one of *gpus* is part of a Tegra."""
    for gpu in gpus:
        if any(name in gpu.name for name in _INTEGRATED):
            raise _not_yet("csv", f'a Tegra, with the GPU "{gpu.name}"')


def _not_yet(mode: str, platform: str) -> ConfigError:
    return ConfigError(
        f'this machine is {platform}: the discovery mode "{mode}" that it needs is not there yet',
        f'generate its spec with "nvidia-ctk cdi generate --mode {mode}"',
    )
