# SPDX-License-Identifier: Apache-2.0
"""The inventory of WSL: one device for all GPUs, and the driver store of an NVIDIA adapter.

Windows' driver has no versioned names, no NVML that lists device nodes, and no node for each GPU.
"""

from __future__ import annotations

import posixpath

from gpuruntime import remedies
from gpuruntime.discover import driver_table, dxcore, platforms, search_paths
from gpuruntime.errors import DiscoveryError, DriverError
from gpuruntime.model import WSL, Driver, File, Gpu, GpuNodes, Inventory, Library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuruntime.discover.device_nodes import DevRoot
    from gpuruntime.discover.root import Directory, DriverRoot

CUDA = "libcuda.so.1.1"
_SMI = "nvidia-smi"
# An adapter whose driver store lacks the first of these is not NVIDIA's. Of two libraries with the
# same SONAME, the loader finds the first: libcuda before libcuda_loader.
_EXPECTED = (
    CUDA,
    "libcuda_loader.so",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1",
    "nvcubins.bin",
    _SMI,
)
# Without one of these, CUDA or NVML does not work.
_REQUIRED = (CUDA, "libnvidia-ml.so.1")
_MAX_STORES_IN_MESSAGE = 4


def discover(
    root: DriverRoot, dev: DevRoot, marks: platforms.Marks, deadline_s: float
) -> Inventory:
    """Return the inventory of the WSL below *root* and *dev*, which has *marks*.

    Raises DriverError if libdxcore is missing or does not respond, and DiscoveryError if there is
    no adapter of NVIDIA, or its files are not usable.
    """
    node = dev.node(platforms.DXG)
    if node is None or not marks.dxcore:
        raise _unavailable(dev, marks)
    stores = [_place(root, path) for path in dxcore.driver_stores(marks.dxcore, deadline_s)]
    store, others = _nvidia_stores(stores)
    if store is None:
        raise _no_adapter(stores)
    driver = _driver(root, marks.dxcore, store)
    problems = [
        f'the driver store "{_host_path(other)}" of another NVIDIA adapter is not used: "'
        f'{_host_path(store)}" serves all of them'
        for other in others
    ]
    device = Gpu(index=0, uuid="", minor=0, name="")
    return Inventory(
        driver=driver,
        gpus=(GpuNodes(gpu=device, node=node),),
        control_nodes=(),
        problems=tuple(problems),
        decision=_decision(dev, marks),
    )


def _decision(dev: DevRoot, marks: platforms.Marks) -> str:
    sentence = f"the platform is WSL: there are {marks.wsl}"
    if dev.exists("/dev/nvidiactl"):
        sentence += (
            '; "/dev/nvidiactl" is not used, which is there as well: choose it with "--mode nvml"'
        )
    return sentence


def _unavailable(dev: DevRoot, marks: platforms.Marks) -> DriverError:
    reason = platforms.missing_wsl(marks)
    if reason is not None:
        return DriverError(*reason)
    if not dev.exists(platforms.DXG):
        return DriverError(
            f'no device node "{platforms.DXG}" below the dev root "{dev.path}": this is not WSL',
            'use "--mode auto", or name the directory of the node with "--dev-root"',
        )
    return DriverError(
        f'"{platforms.DXG}" below the dev root "{dev.path}" is not a character device',
        remedies.RESTART_WSL,
    )


def _place(root: DriverRoot, store: str) -> tuple[DriverRoot, str]:
    """Return where the driver *store* is, which libdxcore names by its path in WSL.

    That path is below *root* if WSL's root directory is mounted there.
    """
    return (root, store) if root.directory(store) is not None else root.around(store)


def _nvidia_stores(
    stores: Iterable[tuple[DriverRoot, str]],
) -> tuple[Directory | None, list[Directory]]:
    """Return the first driver store with CUDA, and the other ones with CUDA."""
    by_path: dict[str, Directory] = {}
    for base, path in stores:
        directory = base.directory(path)
        if directory is not None and CUDA in directory.names:
            by_path.setdefault(_host_path(directory), directory)
    nvidia = list(by_path.values())
    return (nvidia[0], nvidia[1:]) if nvidia else (None, [])


def _host_path(directory: Directory) -> str:
    return directory.root.host_path(directory.path)


def _no_adapter(stores: list[tuple[DriverRoot, str]]) -> DiscoveryError:
    if not stores:
        return DiscoveryError(
            "WSL has no adapter with a driver store: Windows has no GPU driver with WSL support",
            "install the NVIDIA driver on Windows",
        )
    names = [f'"{base.host_path(path)}"' for base, path in stores]
    names = list(dict.fromkeys(names))
    shown = ", ".join(names[:_MAX_STORES_IN_MESSAGE])
    if len(names) > _MAX_STORES_IN_MESSAGE:
        shown += f" and {len(names) - _MAX_STORES_IN_MESSAGE} more"
    return DiscoveryError(
        f'WSL has no NVIDIA adapter: no "{CUDA}" in the driver stores of its adapters: {shown}',
        "install the NVIDIA driver on Windows",
    )


def _driver(root: DriverRoot, dxcore_path: str, store: Directory) -> Driver:
    """Return the files of *store*, and libdxcore; raise DiscoveryError without a required one."""
    problems: list[str] = []
    libraries: dict[str, Library] = {}
    base, path = root.around(dxcore_path)
    libraries[platforms.DXCORE] = _library(base, path)
    files = []
    for name in _names(store):
        place = store.join(name)
        try:
            if ".so" in name:
                library = _library(store.root, place)
                if library.soname in libraries:
                    library = _library(store.root, place, soname=name)
                libraries[library.soname] = library
            else:
                files.append(_file(store, name))
        except DiscoveryError as error:
            if name in _REQUIRED:
                raise
            problems.append(error.message)
    for name in _EXPECTED:
        if name not in store.names:
            text = f'no "{name}" in the driver store "{_host_path(store)}"'
            if name in _REQUIRED:
                raise DiscoveryError(text, "install the NVIDIA driver on Windows again")
            problems.append(text)
    return Driver(
        version="",
        libraries=tuple(sorted(libraries.values(), key=lambda library: library.container_path)),
        files=tuple(files),
        problems=tuple(problems),
        platform=WSL,
    )


def _names(store: Directory) -> list[str]:
    """Return the names of the driver's files in *store*, the expected ones first."""
    expected = [name for name in _EXPECTED if name in store.names]
    others = [name for name in store.names if ".so" in name or name.endswith((".bin", ".dll"))]
    return list(dict.fromkeys([*expected, *sorted(others)]))


def _library(root: DriverRoot, path: str, soname: str = "") -> Library:
    """Return the library *path*; raise DiscoveryError. *soname* replaces the one that it has."""
    real, elf = root.library(path)
    native = search_paths.native_abi()
    if elf.abi != native:
        raise DiscoveryError(
            f'"{root.host_path(real)}" is for {elf.abi or "another machine"}, not for {native}',
            remedies.INSTALL_FOR_MACHINE,
        )
    name = posixpath.basename(path)
    soname = soname or elf.soname or name
    row = driver_table.LIBRARIES.get(soname.partition(".so")[0])
    dev_link = ""
    for link in row.links if row is not None else ():
        target, _, place = link.partition("::")
        if target == "SONAME" and place == soname.partition(".so")[0] + ".so":
            dev_link = place
    return Library(
        host_path=root.host_path(real),
        container_path=path,
        soname=soname,
        abi=elf.abi,
        needed=tuple(elf.needed),
        dev_link=dev_link,
    )


def _file(store: Directory, name: str) -> File:
    path = store.join(name)
    real = store.root.file(path)
    if real is None:
        raise DiscoveryError(
            f'"{store.root.host_path(path)}" is no longer there', remedies.REINSTALL_DRIVER
        )
    is_program = name == _SMI
    return File(
        kind="binary" if is_program else "config",
        host_path=store.root.host_path(real),
        container_path=path,
        links=(f"{_relative(path)}::/usr/bin/{name}",) if is_program else (),
    )


def _relative(path: str) -> str:
    """Return *path* relative to /usr/bin: a link in a container has a relative target."""
    return posixpath.relpath(path, "/usr/bin")
