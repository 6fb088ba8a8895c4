# SPDX-License-Identifier: Apache-2.0
"""The driver's user space below a driver root: its version, libraries and other files."""

from __future__ import annotations

import os

from gpuruntime import remedies
from gpuruntime.discover import libraries, search_paths, user_space_version
from gpuruntime.discover.driver_errors import AbsentDriverError
from gpuruntime.discover.other_files import Finder
from gpuruntime.discover.root import DriverRoot
from gpuruntime.discover.search_paths import NVML_NAME, native_abi
from gpuruntime.errors import DiscoveryError, DriverError
from gpuruntime.formats.driver_version import of_name
from gpuruntime.model import Driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuruntime.discover.root import Directory
    from gpuruntime.model import File, Library

__all__ = [
    "NVML_NAME",
    "DriverRoot",
    "find_driver",
    "find_nvml",
    "library_directories",
    "variables",
]

# Other places for a driver; one in them is only mentioned in a hint.
WELL_KNOWN_ROOTS = (
    "/",
    "/run/nvidia/driver",
    "/home/kubernetes/bin/nvidia",
    "/opt/nvidia",
    "/usr/local/nvidia",
    "/run/opengl-driver",
)

PATH = "PATH"
# The environment variables that name directories of files other than programs.
VARIABLES = ("XDG_DATA_DIRS", "CUDA_MPS_PIPE_DIRECTORY")


def library_directories(root: DriverRoot) -> list[str]:
    """Return where driver libraries can be: the loader's directories, then the usual ones."""
    return search_paths.library_candidates(root)


def find_nvml(
    root: DriverRoot,
    library_search_path: Sequence[str] = (),
    *,
    native: str = "",
    elsewhere: Sequence[str] = WELL_KNOWN_ROOTS,
) -> str:
    """Return the host path of NVML below *root*, in the version of the loaded module.

    Raises DriverError if it is missing, with a hint at the first of *elsewhere* that has it, or if
    its version differs from the module's; DiscoveryError if it cannot be used.
    """
    native = native or native_abi()
    directories = search_paths.libraries(root, library_search_path, native)
    host_paths, refused = _nvmls(directories, native)
    if not host_paths:
        if refused:
            raise refused[0]
        raise _no_driver(root, directories, native, elsewhere)
    loaded = user_space_version.of_module(root) or user_space_version.of_module(root.host)
    for path in host_paths:
        if not loaded or of_name(path) in ("", loaded):
            return path
    raise user_space_version.mismatch(root, loaded, dict.fromkeys(map(of_name, host_paths)))


def _nvmls(
    directories: Sequence[Directory], native: str
) -> tuple[list[str], list[DiscoveryError]]:
    """Return the host paths of NVMLs for *native*, the one in use first, and errors."""
    host_paths: dict[str, None] = {}
    refused = []
    start = NVML_NAME.partition(".so.")[0] + ".so."
    by_name = [
        (name != NVML_NAME, directory, name)
        for directory in directories
        for name in sorted((n for n in directory.names if n.startswith(start)), reverse=True)
    ]
    for _, directory, name in sorted(by_name, key=lambda row: row[0]):
        try:
            path, elf = directory.root.library(directory.join(name))
        except DiscoveryError as error:
            refused.append(error)
            continue
        host_path = directory.root.host_path(path)
        if elf.abi != native:
            refused.append(
                DiscoveryError(
                    f'"{host_path}" is for {elf.abi or "another machine"}, not for {native}',
                    remedies.INSTALL_FOR_MACHINE,
                )
            )
        elif elf.soname in (NVML_NAME, None):
            host_paths[host_path] = None
    return list(host_paths), refused


def _no_driver(
    root: DriverRoot, directories: Sequence[Directory], native: str, elsewhere: Sequence[str]
) -> DriverError:
    """Return the error for a *root* without a driver, with a hint at another place."""
    searched = ", ".join(directory.path for directory in directories) or "none is there"
    message = (
        f'no "{NVML_NAME}" below the driver root "{root.path}"; directories searched: {searched}'
    )
    fault = search_paths.cache_fault(root)
    if fault:
        message += f"; {fault}"
    for path in elsewhere:
        other = _other_root(root, path)
        if other is not None and _nvmls(search_paths.libraries(other, (), native), native)[0]:
            return AbsentDriverError(
                f'{message}; there is one below "{path}"',
                remedies.other_driver_root(path),
            )
    return AbsentDriverError(
        message,
        remedies.missing_libraries(
            remedies.LiveHost(), user_space_version.of_module(root), root.path
        ),
    )


def _other_root(root: DriverRoot, path: str) -> DriverRoot | None:
    try:
        other = DriverRoot(path)
    except DiscoveryError:
        return None
    return None if other.path == root.path else other


def variables() -> dict[str, str]:
    """Return the values of VARIABLES, "" for one that is not set."""
    return {name: os.environ.get(name, "") for name in VARIABLES}


def find_driver(  # noqa: PLR0913 (options, given by name)
    root: DriverRoot,
    driver_version: str | None = None,
    *,
    library_search_path: Sequence[str] = (),
    config_search_path: Sequence[str] = (),
    program_search_path: Sequence[str] = (),
    kernel_release: str = "",
    native: str = "",
    elsewhere: Sequence[str] = WELL_KNOWN_ROOTS,
    environment: bool = True,
) -> Driver:
    """Return the driver below *root* of *driver_version*, the version that NVML reports.

    Without *driver_version*, the version is that of the loaded module as *root* shows it, or else
    of the libraries in use. The result has the files of every capability, and of all ABIs that a
    machine of ABI *native* runs, by default this machine. Search paths are host paths and replace
    the usual directories. With *environment*, VARIABLES and PATH add directories. Raises
    DiscoveryError and DriverError.
    """
    native = native or native_abi()
    directories = search_paths.libraries(root, library_search_path, native)
    if driver_version is None:
        chosen = user_space_version.choose(root, directories)
        if not chosen and any(NVML_NAME in directory.names for directory in directories):
            raise DiscoveryError(
                f'cannot determine the version of the driver below the driver root "{root.path}": '
                "no module is loaded, and no library name contains the version",
                "install the driver's libraries under their versioned names",
            )
        if not chosen:
            raise _no_driver(root, directories, native, elsewhere)
    else:
        chosen = user_space_version.checked(driver_version)
    driver_libraries, problems = libraries.find(root, directories, chosen, native)
    finder = Finder(root, chosen, native, driver_libraries)
    path = os.environ.get(PATH, "") if environment else ""
    finder.binaries(program_search_path, path)
    settings = variables() if environment else dict.fromkeys(VARIABLES, "")
    finder.configurations(config_search_path, settings["XDG_DATA_DIRS"])
    finder.data()
    finder.xorg()
    finder.firmware(kernel_release or os.uname().release)
    finder.sockets(settings["CUDA_MPS_PIPE_DIRECTORY"])
    files = [finder.files[key] for key in sorted(finder.files)]
    return Driver(
        version=chosen,
        libraries=tuple(driver_libraries),
        files=tuple(files),
        problems=tuple(
            dict.fromkeys(
                [*problems, *finder.problems, *_without_icd(driver_libraries, files, native)]
            )
        ),
    )


def _without_icd(
    all_libraries: Sequence[Library], files: Sequence[File], native: str
) -> list[str]:
    """Return sentences about graphics libraries that no API loader will find."""
    problems = []
    for soname, directory, api in (
        ("libGLX_nvidia.so.0", "/vulkan/icd.d/", "Vulkan"),
        ("libEGL_nvidia.so.0", "/glvnd/egl_vendor.d/", "EGL"),
    ):
        library = next(
            (lib for lib in all_libraries if (lib.soname, lib.abi) == (soname, native)), None
        )
        if library and not any(directory in file.container_path for file in files):
            problems.append(
                f'"{library.host_path}" is there, but no "*nvidia*.json" in a directory '
                f'"{directory.strip("/")}": {api} does not find the driver in a container'
            )
    return problems
