# SPDX-License-Identifier: Apache-2.0
"""The private mount namespace in which this machine looks like a GPU host.

Everything lives on one tmpfs that only this namespace mounts: when the last process in it ends,
however it ends, the kernel takes all of it away. The machine's own /dev, /etc and /usr are read
and never written, its /run is not seen.
"""

from __future__ import annotations

import ctypes
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cgroups
import kernelside
import symbols
from artefacts import BUILD, LIBRARY_DIRECTORY, SimhostError

# Numbers of mount(2), umount2(2), unshare(2) and prctl(2).
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1

# Directories and nodes of which the simulated host has its own, if any.
SIMULATED = ("dri", "gdrdrv", "infiniband")
STATE = Path("/run/simhost")
LAUNCHER = BUILD.parent / "launcher"
WATCHED = BUILD.parent / "watched" / "launcher"

_libc = ctypes.CDLL(None, use_errno=True)


class Driver(NamedTuple):
    """The driver's files: a driver root (`usr/…`), and whether it is kept apart from /."""

    tree: Path
    nvml: Path
    smi: Path
    separate: bool


class Entered(NamedTuple):
    """Where things are, inside."""

    root: Path
    conf: Path


def unshare(flags: int) -> None:
    """Leave the namespaces that *flags* name (man 2 unshare)."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def die_with_parent(signal_number: int) -> None:
    """Have this process sent *signal_number* when its parent ends: prctl(PR_SET_PDEATHSIG)."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal_number), "prctl(PR_SET_PDEATHSIG)")


def mount(
    source: Path | str, target: Path | str, kind: str, flags: int = 0, data: str = ""
) -> None:
    """Mount *source* on *target* (man 2 mount)."""
    words = [os.fsencode(word) for word in (str(source), str(target), kind, data)]
    status = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(status, f'mount("{source}", "{target}", "{kind}", {flags:#x}, "{data}")')


def unmount(target: Path | str, flags: int = 0) -> None:
    """Take the topmost mount off *target* (man 2 umount)."""
    _check(_libc.umount2(os.fsencode(target), flags), f'umount2("{target}", {flags})')


def bind(source: Path | str, target: Path | str) -> None:
    """Bind *source* with all that is mounted below it on *target*."""
    mount(source, target, "", MS_BIND | MS_REC)


def enter(
    host: kernelside.Host,
    driver: Driver,
    groups: list[cgroups.Hierarchy],
) -> Entered:
    """Give this process namespaces of its own that look like *host* and return where things are.

    To be called as the first process of a PID namespace.
    """
    cwd = os.getcwd()
    cgroups.join(groups)
    unshare(CLONE_NEWNS | CLONE_NEWCGROUP)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount_cgroups(groups)
    mount("proc", "/proc", "proc")
    mountpoint = BUILD / "mnt"
    mountpoint.mkdir(parents=True, exist_ok=True)
    mount("simhost", mountpoint, "tmpfs", 0, "mode=755")
    _write_state(host, mountpoint)
    own_run()
    STATE.mkdir()
    mount(mountpoint, STATE, "", MS_MOVE)
    _show_dev(host)
    _show_proc_and_sys()
    root = _install(driver)
    for directory in ("/run/gpuruntime", "/etc/cdi", "/run/cdi"):
        os.makedirs(directory, exist_ok=True)
        mount("tmpfs", directory, "tmpfs", 0, "mode=755")
    conf = _replace_nvml(root, driver, host.faults_named("nosymbol"))
    conf.write_text(kernelside.nvml_conf(host))
    _watch_launcher()
    os.chdir(cwd)
    return Entered(root, conf)


def _watch_launcher() -> None:
    """Have the launcher that tests watch in place of the tree's, where it was built (../watched).

    `SIMHOST_WATCHED=off` keeps the other one: of a benchmark, for example.
    """
    if WATCHED.exists() and LAUNCHER.exists() and os.environ.get("SIMHOST_WATCHED") != "off":
        bind(WATCHED, LAUNCHER)


def mount_cgroups(groups: list[cgroups.Hierarchy]) -> None:
    """Mount the hierarchies so that they start at our groups, on a tmpfs as private as they are.

    Engines make directories in that tmpfs too, where a hierarchy has been unmounted.
    """
    if not groups:
        return
    top = cgroups.TOP
    links = {e.name: os.readlink(e.path) for e in os.scandir(top) if e.is_symlink()}
    unmount(top, MNT_DETACH)
    if all(hierarchy.point != top for hierarchy in groups):
        mount("tmpfs", top, "tmpfs", 0, "mode=755")
    for hierarchy in groups:
        hierarchy.point.mkdir(parents=True, exist_ok=True)
        mount(hierarchy.kind, hierarchy.point, hierarchy.kind, 0, hierarchy.data)
    for name, target in links.items():
        (top / name).symlink_to(target)
    cgroups.settle(groups)


def _install(driver: Driver) -> Path:
    """Show the driver's files, known to the loader, and return the driver root."""
    if driver.separate:
        root = STATE / "root"
        root.mkdir()
        overlay(STATE / "root-layer", [driver.tree], root)
        (root / "etc").mkdir(exist_ok=True)
        (root / "etc/ld.so.conf").write_text(f"/{LIBRARY_DIRECTORY}\n")
        overlay(STATE / "etc", [Path("/etc")], Path("/etc"))
    else:
        root = Path("/")
        for name in ("usr", "etc"):
            lowers = [root / name]
            if (driver.tree / name).is_dir():
                lowers.insert(0, driver.tree / name)
            overlay(STATE / name, lowers, root / name)
        _hide_other_drivers(driver.tree)
    _make_loader_cache(root, driver.tree)
    return root


def _hide_other_drivers(tree: Path) -> None:
    """Hide the libraries of a driver that the machine itself has: ldconfig prefers the newest."""
    libraries = Path("/") / LIBRARY_DIRECTORY
    for cuda in libraries.glob("libcuda.so.*.*"):
        if not list(tree.glob(f"**/{cuda.name}")):
            for other in libraries.glob(f"*.so.{cuda.name.removeprefix('libcuda.so.')}"):
                other.unlink()


def _replace_nvml(root: Path, driver: Driver, missing: Sequence[str]) -> Path:
    """Put the fake NVML, and the nvidia-smi that knows it, where *root* has the real ones.

    The functions *missing* are not in it. Returns the path of the file that the fake NVML reads.
    The tree below is not touched: these are the first writes to the overlay.
    """
    library = (root / LIBRARY_DIRECTORY / "libnvidia-ml.so.1").resolve(strict=True)
    for new, old in (
        (driver.nvml, library),
        (driver.smi, (root / "usr/bin/nvidia-smi").resolve()),
    ):
        old.unlink(missing_ok=True)
        old.write_bytes(new.read_bytes())
        old.chmod(stat.S_IMODE(new.stat().st_mode))
    try:
        library.write_bytes(symbols.without(library.read_bytes(), missing))
    except ValueError as error:
        raise SimhostError(str(error)) from None
    return library.with_name("fakenvml.conf")


def _write_state(host: kernelside.Host, state: Path) -> None:
    kernelside.write_proc_driver(host, state / "proc-driver")
    machine = Path("/proc/devices").read_text(encoding="ascii")
    (state / "proc-devices").write_text(kernelside.proc_devices(host, machine))
    kernelside.write_pci_devices(host, state / "pci-devices")


def overlay(layer: Path, lowers: Sequence[Path], target: Path) -> None:
    """Mount an overlay of *lowers* on *target*, of which writes go to *layer*.

    What is mounted below *target* is not part of a lower directory: it is bound again.
    """
    upper = layer / "upper"
    work = layer / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    top = target.stat()
    upper.chmod(stat.S_IMODE(top.st_mode))
    below = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in mounts_below(target)]
    chain = ":".join(_escaped(lower) for lower in lowers)
    mount(
        "overlay",
        target,
        "overlay",
        0,
        f"lowerdir={chain},upperdir={_escaped(upper)},workdir={_escaped(work)}",
    )
    for path, descriptor in below:
        bind(f"/proc/self/fd/{descriptor}", path)
        os.close(descriptor)


def _escaped(path: Path) -> str:
    """Return *path* as an overlayfs option value, where `:` and `,` divide."""
    text = str(path).replace("\\", "\\\\")
    return text.replace(":", "\\:").replace(",", "\\,")


def mounts_below(directory: Path) -> list[Path]:
    """Return the mount points below *directory*, without those below another of them."""
    points: list[Path] = []
    start = str(directory).rstrip("/") + "/"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        field = line.split(" ")[4].encode("ascii", "surrogateescape")
        point = os.fsdecode(field.decode("unicode_escape").encode("latin-1"))
        if point.startswith(start) and point != start:
            points.append(Path(point))
    return sorted({p for p in points if not any(q in p.parents for q in points)})


def own_run() -> None:
    """Mount a /run of this namespace's own: the machine's sockets and states are not seen in it.

    Where the machine keeps its resolv.conf in there, that file stays.
    """
    resolver = Path("/etc/resolv.conf").resolve()
    content = resolver.read_bytes() if Path("/run") in resolver.parents else None
    mount("run", "/run", "tmpfs", 0, "mode=755")
    lock = Path("/run/lock")
    lock.mkdir()
    lock.chmod(0o1777)
    if content is not None:
        resolver.parent.mkdir(parents=True, exist_ok=True)
        resolver.write_bytes(content)
    if not os.path.samefile("/run", "/var/run"):
        bind("/run", "/var/run")


def _show_dev(host: kernelside.Host) -> None:
    """Mount a /dev with copies of the machine's nodes, without GPU nodes, and with *host*'s."""
    dev = STATE / "dev"
    copy_dev(dev)
    kernelside.make_nodes(host, dev)
    mount(dev, "/dev", "", MS_MOVE)


def copy_dev(dev: Path) -> None:
    """Mount at *dev* a file system with copies of the machine's nodes, without GPU nodes."""
    dev.mkdir()
    mount("simhost-dev", dev, "tmpfs", 0, "mode=755")
    machine = Path("/dev")
    mounted = mounts_below(machine)
    _copy_nodes(machine, dev, mounted)
    for point in mounted:
        target = dev / point.relative_to(machine)
        target.parent.mkdir(parents=True, exist_ok=True)
        if point.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        # Engines keep locks in shm: they shall not stay on the machine.
        if point == machine / "shm":
            mount("shm", target, "tmpfs", 0, "mode=1777")
        else:
            bind(point, target)


def _copy_nodes(source: Path, target: Path, mounted: Sequence[Path]) -> None:
    for entry in os.scandir(source):
        path = Path(entry.path)
        if path in mounted or entry.name.startswith("nvidia") or entry.name in SIMULATED:
            continue
        copy = target / entry.name
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            copy.symlink_to(os.readlink(path))
            continue
        if stat.S_ISDIR(status.st_mode):
            copy.mkdir()
            _copy_nodes(path, copy, mounted)
        elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            os.mknod(copy, status.st_mode, status.st_rdev)
        else:
            continue
        os.chown(copy, status.st_uid, status.st_gid)
        copy.chmod(stat.S_IMODE(status.st_mode))


def _show_proc_and_sys() -> None:
    bind(STATE / "proc-driver", "/proc/driver")
    bind(STATE / "proc-devices", "/proc/devices")
    if os.path.isdir("/sys/bus/pci/devices"):
        bind(STATE / "pci-devices", "/sys/bus/pci/devices")
    else:
        bus = STATE / "sys-bus"
        for entry in ("/sys/bus/" + name for name in os.listdir("/sys/bus")):
            (bus / os.path.basename(entry)).mkdir(parents=True)
            bind(entry, bus / os.path.basename(entry))
        (bus / "pci").mkdir(parents=True)
        os.rename(STATE / "pci-devices", bus / "pci/devices")
        bind(bus, "/sys/bus")
    # A container in a user namespace may mount procfs and sysfs only while the namespace it comes
    # from has one of each with nothing mounted inside (mount_namespaces(7)).
    for kind in ("proc", "sysfs"):
        whole = STATE / f"whole-{kind}"
        whole.mkdir()
        mount(kind, whole, kind)


def _make_loader_cache(root: Path, tree: Path) -> None:
    """Have the loader of *root* know the driver in *tree*.

    The tree of a simulated driver does not change, and its name is that of its sources: on a
    machine with the same cache of its own, the cache is the one that ldconfig has written before.
    """
    cache = root / "etc/ld.so.cache"
    machine = cache.read_bytes() if cache.exists() else b""
    kept = BUILD / f"{tree.name}.{zlib.crc32(machine):08x}.ld.so.cache"
    if tree.parent == BUILD and kept.exists():
        cache.unlink(missing_ok=True)
        cache.write_bytes(kept.read_bytes())
        return
    _rebuild_loader_cache(root)
    if tree.parent == BUILD:
        fresh = kept.with_name(f".{kept.name}.{os.urandom(8).hex()}")
        fresh.write_bytes(cache.read_bytes())
        fresh.rename(kept)


def _rebuild_loader_cache(root: Path) -> None:
    """Run ldconfig for *root*; its auxiliary cache belongs to the machine and is kept from it."""
    import subprocess  # noqa: PLC0415 (few starts of a host need it)

    mount("tmpfs", "/var/cache", "tmpfs")
    command = ["/sbin/ldconfig", *([] if root == Path("/") else ["-r", str(root)])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        unmount("/var/cache")
    if done.returncode != 0:
        raise SimhostError(f"{' '.join(command)}: {done.stderr.strip()}")


def _check(status: int, call: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise SimhostError(f"{call}: {os.strerror(number)}")
