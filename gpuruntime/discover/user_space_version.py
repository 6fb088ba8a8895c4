# SPDX-License-Identifier: Apache-2.0
"""The driver's version: that of the loaded module, and that of the files below a driver root."""

from __future__ import annotations

from gpuruntime import remedies
from gpuruntime.discover.driver_errors import MismatchedDriverError
from gpuruntime.discover.search_paths import CUDA_NAME, NVML_NAME
from gpuruntime.errors import DriverError
from gpuruntime.formats.driver_version import is_version, of_module_text, of_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuruntime.discover.root import Directory, DriverRoot

MODULE = "/proc/driver/nvidia/version"
_MAX_BYTES = 64 << 10


def of_module(root: DriverRoot) -> str:
    """Return the version of the loaded module as *root* shows it, "" if it does not."""
    data = root.read(MODULE, _MAX_BYTES) or b""
    return of_module_text(data.decode("utf-8", "replace"))


def checked(version: str) -> str:
    """Return *version*; raise DriverError if it is not a driver version."""
    if is_version(version):
        return version
    raise DriverError(
        f'cannot determine the driver version: "{version}"', remedies.CHECK_NVIDIA_SMI
    )


def installed(directories: Iterable[Directory]) -> list[str]:
    """Return the versions of the drivers in *directories*, the one in use first.

    The version in use is the target of the SONAME symlink of libcuda, or else of NVML. The others
    follow, newest first.
    """
    directories = list(directories)
    linked, named = [], []
    for soname in (CUDA_NAME, NVML_NAME):
        stem = soname.partition(".so.")[0]
        versions = set()
        for directory in directories:
            if soname in directory.names:
                real = directory.root.locate(directory.join(soname)) or ""
                linked.append(of_name(real.rpartition("/")[2]))
            start = f"{stem}.so."
            versions |= {of_name(name) for name in directory.names if name.startswith(start)}
        named += sorted(versions, key=_order, reverse=True)
    return [version for version in dict.fromkeys([*linked, *named]) if version]


def choose(root: DriverRoot, directories: Sequence[Directory]) -> str:
    """Return the version of the driver below *root* that matches the loaded module.

    Without a module it is the version in use; "" if there is no driver. Raises DriverError, with
    both versions, if no installed driver matches the module.
    """
    versions = installed(directories)
    module = of_module(root)
    if not versions or not module:
        return versions[0] if versions else ""
    if module not in versions:
        raise mismatch(root, module, versions)
    return module


def mismatch(root: DriverRoot, loaded: str, installed_versions: Iterable[str]) -> DriverError:
    """Return the error that *root* has only files of other drivers than the *loaded* one."""
    versions = list(installed_versions)
    return MismatchedDriverError(
        f"driver {loaded} is loaded, but the libraries below the driver root "
        f'"{root.path}" are of {", ".join(versions)}',
        remedies.version_mismatch(remedies.LiveHost(), loaded, versions[0]),
    )


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]
