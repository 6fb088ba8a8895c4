# SPDX-License-Identifier: Apache-2.0
"""Build one inventory from the driver root, NVML and the dev root."""

from __future__ import annotations

import functools
import stat
from collections.abc import Callable, Sequence

from gpuruntime.discover import (
    device_nodes,
    left_out_gpus,
    nvml,
    platforms,
    tegra,
    user_space,
    user_space_version,
    wsl,
)
from gpuruntime.errors import DiscoveryError, DriverError, GpuRuntimeError
from gpuruntime.model import (
    GDS,
    WSL,
    Driver,
    File,
    Gpu,
    GpuNodes,
    Inventory,
    LeftOutDevice,
    missing_nodes,
)

# Files for GPUDirect Storage: udev's data about disks, and the settings of cuFile.
UDEV = "/run/udev"
CUFILE = "/etc/cufile.json"
_GDS_FILES = {
    UDEV: "cuFile cannot tell the kinds of disks",
    CUFILE: "cuFile uses its own settings",
}
# Path of NVML and deadline → the query.
StartQuery = Callable[[str, float], nvml.Query | nvml.AnsweredQuery]


def discover(  # noqa: PLR0913 (options, given by name)
    driver_root: str,
    dev_root: str,
    *,
    mode: str = platforms.AUTO,
    csv: tegra.CsvOptions | None = None,
    library_search_path: Sequence[str] = (),
    config_search_path: Sequence[str] = (),
    program_search_path: Sequence[str] = (),
    management: bool = False,
    strict: bool = True,
    environment: bool = True,
    deadline_s: float = nvml.DEADLINE_S,
    on_own_limits: Callable[[], object] = bool,
    query: StartQuery = nvml.Query,
    proc: str = "/proc",
    sys: str = "/sys",
) -> Inventory:
    """Read the machine below *driver_root* and *dev_root*.

    *mode* is NVML, WSL or CSV, or AUTO for that of the machine's platform; *csv* are the options
    of CSV. With *management*, the inventory lists no GPUs, but the nodes of all of them. If not
    *strict*, GPUs and control nodes may be missing. With *environment*, its variables name further
    directories of files. *on_own_limits* is called if a GPU is left out that another process may
    get. *query* starts the query of the NVML at a path, with a deadline; a process that has loaded
    NVML asks it there. *proc* and *sys* are the directories of the kernel's files.

    Raises DriverError if the driver does not respond within *deadline_s*, DiscoveryError if files
    or nodes are missing.
    """
    root = user_space.DriverRoot(driver_root)
    csv = csv or tegra.CsvOptions(library_search_path=library_search_path)
    with _DevRoots(dev_root) as (dev, host):
        marks = platforms.marks(root, dev)
        if mode == WSL or (mode == platforms.AUTO and marks.wsl and not management):
            return wsl.discover(root, dev, marks, deadline_s)
        find_driver = functools.partial(
            user_space.find_driver,
            root,
            library_search_path=library_search_path,
            config_search_path=config_search_path,
            program_search_path=program_search_path,
            environment=environment,
        )
        response, failure, has_nvml, early_driver = _ask(
            root, library_search_path, deadline_s, query, find_driver
        )
        if response is not None and not response.is_shared:
            on_own_limits()
        if not management:
            decision = platforms.tegra_decision(mode, marks, response)
            if decision:
                # A Tegra need not have NVML.
                without = [f"NVML is not used: {failure.message}"] if failure and has_nvml else []
                if isinstance(failure, nvml.NoAnswerError):
                    on_own_limits()
                return tegra.discover(
                    root, dev, csv, answer=response, decision=decision, problems=without
                )
        if response is None:
            assert failure is not None
            raise _without_nvml(failure, marks, mode)
        if early_driver is not None and early_driver.version == response.driver_version:
            driver = early_driver
        else:
            driver = find_driver(response.driver_version)
        if management:
            return Inventory(
                driver=driver,
                gpus=(),
                control_nodes=(),
                management_nodes=device_nodes.management_nodes(dev),
                decision=platforms.nvml_decision(marks),
                cuda_version=response.cuda_version,
                problems=response.problems,
            )
        gpus, without_nodes = device_nodes.gpu_nodes(
            response.gpus, dev, strict=strict, proc=proc, sys=sys
        )
        failed = left_out_gpus.completed(response.left_out, response.gpus, proc=proc)
        at_fault, kept_away = _unlisted(response.gpus, failed, dev, proc, sys)
        left_out = (*failed, *without_nodes, *at_fault, *kept_away)
        problems = (
            *response.problems,
            *map(str, [*without_nodes, *at_fault]),
            *_without_mig_devices(gpus),
        )
        if strict and not gpus:
            sentences = [*problems, *map(str, kept_away)]
            raise DiscoveryError(
                "no GPU can be used" + "".join(f"; {sentence}" for sentence in sentences),
                left_out[0].hint
                if left_out
                else 'check that "nvidia-smi -L" lists a GPU on the host',
            )
        features = device_nodes.feature_nodes(dev, host)
        return Inventory(
            driver=driver,
            gpus=gpus,
            control_nodes=device_nodes.control_nodes(dev, strict=strict),
            features=features,
            gds_files=_gds_files(root) if features[GDS] else (),
            cuda_version=response.cuda_version,
            problems=problems,
            left_out=left_out,
            decision=platforms.nvml_decision(marks),
        )


def _ask(
    root: user_space.DriverRoot,
    library_search_path: Sequence[str],
    deadline_s: float,
    query: StartQuery,
    find_driver: Callable[[str], Driver],
) -> tuple[nvml.Answer | None, DriverError | DiscoveryError | None, bool, Driver | None]:
    """Return NVML's answer, or the error; and whether there is an NVML, usable or not.

    Last the driver of the loaded module, if its files were found while NVML was asked.
    """
    try:
        library = user_space.find_nvml(root, library_search_path)
    except DriverError as error:
        return None, error, False, None
    except DiscoveryError as error:
        return None, error, True, None
    try:
        with query(library, deadline_s) as started:
            # NVML takes its time: the files of the loaded driver are searched for meanwhile.
            early_driver = _driver_of_module(root, find_driver)
            return started.answer(), None, True, early_driver
    except DriverError as error:
        return None, error, True, None


def _without_nvml(
    failure: DriverError | DiscoveryError, marks: platforms.Marks, mode: str
) -> DriverError | DiscoveryError:
    """Return the error for a machine whose NVML does not answer."""
    reason = platforms.missing_wsl(marks) if mode == platforms.AUTO else None
    return failure if reason is None else DriverError(*reason)


def discover_features(driver_root: str, dev_root: str, feature: str) -> Inventory:
    """Return an inventory of the nodes of model.FEATURES, without a query of the driver.

    Apart from them it holds only the version of the loaded module, "" if there is none, and as
    problems the optional parts that *feature* lacks. Raises DiscoveryError.
    """
    root = user_space.DriverRoot(driver_root)
    with _DevRoots(dev_root) as (dev, host):
        features = device_nodes.feature_nodes(dev, host)
    loaded = user_space_version.of_module(root) or user_space_version.of_module(root.host)
    files = _gds_files(root) if features[GDS] else ()
    problems = [missing_nodes(feature, features[feature])]
    if feature == GDS and features[GDS]:
        paths = [file.container_path for file in files]
        missing = (path for path in _GDS_FILES if path not in paths)
        problems += [f'no "{path}": {_GDS_FILES[path]}' for path in missing]
    return Inventory(
        driver=Driver(version=loaded, libraries=(), files=()),
        gpus=(),
        control_nodes=(),
        features=features,
        gds_files=files,
        problems=tuple(filter(None, problems)),
    )


def _driver_of_module(
    root: user_space.DriverRoot, find_driver: Callable[[str], Driver]
) -> Driver | None:
    """Return the driver of the loaded module's version; None without one, or if it fails.

    An error is raised later, when NVML has answered, whose errors come first.
    """
    version = user_space_version.of_module(root) or user_space_version.of_module(root.host)
    try:
        return find_driver(version) if version else None
    except GpuRuntimeError:
        return None


class _DevRoots:
    """The dev root and the host's own, which may be the same object; open in the context."""

    def __init__(self, dev_root: str) -> None:
        self._dev = device_nodes.DevRoot(dev_root)
        self._host = self._dev
        if self._dev.path != "/":
            try:
                self._host = device_nodes.DevRoot("/")
            except DiscoveryError:
                self._dev.close()
                raise

    def __enter__(self) -> tuple[device_nodes.DevRoot, device_nodes.DevRoot]:
        """Return both."""
        return self._dev, self._host

    def __exit__(self, *_: object) -> None:
        """Close both."""
        self._dev.close()
        if self._host is not self._dev:
            self._host.close()


def _unlisted(
    gpus: Sequence[Gpu],
    failed: Sequence[LeftOutDevice],
    dev: device_nodes.DevRoot,
    proc: str,
    sys: str,
) -> tuple[list[LeftOutDevice], list[LeftOutDevice]]:
    """Return the GPUs that NVML does not list: those at fault, then those kept from the driver.

    Both lists are empty if the PCI address of a GPU that NVML lists is unknown.
    """
    bus_ids = [
        *(gpu.bus_id for gpu in gpus),
        *(device.bus_id for device in failed if ":" not in device.name),
    ]
    if not all(bus_ids):
        return [], []
    return left_out_gpus.unlisted(bus_ids, dev.exists, proc=proc, sys=sys)


def _without_mig_devices(gpus: Sequence[GpuNodes]) -> list[str]:
    return [
        f"GPU {item.gpu.index} is in MIG mode and has no MIG device"
        for item in gpus
        if item.gpu.mig_enabled and not item.gpu.mig_devices
    ]


def _gds_files(root: user_space.DriverRoot) -> tuple[File, ...]:
    """Return the files that GPUDirect Storage needs, below *root* or else on the host."""
    files = []
    for path in _GDS_FILES:
        for base in dict.fromkeys((root, root.host)):
            real = _real(base, path)
            if real:
                host_path = base.host_path(real)
                files.append(File(kind="config", host_path=host_path, container_path=path))
                break
    return tuple(files)


def _real(base: user_space.DriverRoot, path: str) -> str | None:
    if path != UDEV:
        return base.locate(path)
    special = base.special(path)
    return special[0] if special and stat.S_ISDIR(special[1].st_mode) else None
