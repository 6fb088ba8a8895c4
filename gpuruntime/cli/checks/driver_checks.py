# SPDX-License-Identifier: Apache-2.0
"""Checks of the driver: kind of machine, module, user space, NVML's answer, daemons."""

from __future__ import annotations

import posixpath
import re
import stat
import time
from collections.abc import Iterable, Iterator

from gpuruntime.cli.checks import elf_files, processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine, RootCandidate
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.discover import nvml, search_paths, user_space, user_space_version
from gpuruntime.discover.root import Directory, DriverRoot
from gpuruntime.errors import GpuRuntimeError, LdcacheError
from gpuruntime.formats import driver_version, ldcache_merge

MODULE = user_space_version.MODULE
GPUS = "/proc/driver/nvidia/gpus"
# As long as this, a container may wait for the driver; longer, and its user notices.
SLOW_S = 2.0
# Before the deadline of all checks, so that the answer can still be told.
ANSWER_S = 12.0
_PCI = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY, _BRIDGE = "0x03", "0x0680"
_ROOT_KEY = "nvidia-container-cli.root"
_SMI = "nvidia-smi"
_LOOK = 'look for NVRM and Xid lines in "dmesg"'
# A daemon: its socket below /run, its program, the name of its service.
_DAEMONS = (
    ("nvidia-persistenced/socket", "nvidia-persistenced", "nvidia-persistenced"),
    ("nvidia-fabricmanager/socket", "nv-fabricmanager", "nvidia-fabricmanager"),
)


def loaded(machine: ExaminedMachine) -> str:
    """Return the version of the loaded module, "" if there is none."""
    return driver_version.of_module_text(machine.read(MODULE) or "")


def on_bus(machine: ExaminedMachine, kind: str = _DISPLAY) -> dict[str, str]:
    """Return the bus ids of NVIDIA's devices of *kind* and the kernel drivers that have them."""
    found = {}
    for bus_id in machine.names(_PCI):
        device = f"{_PCI}/{bus_id}"
        if (machine.read(f"{device}/vendor") or "").strip() == _NVIDIA and (
            machine.read(f"{device}/class") or ""
        ).startswith(kind):
            found[bus_id] = posixpath.basename(machine.link(f"{device}/driver") or "")
    return found


def platform(machine: ExaminedMachine) -> Iterator[Note]:
    """Say what is to be known of a machine whose GPUs are not those of NVML and nodes."""
    release = (machine.read("/proc/sys/kernel/osrelease") or "").strip()
    if "microsoft" in release.lower():
        yield _wsl(machine, release)
        return
    family = (machine.read("/sys/devices/soc0/family") or "").lower()
    if machine.exists("/etc/nv_tegra_release") or family.startswith("tegra"):
        yield fail(
            'this is a Tegra: the discovery mode "csv" that it may need is not there yet',
            'generate its spec with "nvidia-ctk cdi generate --mode csv"',
        )
        return
    yield ok(f"Linux {release}")


def _wsl(machine: ExaminedMachine, release: str) -> Note:
    if not machine.exists("/dev/dxg"):
        if "wsl2" in release.lower():
            return fail(
                'WSL without "/dev/dxg": Windows has no GPU for it, or no driver that knows WSL',
                'install NVIDIA\'s driver on Windows, then run "wsl --update" there',
            )
        return fail(
            'this is WSL 1, without "/dev/dxg": it has no GPUs',
            'run "wsl --set-version" there to make it WSL 2',
        )
    store = [*machine.names("/usr/lib/wsl/drivers"), *machine.names("/usr/lib/wsl/lib")]
    if not any(name.startswith(("nv", "libcuda")) for name in store):
        return fail(
            'WSL has "/dev/dxg", but no adapter of NVIDIA: its driver is not in '
            '"/usr/lib/wsl/drivers"',
            "install NVIDIA's driver on Windows",
        )
    return fail(
        'this is WSL with a GPU: the discovery mode "wsl" that it needs is not there yet',
        'generate its spec with "nvidia-ctk cdi generate --mode wsl"',
    )


def module(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the driver's modules are loaded, and if not, why."""
    found = loaded(machine)
    majors = machine.read("/proc/devices") or ""
    gpus = on_bus(machine)
    if found:
        if not re.search(r"^ *\d+ nvidia-uvm$", majors, re.MULTILINE):
            yield fail(
                f"driver {found} is loaded, but not its module nvidia-uvm: CUDA finds no GPU",
                'run "gpuruntime system create-device-nodes --control-devices '
                '--load-kernel-modules"',
            )
            return
        others = {name for name in gpus.values() if name not in ("nvidia", "")}
        if others:
            taken = sum(name in others for name in gpus.values())
            yield warn(
                f"driver {found} is loaded; {taken} of {len(gpus)} GPUs belong to "
                f"{', '.join(sorted(others))}",
                "give them back to the driver nvidia if containers are to have them",
            )
        else:
            yield ok(f"driver {found} is loaded")
        return
    yield _not_loaded(machine, gpus)


def _not_loaded(machine: ExaminedMachine, gpus: dict[str, str]) -> Note:
    if not gpus:
        return fail(
            "no driver is loaded, and there is no NVIDIA GPU on the PCI bus: containers that ask "
            "for one do not start",
            'set "missing-gpu" to "warn" in config.toml to let them start without',
        )
    others = sorted({name for name in gpus.values() if name})
    if "nouveau" in others:
        return fail(
            f"no driver of NVIDIA is loaded: nouveau has {len(gpus)} GPU(s)",
            "keep nouveau from loading, and reboot",
        )
    release = (machine.read("/proc/sys/kernel/osrelease") or "").strip()
    listed = machine.read(f"/lib/modules/{release}/modules.dep", 32 << 20) or ""
    if re.search(r"/nvidia(-current)?\.ko", listed):
        return fail(
            f"no driver is loaded, although kernel {release} has the module",
            'run "modprobe nvidia-uvm", and look into "dmesg" if that fails',
        )
    return fail(
        f"no driver is loaded, and kernel {release} has no module nvidia, for {len(gpus)} GPU(s)",
        "install the driver, or build its module for this kernel",
    )


def versions(machine: ExaminedMachine) -> Iterator[Note]:
    """Compare the module with the libraries, and those with each other."""
    module_version = loaded(machine)
    root = machine.driver_root().open()
    there = user_space_version.installed(_directories(root)) if root else []
    if not there:
        yield ok("no libraries to compare with the module")
        return
    if not module_version:
        yield ok(f"libraries of {', '.join(there)}; no module to compare them with")
        return
    if module_version not in there:
        yield fail(
            f"driver {module_version} is loaded, but the libraries are of {', '.join(there)}",
            "reboot, or reload the driver's modules",
        )
    elif there[0] != module_version:
        yield fail(
            f"driver {module_version} is loaded, but programs are linked to libraries of "
            f"{there[0]}",
            "reboot, or reload the driver's modules",
        )
    else:
        yield ok(f"module and libraries are of {module_version}")


def _directories(root: DriverRoot) -> list[Directory]:
    return search_paths.libraries(root, (), search_paths.native_abi())


def libraries(machine: ExaminedMachine) -> Iterator[Note]:
    """Look for the driver's libraries below the driver root, and if not there, elsewhere."""
    place = machine.driver_root()
    root = place.open()
    if root is not None and _has_nvml(root):
        yield ok(f'libraries below the driver root "{place.path}"')
        return
    elsewhere = _elsewhere(machine, place)
    searched = [directory.path for directory in _directories(root)] if root else []
    where = f"; directories searched: {', '.join(searched)}" if searched else ""
    what = f'no "{search_paths.NVML_NAME}" below the driver root "{place.path}"{where}'
    if elsewhere:
        yield fail(
            f'{what}; there is one below "{elsewhere}"',
            f'set "{_ROOT_KEY}" to "{elsewhere}" in config.toml',
        )
    else:
        yield fail(what, f'install the driver, or name its directory as "{_ROOT_KEY}"')


def _has_nvml(root: DriverRoot) -> bool:
    return any(search_paths.NVML_NAME in directory.names for directory in _directories(root))


def _elsewhere(machine: ExaminedMachine, place: RootCandidate) -> str:
    for path in user_space.WELL_KNOWN_ROOTS:
        other = RootCandidate(machine, path).open() if path != place.path else None
        if other is not None and _has_nvml(other):
            return path
    return ""


def files(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the libraries are whole, and what goes with them is there, such as Vulkan's."""
    root = machine.driver_root().open()
    if root is None or not _has_nvml(root):
        yield ok("no driver to look for the files of")
        return
    found = user_space.find_driver(root, elsewhere=(), environment=machine.is_live)
    damaged = _damaged(machine, [library.host_path for library in found.libraries])
    for what in damaged:
        yield fail(what, "install the driver again")
    for problem in found.problems:
        yield warn(problem, "install that part of the driver, if containers are to have it")
    if not found.has_program(_SMI):
        yield warn(
            f'there is no "{_SMI}", so containers have none: it was looked for where PATH leads, '
            "and beside the driver's libraries",
            'install it with the driver, in "/usr/bin" or in "bin" beside the libraries',
        )
    elif not damaged and not found.problems:
        yield ok(f"{len(found.libraries)} libraries, {len(found.files)} other files")


def _damaged(machine: ExaminedMachine, paths: Iterable[str]) -> list[str]:
    """Return a sentence for each library of *paths* that is not whole."""
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
    """See whether the loader's cache of the driver root knows the libraries there are."""
    place = machine.driver_root()
    root = place.open()
    data = root.read("/etc/ld.so.cache", search_paths.MAX_CACHE_BYTES) if root else None
    if root is None or not data:
        yield ok("none: the loader's configuration and the usual directories are searched")
        return
    update = 'run "ldconfig"' if place.path == "/" else f'run "ldconfig -r {place.path}"'
    try:
        rows = ldcache_merge.parse(data)
    except LdcacheError as error:
        yield warn(f'"/etc/ld.so.cache" cannot be read: {error.message}', update)
        return
    named = [row[1] for row in rows if row[0] in (search_paths.CUDA_NAME, search_paths.NVML_NAME)]
    gone = [path for path in named if root.locate(path) is None]
    if gone:
        yield warn(f'"/etc/ld.so.cache" has "{gone[0]}", which is gone', update)
    elif not named and _has_nvml(root):
        yield warn("the loader's cache does not know the driver's libraries", update)
    else:
        yield ok(f"{len(named)} of the driver's two main libraries are in it")


def answer(machine: ExaminedMachine) -> Iterator[Note]:
    """Ask the driver for the GPUs, and how long it takes."""
    if not machine.is_live:
        yield ok("not asked: this is a tree of files")
        return
    config = machine.config
    root = machine.driver_root().open()
    if root is None or not _has_nvml(root):
        yield ok("not asked: there are no libraries to ask it with")
        return
    deadline_s = min(float(config["discovery-timeout"]), ANSWER_S)
    began = time.monotonic()
    try:
        found = nvml.query(user_space.find_nvml(root), deadline_s)
    except GpuRuntimeError as error:
        yield fail(error.message, error.hint or _LOOK)
        return
    took = time.monotonic() - began
    for problem in found.problems:
        yield fail(problem, _LOOK)
    held = [bus for bus, name in on_bus(machine).items() if name in ("nvidia", "")]
    if len(found.gpus) < len(held):
        yield fail(
            f"{len(held)} GPU(s) on the PCI bus, and the driver shows {len(found.gpus)}", _LOOK
        )
    elif not found.gpus:
        yield fail("the driver shows no GPU", _LOOK)
    if took > SLOW_S:
        yield warn(
            f"the driver took {took:.1f} s to answer, as it starts the GPUs anew each time",
            'run nvidia-persistenced, or "nvidia-smi -pm 1"',
        )
    count = len(found.gpus)
    yield ok(f"{count} GPU{'' if count == 1 else 's'}, in {took:.1f} s")


def models(machine: ExaminedMachine) -> Iterator[Note]:
    """Say which GPUs there are: engines ask for a number of them, whichever they are."""
    names: dict[str, int] = {}
    for bus_id in machine.names(GPUS):
        text = machine.read(f"{GPUS}/{bus_id}/information") or ""
        found = re.search(r"^Model:\s*(.*\S)", text, re.MULTILINE)
        name = found[1] if found else "of no name"
        names[name] = names.get(name, 0) + 1
    told = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
    if len(names) > 1:
        yield ok(f"{len(names)} models: {told}: a container gets a certain one by its UUID")
    else:
        yield ok(told or "none that the driver shows in /proc")


def sockets(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the driver's daemons listen where their sockets are, and run where needed."""
    told = False
    for name, program, service in _DAEMONS:
        path = f"/run/{name}"
        status = machine.status(path)
        runs = bool(processes.running(machine, program))
        restart = f'run "systemctl restart {service}"'
        if status is None:
            if program == "nv-fabricmanager" and _has_switches(machine) and not runs:
                told = True
                yield fail("there are NVSwitches, and nv-fabricmanager does not run", restart)
            continue
        told = True
        if not stat.S_ISSOCK(status.st_mode):
            yield warn(
                f'"{path}" is no socket: somebody mounted it before {program} ran',
                f'remove it, then run "systemctl restart {service}"',
            )
        elif not (runs or processes.is_held(machine, path)):
            yield warn(f'nobody listens on "{path}", which containers get', restart)
        else:
            yield ok(f'{program} listens on "{path}"')
    if not told:
        yield ok("no nvidia-persistenced, and no NVSwitch that needs nv-fabricmanager")


def _has_switches(machine: ExaminedMachine) -> bool:
    return bool(machine.glob("/dev", "nvidia-nvswitch[0-9]*") or on_bus(machine, _BRIDGE))
