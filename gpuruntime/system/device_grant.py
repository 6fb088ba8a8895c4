# SPDX-License-Identifier: Apache-2.0
"""Let the processes of one cgroup use some devices, after the low-level runtime has set it.

On the start path, for the prestart hook alone, where no runtime of ours has written config.json.
Nothing outlives the hook but the rules: no map, no pin, no process.
"""

from __future__ import annotations

import errno
import os
import posixpath

from gpuruntime.errors import GpuRuntimeError
from gpuruntime.system import bpf, device_program, scope, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuruntime.system.device_program import Device

HINT = 'run "gpuruntime runtime configure --runtime docker --set-as-default", then restart docker'
_ROOT = "/sys/fs/cgroup"
_CGROUP2 = "cgroup2"
_CONTROLLER = "devices"
# linux/magic.h
_CGROUP_MAGIC, _CGROUP2_MAGIC = 0x27E0EB, 0x63677270


class DeviceGrantError(GpuRuntimeError):
    """A cgroup in which a device cannot be allowed, or may not be."""

    phase = "device"


class Cgroup:
    """The cgroup that decides on devices for a container; *close* it.

    *path* is its name in its hierarchy, *version* that of the hierarchy. *scope_path* is the
    cgroup of the scope of systemd that it belongs to, "" if there is none.
    """

    def __init__(self, fd: int, path: str, version: int, scope_path: str) -> None:
        self.path = path
        self._fd = fd
        self._version = version
        self._scope_path = scope_path

    def close(self) -> None:
        """Close the descriptor of its directory."""
        os.close(self._fd)

    def allow(self, devices: Sequence[Device], host: int, deadline_s: float) -> None:
        """Let *devices* be read and written there, and not be made; raise DeviceGrantError.

        *host* is the mount namespace of the host, where systemctl runs for at most *deadline_s*.
        """
        what = ", ".join(f"{kind} {major}:{minor}" for kind, major, minor in devices)
        try:
            if self._version == 1:
                self._tell_systemd(devices, host, deadline_s)
                self._write_rules(devices)
            else:
                before, flags = bpf.attached(self._fd)
                is_told = self._tell_systemd(devices, host, deadline_s)
                # Of a scope above it, systemd has no program there.
                if is_told and self._scope_path == self.path:
                    before = self._settled(before)
                self._extend_programs(devices, before, flags)
        except (OSError, ValueError, scope.ScopeError) as error:
            raise DeviceGrantError(
                f'cannot allow {what} in the cgroup "{self.path}": {error}', HINT
            ) from error

    def _tell_systemd(self, devices: Sequence[Device], host: int, deadline_s: float) -> bool:
        """Have systemd know of the rules where it has some itself; return whether it has."""
        unit = posixpath.basename(self._scope_path)
        return bool(unit) and scope.allow(unit, devices, host, deadline_s)

    def _write_rules(self, devices: Sequence[Device]) -> None:
        """Allow *devices* in a hierarchy of version 1: cgroup-v1/devices.rst."""
        fd = os.open("devices.allow", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            for kind, major, minor in devices:
                # One rule a write.
                os.write(fd, f"{kind} {major}:{minor} rw".encode())
        except OSError as error:
            why = f"devices.allow: {error.strerror}"
            if error.errno == errno.EPERM:
                why += "; the cgroup above it does not allow them either"
            raise ValueError(why) from error
        finally:
            os.close(fd)

    def _settled(self, before: list[int]) -> list[int]:
        """Return those of *before* that are attached when systemd has replaced its own.

        What it has attached has the rules, and it could not detach another in its place.
        """
        now = before
        for _ in scope.rounds():
            now, _ = bpf.attached(self._fd)
            if now != before:
                break
        return [number for number in now if number in before]

    def _extend_programs(self, devices: Sequence[Device], numbers: list[int], flags: int) -> None:
        """Put rules for *devices* in front of each program with an id of *numbers*.

        Every one of them has to allow a device. *flags* are those of attachment.
        """
        for number in numbers:
            try:
                self._extend(number, flags, devices)
            except OSError as error:
                # By now systemd may have taken its own away.
                if error.errno != errno.ENOENT or not self._scope_path:
                    raise

    def _extend(self, number: int, flags: int, devices: Sequence[Device]) -> None:
        """Put the program with the id *number* behind rules for *devices*."""
        old = bpf.open_program(number)
        try:
            code = bpf.instructions(old)
            try:
                extended = device_program.with_rules(code, devices)
            except ValueError as error:
                raise ValueError(
                    f"the device program that is attached there cannot be extended: {error}"
                ) from None
            if extended == code:
                return
            new = bpf.load(extended)
            try:
                bpf.replace(self._fd, flags, old, new)
            finally:
                os.close(new)
        finally:
            os.close(old)


def cgroup_of(pid: int) -> Cgroup:
    """Return the cgroup of the process *pid*, opened; raise DeviceGrantError.

    It is never one that this process is in, or below which this process is: that would be the
    engine's. The caller has to make sure that *pid* is still the process that it means.
    """
    try:
        return _open(pid)
    except (OSError, ValueError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename:
            why = f'"{error.filename}": {error.strerror}'
        raise DeviceGrantError(
            f"cannot allow devices in the container's cgroup: {why}", HINT
        ) from error


def _open(pid: int) -> Cgroup:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        version, root, point = hierarchy(lines)
    path, own = (_path_in(version, process) for process in (str(pid), "self"))
    scope_path = scope.path_of(path)
    if _is_within(own, scope_path or path):
        raise ValueError(f'the engine is in "{scope_path or path}" as well')
    if not _is_within(path, root) or "/../" in f"{path}/":
        raise ValueError(f'what is mounted on "{point}" does not show "{path}"')
    place = point + (path if root == "/" else path[len(root) :])
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if syscalls.kind_of(fd) != (_CGROUP_MAGIC, _CGROUP2_MAGIC)[version - 1]:
        os.close(fd)
        raise ValueError(f'"{place}" is no cgroup of version {version}')
    return Cgroup(fd, path, version, scope_path)


def _is_within(path: str, above: str) -> bool:
    """Return whether the cgroup *path* is *above*, or below that."""
    return f"{path}/".startswith(f"{above.rstrip('/')}/")


def hierarchy(mountinfo: Iterable[str]) -> tuple[int, str, str]:
    """Return version, root and mount point of what decides on devices; raise ValueError.

    What is mounted counts, as for the low-level runtimes: the kernel lists hierarchies of both
    versions for each process, whether they are used or not. *mountinfo*: proc(5).
    """
    found: tuple[int, str, str] | None = None
    for line in mountinfo:
        front, _, back = line.partition(" - ")
        root, point = map(_unescaped, front.split(" ")[3:5])
        kind, _, options = back.rstrip("\n").split(" ", 2)
        if point == _ROOT:
            # It covers what was mounted there before.
            found = (2, root, point) if kind == _CGROUP2 else None
        elif kind == "cgroup" and _CONTROLLER in options.split(","):
            found = found or (1, root, point)
    if found is None:
        raise ValueError(
            f'neither is cgroup2 mounted on "{_ROOT}", nor a hierarchy with the controller devices'
        )
    return found


def _unescaped(text: str) -> str:
    r"""Return *text* of mountinfo, where \040 is a space."""
    for character in " \t\n\\":
        text = text.replace(f"\\{ord(character):03o}", character)
    return text


def _path_in(version: int, process: str) -> str:
    """Return the path of the cgroup that *process* is in; raise ValueError."""
    with open(f"/proc/{process}/cgroup", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if (controllers == "") if version == 2 else (_CONTROLLER in controllers.split(",")):
                return path
    raise ValueError(f"process {process} is in none of version {version}")
