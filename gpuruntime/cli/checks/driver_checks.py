# SPDX-License-Identifier: Apache-2.0
"""Checks of the driver: module, user space, NVML's answer, daemons."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Iterable, Iterator

from gpuruntime import remedies
from gpuruntime.cli.checks import elf_files, platform_checks, processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine, RootCandidate
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.discover import distributions, nvml, search_paths, user_space, user_space_version
from gpuruntime.discover.root import Directory, DriverRoot
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.formats import driver_version, ldcache_merge
from gpuruntime.model import SMI

MODULE = user_space_version.MODULE
# Users notice if a container start waits longer than this for the driver.
SLOW_S = 2.0
# Less than the deadline of a check, so that the error can still be reported.
ANSWER_S = 12.0
# A daemon: its socket below /run, its program, the name of its service.
_DAEMONS = (
    ("nvidia-persistenced/socket", "nvidia-persistenced", "nvidia-persistenced"),
    ("nvidia-fabricmanager/socket", "nv-fabricmanager", "nvidia-fabricmanager"),
)


def loaded(machine: ExaminedMachine) -> str:
    """Return the version of the loaded module, "" if there is none."""
    return driver_version.of_module_text(machine.read(MODULE) or "")


def module(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the driver's modules are loaded, and if not, why."""
    version = loaded(machine)
    root = machine.config.driver_root
    if not platform_checks.needs_module(machine):
        yield ok(platform_checks.without_module(machine))
        return
    if not version:
        yield fail(*remedies.unloaded_module(machine, root))
        return
    majors = machine.read("/proc/devices") or ""
    if not re.search(r"^ *\d+ nvidia-uvm$", majors, re.MULTILINE):
        yield fail(
            f"driver {version} is loaded without its module nvidia-uvm: CUDA finds no GPU",
            remedies.create_nodes(root),
        )
        return
    gpus = remedies.drivers_on_bus(machine)
    others = sorted({name for name in gpus.values() if name not in ("nvidia", "")})
    if others:
        count = sum(name in others for name in gpus.values())
        yield warn(
            f"driver {version} is loaded; {count} of {len(gpus)} GPUs belong to "
            f"{', '.join(others)}",
            remedies.other_kernel_driver(others[0]),
        )
    else:
        yield ok(f"driver {version} is loaded")


def library_versions(machine: ExaminedMachine) -> list[str]:
    """Return the versions of the driver's libraries, first the one that the symlinks lead to."""
    root = machine.driver_root().open()
    return user_space_version.installed(_directories(root)) if root else []


def versions(machine: ExaminedMachine) -> Iterator[Note]:
    """Compare the version of the module with the version of the libraries in use."""
    module_version = loaded(machine)
    installed = library_versions(machine)
    if not installed:
        yield ok("no libraries to compare with the module")
    elif not module_version:
        yield ok(f"libraries of {', '.join(installed)}; no module to compare them with")
    elif module_version not in installed:
        yield fail(
            f"driver {module_version} is loaded, but the libraries are of {', '.join(installed)}",
            remedies.version_mismatch(machine, module_version, installed[0]),
        )
    elif installed[0] != module_version:
        # Discovery takes the libraries of the module's version: containers work.
        yield warn(
            f"driver {module_version} is loaded, but programs of the host are linked to the "
            f"libraries of {installed[0]}",
            remedies.other_libraries(machine, installed[0]),
        )
    else:
        yield ok(f"module and libraries are of {module_version}")


def _directories(root: DriverRoot) -> list[Directory]:
    return search_paths.libraries(root, (), search_paths.native_abi())


def libraries(machine: ExaminedMachine) -> Iterator[Note]:
    """Look for the driver's libraries below the driver root, else below other directories."""
    if not platform_checks.needs_module(machine):
        yield ok(platform_checks.without_module(machine))
        return
    candidate = machine.driver_root()
    root = candidate.open()
    if root is not None and _has_nvml(root):
        yield ok(f'libraries below the driver root "{candidate.path}"')
        return
    other_root = _other_root(machine, candidate)
    if not (other_root or loaded(machine) or remedies.drivers_on_bus(machine)):
        yield ok("no driver, and no GPU that needs one")
        return
    searched = [directory.path for directory in _directories(root)] if root else []
    where = f"; directories searched: {', '.join(searched)}" if searched else ""
    what = f'no "{search_paths.NVML_NAME}" below the driver root "{candidate.path}"{where}'
    if other_root:
        yield fail(
            f'{what}; there is one below "{other_root}"', remedies.other_driver_root(other_root)
        )
    else:
        row = distributions.of_host(machine.read, machine.exists)
        hint = remedies.missing_libraries(machine, loaded(machine), candidate.path)
        yield fail(what, row.install if row and row.install else hint)


def _has_nvml(root: DriverRoot) -> bool:
    return any(search_paths.NVML_NAME in directory.names for directory in _directories(root))


def _other_root(machine: ExaminedMachine, candidate: RootCandidate) -> str:
    for path in user_space.WELL_KNOWN_ROOTS:
        other = RootCandidate(machine, path).open() if path != candidate.path else None
        if other is not None and _has_nvml(other):
            return path
    return ""


def files(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the libraries are complete, and whether related files exist."""
    root = machine.driver_root().open()
    if root is None or not _has_nvml(root):
        yield ok("no driver whose files could be checked")
        return
    if not platform_checks.needs_module(machine):
        yield ok(platform_checks.without_module(machine))
        return
    driver = user_space.find_driver(root, elsewhere=(), environment=machine.is_live)
    damaged = _damaged(machine, [library.host_path for library in driver.libraries])
    for what in damaged:
        yield fail(what, remedies.REINSTALL_DRIVER)
    for problem in driver.problems:
        yield warn(problem, "install that part of the driver, if containers need it")
    if driver.missing_program:
        yield warn(driver.missing_program, f"install the package of the driver that has {SMI}")
    elif not damaged and not driver.problems:
        yield ok(f"{len(driver.libraries)} libraries, {len(driver.files)} other files")


def _damaged(machine: ExaminedMachine, paths: Iterable[str]) -> list[str]:
    """Return a sentence for each damaged or truncated library of *paths*."""
    sentences = []
    for path in paths:
        file = machine.open(path if machine.is_live else path.removeprefix(machine.root))
        if file is None:
            continue
        with file:
            what = elf_files.damage(file)
        if what:
            sentences.append(f'"{path}" {what}')
    return sentences


def loader_cache(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the loader cache of the driver root lists the installed libraries."""
    candidate = machine.driver_root()
    root = candidate.open()
    update = 'run "ldconfig"' if candidate.path == "/" else f'run "ldconfig -r {candidate.path}"'
    fault = search_paths.cache_fault(root) if root else ""
    if fault:
        yield warn(fault, update)
        return
    data = root.read("/etc/ld.so.cache", search_paths.MAX_CACHE_BYTES) if root else None
    if root is None or data is None:
        yield ok("no loader cache: the loader's directories are searched")
        return
    rows = ldcache_merge.parse(data)
    paths = [row[1] for row in rows if row[0] in (search_paths.CUDA_NAME, search_paths.NVML_NAME)]
    missing = [path for path in paths if root.locate(path) is None]
    if missing:
        yield warn(f'"/etc/ld.so.cache" lists "{missing[0]}", which does not exist', update)
    elif not paths and _has_nvml(root):
        yield warn('"/etc/ld.so.cache" does not list the driver\'s libraries', update)
    else:
        yield ok(f"it lists {len(paths)} files of libcuda and NVML")


def answer(machine: ExaminedMachine) -> Iterator[Note]:
    """Query NVML for the GPUs, and measure how long that takes."""
    if not machine.is_live:
        yield ok("not queried: this is a tree of files")
        return
    if not platform_checks.needs_module(machine):
        yield ok(platform_checks.without_module(machine))
        return
    config = machine.config
    root = machine.driver_root().open()
    if root is None or not _has_nvml(root):
        yield ok("not queried: there is no NVML")
        return
    deadline_s = min(float(config["discovery-timeout"]), ANSWER_S)
    began = time.monotonic()
    try:
        reply = nvml.query(user_space.find_nvml(root), deadline_s)
    except GpuRuntimeError as error:
        yield fail(error.message, error.hint or remedies.CHECK_LOG)
        return
    duration = time.monotonic() - began
    for problem in reply.problems:
        yield fail(problem, remedies.RESET_GPU)
    drivers = remedies.drivers_on_bus(machine).values()
    expected, count = sum(name in ("nvidia", "") for name in drivers), len(reply.gpus)
    if count < expected:
        yield fail(
            f"{expected} GPU(s) are on the PCI bus, and NVML reports {count}", remedies.RESET_GPU
        )
    elif not count:
        yield fail("NVML reports no GPU", remedies.CHECK_LOG)
    if duration > SLOW_S:
        yield warn(
            f"NVML took {duration:.1f} s to respond: the driver initializes the GPUs each time",
            'run "systemctl enable --now nvidia-persistenced"',
        )
    yield ok(f"{count} GPU{'' if count == 1 else 's'}, in {duration:.1f} s")


def models(machine: ExaminedMachine) -> Iterator[Note]:
    """Report the GPU models: an engine requests a number of GPUs, whatever the model."""
    names: dict[str, int] = {}
    for model in platform_checks.gpu_models(machine):
        name = model or "without a name"
        names[name] = names.get(name, 0) + 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
    if len(names) > 1:
        yield ok(f"{len(names)} models: {counts}: request a certain one by its UUID")
    else:
        yield ok(counts or "the driver lists none in /proc")


def sockets(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the driver's daemons listen on their sockets, and run where needed."""
    has_socket = False
    for name, program, service in _DAEMONS:
        path = f"/run/{name}"
        status = machine.status(path)
        runs = bool(processes.running(machine, program))
        restart = f'run "systemctl restart {service}"'
        if status is None:
            # The check "fabric" reports a fabric manager that does not run.
            continue
        has_socket = True
        if not stat.S_ISSOCK(status.st_mode):
            yield warn(
                f'"{path}" is not a socket: a container mounted it before {program} ran',
                f'remove it, then run "systemctl restart {service}"',
            )
        elif not (runs or processes.is_held(machine, path)):
            yield warn(f'no process listens on "{path}", which containers get', restart)
        else:
            yield ok(f'{program} listens on "{path}"')
    if not has_socket:
        yield ok("no socket of nvidia-persistenced or nv-fabricmanager")
