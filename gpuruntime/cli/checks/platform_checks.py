# SPDX-License-Identifier: Apache-2.0
"""The check of the platform: which one the host is, and whether discovery works on it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from gpuruntime import config as settings
from gpuruntime import remedies
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import OK, Note, fail, ok, warn
from gpuruntime.discover import distributions, platforms, search_paths, tegra, wsl
from gpuruntime.discover.device_nodes import DevRoot
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.model import CSV, NVML, WSL, Inventory

_CSV_FILES = "nvidia-container-runtime.modes.csv.mount-spec-path"
_MODULE = "/proc/driver/nvidia/version"
GPUS = "/proc/driver/nvidia/gpus"
# Less than the deadline of a check, so that the error can still be reported.
_DEADLINE_S = 12.0


def mode_of(machine: ExaminedMachine) -> str:
    """Return the discovery mode of the platform by its files: NVML, WSL or CSV.

    A Tegra may have the module nvidia, for its displays or its GPU. The checks of the module and
    of its libraries apply if the module lists only discrete GPUs, as discovery decides by NVML.
    """
    has_module = machine.exists(_MODULE)
    has_dxcore = machine.exists(f"{platforms.WSL_LIBRARIES}/{platforms.DXCORE}")
    if machine.exists(platforms.DXG) and (has_dxcore or not has_module):
        return WSL
    family = (machine.read(platforms.TEGRA_FAMILY) or "").lower()
    is_tegra = machine.exists(platforms.TEGRA_RELEASE) or family.startswith("tegra")
    names = gpu_models(machine) if has_module else []
    is_integrated = any(map(platforms.is_integrated_name, names))
    return CSV if is_integrated or (is_tegra and not names) else NVML


def gpu_models(machine: ExaminedMachine) -> list[str]:
    """Return the model of each GPU that the module nvidia lists, "" for one without a name."""
    texts = [machine.read(f"{GPUS}/{name}/information") or "" for name in machine.names(GPUS)]
    matches = [re.search(r"^Model:\s*(.*\S)", text, re.MULTILINE) for text in texts]
    return [match[1] if match else "" for match in matches]


def platform(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the GPUs of WSL or of a Tegra, which have no module nvidia, can be used."""
    mode = mode_of(machine)
    release = (machine.read(platforms.KERNEL_RELEASE) or "").strip()
    if mode == NVML:
        marks = platforms.Marks(dxg="", dxcore="", kernel=release, tegra="")
        reason = platforms.missing_wsl(marks)
        row = distributions.of_host(machine.read, machine.exists)
        name = f", {row.name}" if row else ""
        yield fail(*reason) if reason else ok(f"Linux {release}{name}")
        return
    root = machine.driver_root().open()
    if root is None:
        yield fail(
            f'cannot open the driver root "{machine.config.driver_root}"',
            'correct "nvidia-container-cli.root" in config.toml',
        )
        return
    try:
        inventory = _discovered(machine, mode, root)
    except GpuRuntimeError as error:
        yield fail(error.message, error.hint or remedies.CHECK_LOG)
        return
    if inventory is None:
        yield _by_files(machine)
        return
    problems = (*inventory.problems, *inventory.driver.problems)
    for problem in problems:
        yield warn(problem, "correct that, if containers need it")
    count = len(inventory.driver.libraries) + len(inventory.driver.files)
    what = f"{inventory.decision}; {count} file{'' if count == 1 else 's'}"
    yield Note(OK, what, is_context=True)


def _discovered(machine: ExaminedMachine, mode: str, root: DriverRoot) -> Inventory | None:
    """Return the inventory of the platform; None if only the host itself could return it.

    Raises GpuRuntimeError.
    """
    dev = DevRoot(machine.path(posixpath.dirname(machine.dev())))
    try:
        marks = platforms.marks(root, dev)
        if mode == CSV:
            return tegra.discover(
                root,
                dev,
                tegra.CsvOptions(directory=machine.config[_CSV_FILES]),
                answer=None,
                decision=platforms.tegra_decision(settings.AUTO, marks, None)
                or "the platform is Tegra: the module nvidia lists an integrated GPU",
            )
        # libdxcore of another machine must not be loaded.
        if machine.is_live or not marks.dxcore:
            return wsl.discover(root, dev, marks, _DEADLINE_S)
        return None
    finally:
        dev.close()


def _by_files(machine: ExaminedMachine) -> Note:
    """Return the note about a WSL that is a tree of files."""
    stores = [f"{platforms.WSL_DRIVERS}/{name}" for name in machine.names(platforms.WSL_DRIVERS)]
    if any(machine.exists(f"{store}/{wsl.CUDA}") for store in stores):
        return ok(f'WSL with "{platforms.DXG}" and a driver store of NVIDIA')
    return fail(
        f'WSL has "{platforms.DXG}", but no NVIDIA adapter: the NVIDIA driver is not in '
        f'"{platforms.WSL_DRIVERS}"',
        "install the NVIDIA driver on Windows",
    )


def needs_module(machine: ExaminedMachine) -> bool:
    """Return whether the GPUs of the host need the module nvidia and the library NVML."""
    return mode_of(machine) == NVML


def without_module(machine: ExaminedMachine) -> str:
    """Return the sentence that the platform of *machine* needs no module nvidia."""
    name = platforms.BY_MODE[mode_of(machine)].name
    return f"the platform is {name}, which needs no module nvidia and no {search_paths.NVML_NAME}"
