# SPDX-License-Identifier: Apache-2.0
"""Open paths below a root that others may change meanwhile: by descriptors, not strings.

On the start path. Every path is resolved with the root as `/`, by openat2(2) with RESOLVE_IN_ROOT
where the kernel has it and by a walk of O_NOFOLLOW steps where it does not. The result of a
resolution is used by its descriptor; the string is never looked up a second time.
gpuruntime.system.replace writes into the directories that are opened here.
"""

from __future__ import annotations

import _stat as stat
import errno
import posix as os
import time

from cdi.pathnames import dirname
from gpuruntime.system import syscalls
from gpuruntime.system.syscalls import SyscallError

MAX_LINKS = 40
MAX_TRIES = 128
MAX_INFO_BYTES = 4096
# A container may allow few descriptors.
MAX_DIRECTORIES = 16
# What a path answers that leads to nothing inside the container. In a user namespace, a process of
# others in /proc refuses to be followed: EACCES.
LEADS_NOWHERE = (*(errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES),)
_O_PATH = os.O_PATH | os.O_CLOEXEC
# EPERM is what an old seccomp profile answers instead of ENOSYS.
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM)
_OF_PROC = ("self/fd", "self/fdinfo", "self/mountinfo")
# Directories that are links in many an image, and where these lead.
_LINKED = (
    *(("/lib", "/usr/lib"), ("/lib64", "/usr/lib64"), ("/lib64", "/usr/lib")),
    *(("/usr/lib64", "/usr/lib"), ("/bin", "/usr/bin"), ("/sbin", "/usr/sbin")),
    *(("/sbin", "/usr/bin"), ("/usr/sbin", "/usr/bin"), ("/var/run", "/run")),
)
_O_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Root:
    """A directory that stands for `/`; owns its descriptor `fd`."""

    def __init__(self, path: str) -> None:
        """Open *path*, a trusted path on the host that must not itself be a link."""
        self.fd = os.open(path, _O_DIRECTORY)
        self._mount_id = -1
        self._has_openat2 = True
        # Path → descriptor, see `directory`.
        self._directories: dict[str, int] = {}

    def close(self) -> None:
        """Close the descriptors."""
        self.forget("")
        os.close(self.fd)

    def is_host_root(self) -> bool:
        """Return whether this is `/` of the process: never a container's root."""
        host, ours = os.stat("/"), os.fstat(self.fd)
        return (host.st_dev, host.st_ino) == (ours.st_dev, ours.st_ino)

    def open_path(self, path: str) -> int:
        """Return an O_PATH descriptor of what *path* names, links followed inside the root.

        Raises OSError as open(2) does; EAGAIN after many tries against a busy attacker.
        """
        if "\0" in path:
            raise SyscallError(errno.EINVAL, "a path with a NUL byte")
        if not self._has_openat2:
            return self._walk(path)[0]
        flags = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
        try:
            return _openat2(self.fd, path.lstrip("/") or ".", flags)
        except SyscallError as error:
            if error.errno not in _NO_OPENAT2:
                raise
        self._has_openat2 = False
        return self._walk(path)[0]

    def open_name(self, path: str) -> int:
        """Return an O_PATH descriptor of what has the name *path*, a link itself if it is one.

        Links in the directory's path are followed inside the root. Raises OSError as `open_path`.
        """
        directory, _, name = path.rpartition("/")
        place = self.open_path(directory)
        try:
            return os.open(name, _O_PATH | os.O_NOFOLLOW, dir_fd=place)
        finally:
            os.close(place)

    def resolve(self, path: str) -> tuple[int, str]:
        """Return a descriptor as `open_path` does, and the path without links that led there.

        The text is for others to read; to look it up again would be another resolution.
        """
        if "\0" in path:
            raise SyscallError(errno.EINVAL, "a path with a NUL byte")
        return self._walk(path)

    def _walk(self, path: str) -> tuple[int, str]:
        """Resolve *path* one component at a time, as openat2 would; also return where it led."""
        todo = [part for part in path.split("/") if part][::-1]
        must_be_directory = path.endswith(("/", "/."))
        stack = [os.dup(self.fd)]
        names: list[str] = []
        links = 0
        try:
            while todo:
                part = todo.pop()
                if part == ".":
                    _require_directory(stack[-1], path)
                    continue
                if part == "..":
                    _require_directory(stack[-1], path)
                    if len(stack) > 1:
                        os.close(stack.pop())
                        names.pop()
                    continue
                fd = os.open(part, _O_PATH | os.O_NOFOLLOW, dir_fd=stack[-1])
                if not stat.S_ISLNK(os.fstat(fd).st_mode):
                    stack.append(fd)
                    names.append(part)
                    continue
                try:
                    target = os.readlink("", dir_fd=fd)
                finally:
                    os.close(fd)
                links += 1
                if links > MAX_LINKS:
                    raise SyscallError(errno.ELOOP, f'walk("{path}")')
                if target.startswith("/"):
                    names.clear()
                    while len(stack) > 1:
                        os.close(stack.pop())
                if target.endswith("/"):
                    todo.append(".")
                todo += [p for p in target.split("/") if p][::-1]
            if must_be_directory:
                _require_directory(stack[-1], path)
            return stack.pop(), "/" + "/".join(names)
        finally:
            for fd in stack:
                os.close(fd)

    def exists(self, path: str) -> bool:
        """Return whether *path* leads to anything."""
        try:
            os.close(self.open_path(path))
        except OSError:
            return False
        return True

    def open_directory(self, path: str, *, create: bool = False, mode: int = 0o755) -> int:
        """Return a descriptor of the directory *path*, which can be listed.

        With *create* it is what `open_to_write` returns. Raises OSError.
        """
        fd = self.open_to_write(path, mode) if create else self.open_path(path)
        try:
            return open_to_list(fd)
        finally:
            os.close(fd)

    def open_to_write(self, path: str, mode: int = 0o755) -> int:
        """Return an O_PATH descriptor of the directory *path*, made with its parents if missing.

        It is the dirfd of the *at calls, and on no mount that a link led to: see `require_own`.
        Raises OSError.
        """
        try:
            fd = self.open_path(path)
        except OSError as error:
            # Not FileNotFoundError: a SyscallError is none.
            if error.errno != errno.ENOENT:
                raise
            fd = self._create_directory(path, mode)
        try:
            self.require_own(path, fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def directory(self, path: str) -> int:
        """Return what `open_to_write` does, for several names in it: the root keeps it open."""
        fd = self._directories.get(path)
        if fd is None:
            if len(self._directories) == MAX_DIRECTORIES:
                self.forget("")
            fd = self._directories[path] = self.open_to_write(path)
        return fd

    def forget(self, path: str) -> None:
        """Resolve again what is below *path*, which is another by now."""
        for name in [name for name in self._directories if name.startswith(f"{path}/")]:
            os.close(self._directories.pop(name))

    def mount_id(self) -> int:
        """Return which mount the root is in."""
        if self._mount_id < 0:
            self._mount_id = mount_id(self.fd)
        return self._mount_id

    def _create_directory(self, path: str, mode: int) -> int:
        """Make what is missing of *path* and return an O_PATH descriptor of it."""
        names = path.strip("/").split("/")
        if not {"", ".", ".."}.isdisjoint(names):
            raise SyscallError(errno.EINVAL, f'mkdir("{path}")')
        directory = os.dup(self.fd)
        for number, name in enumerate(names, 1):
            parent, current = directory, "/" + "/".join(names[:number])
            try:
                directory = self._open_or_make(parent, current, name, mode)
            finally:
                os.close(parent)
        return directory

    def _open_or_make(self, parent: int, path: str, name: str, mode: int) -> int:
        """Return an O_PATH descriptor of the directory *path*, which is *name* in *parent*."""
        try:
            return self.open_path(path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
        self.require_own(dirname(path), parent)
        try:
            os.mkdir(name, mode, dir_fd=parent)
        except FileExistsError:
            # Somebody else made it, or a dangling link stands there; the next open tells.
            pass
        return os.open(name, _O_DIRECTORY, dir_fd=parent)

    def require_own(self, path: str, fd: int) -> None:
        """Raise OSError (EXDEV) if *fd*, to which *path* led, is on a mount that a link led to.

        A volume is written to where the path that we want is in it; which other one it is to be
        is not for a link in the image to say.
        """
        mount = mount_id(fd)
        if mount != self.mount_id() and mount not in self._mounts_on(path):
            raise SyscallError(errno.EXDEV, f'write to "{path}", a link to another mount')

    def _mounts_on(self, path: str) -> set[int]:
        """Return the mounts that *path*, or another usual name of it, comes to before any link."""
        mounts = set()
        for name in _usual_names(path):
            fd = os.dup(self.fd)
            try:
                for part in filter(None, name.split("/")):
                    if part == "..":
                        break
                    below = os.open(part, _O_DIRECTORY, dir_fd=fd)
                    os.close(fd)
                    fd = below
                    mounts.add(mount_id(fd))
            except OSError:
                # It is missing, or a link.
                pass
            finally:
                os.close(fd)
        return mounts


def _usual_names(path: str) -> list[str]:
    """Return *path*, and what it may be called where directories are links as they often are."""
    names = [path]
    for link, target in _LINKED:
        if f"{path}/".startswith(f"{link}/"):
            names.append(target + path[len(link) :])
    return names


def mount_id(fd: int) -> int:
    """Return which mount *fd* is in: bind mounts of one file system have one device number."""
    number = syscalls.mount_id(fd)
    return _mount_id_in_proc(fd) if number is None else number


def _mount_id_in_proc(fd: int) -> int:
    """Return what `mount_id` does, from /proc: proc(5), fdinfo."""
    info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # One read gives a file of /proc whole.
        lines = os.read(info, MAX_INFO_BYTES).splitlines()
    finally:
        os.close(info)
    return int(next(line for line in lines if line.startswith(b"mnt_id:"))[len(b"mnt_id:") :])


def open_to_list(fd: int) -> int:
    """Return a descriptor of the directory *fd* (O_PATH) that can be listed; raise OSError."""
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)


def _openat2(dirfd: int, path: str, resolve: int) -> int:
    """Return an O_PATH descriptor of *path*; raise SyscallError, EAGAIN after many tries."""
    for _ in range(MAX_TRIES):
        try:
            return syscalls.openat2(dirfd, path, _O_PATH, resolve)
        except SyscallError as error:
            if error.errno != errno.EAGAIN:
                raise
        time.sleep(0.0005)
    raise SyscallError(errno.EAGAIN, f'openat2("{path}")')


def _require_directory(fd: int, path: str) -> None:
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        raise SyscallError(errno.ENOTDIR, f'walk("{path}")')


def require_proc() -> None:
    """Raise OSError unless /proc is the kernel's, and nothing is mounted over what we use of it.

    Descriptors are named by it where there is no other way: behind a name could be anything.
    """
    proc = os.open("/proc", _O_DIRECTORY)
    try:
        if syscalls.kind_of(proc) != syscalls.PROC_SUPER_MAGIC:
            raise SyscallError(errno.EXDEV, 'fstatfs("/proc"), which is not a procfs')
        for name in _OF_PROC:
            try:
                os.close(_openat2(proc, name, syscalls.RESOLVE_NO_XDEV))
            except SyscallError as error:
                if error.errno not in _NO_OPENAT2:
                    raise SyscallError(error.errno or 0, f'open "{name}" of /proc') from error
                # What is mounted there is of another file system, most likely.
                if os.stat(name, dir_fd=proc).st_dev != os.fstat(proc).st_dev:
                    raise SyscallError(errno.EXDEV, f'open "{name}" of /proc') from error
    finally:
        os.close(proc)


def reopen(fd: int, flags: int) -> int:
    """Return a new descriptor of what *fd* (O_PATH) stands for, opened with *flags*."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def read_regular(fd: int, name: str, max_bytes: int) -> bytes:
    """Return the content of the regular file *fd* (O_PATH); *name* is for the error."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SyscallError(errno.EINVAL, f'read("{name}"), which is not a regular file')
    if status.st_size > max_bytes:
        raise SyscallError(errno.EFBIG, f'read("{name}")')
    try:
        reader = reopen(fd, os.O_RDONLY)
    except OSError as error:
        # It has the name of the descriptor, which says nothing.
        raise SyscallError(error.errno or errno.EIO, f'read("{name}")') from error
    try:
        data = b""
        while len(data) <= max_bytes:
            chunk = os.read(reader, max_bytes + 1 - len(data))
            if not chunk:
                return data
            data += chunk
    finally:
        os.close(reader)
    raise SyscallError(errno.EFBIG, f'read("{name}")')


def read_of_image(fd: int, name: str, max_bytes: int) -> bytes:
    """Return what `read_regular` does, for a file that an attacker may have chosen.

    What says that it is empty is not opened: files of the kernel's say so, and may act when read.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        return b""
    return read_regular(fd, name, max_bytes)


def list_names(dirfd: int, limit: int) -> list[str]:
    """Return the names in the directory *dirfd*, sorted; raise OSError for more than *limit*."""
    names = []
    with os.scandir(dirfd) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > limit:
                raise SyscallError(errno.EOVERFLOW, f"a directory of over {limit} names")
    return sorted(names)


def file_content(dirfd: int, name: str, max_bytes: int) -> bytes | None:
    """Return what the regular file *name* in *dirfd* holds, None if it is none, or has more."""
    try:
        fd = os.open(name, _O_PATH | os.O_NOFOLLOW, dir_fd=dirfd)
    except OSError:
        return None
    try:
        return read_of_image(fd, name, max_bytes)
    except OSError:
        return None
    finally:
        os.close(fd)


def change_mode(fd: int, mode: int) -> None:
    """Set the permissions of what *fd* (O_PATH) stands for; chmod(2)."""
    os.chmod(f"/proc/self/fd/{fd}", mode)
