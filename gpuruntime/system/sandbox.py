# SPDX-License-Identifier: Apache-2.0
"""Run the host's ldconfig on a container's root, where our own merge of the cache must refuse.

ldconfig reads files that an attacker wrote. So it runs as a sealed copy without an interpreter, in
namespaces of its own, without capabilities, environment and descriptors, where only a tmpfs of
ours can be written. We then put what it wrote there into the container.
"""

from __future__ import annotations

import fcntl
import os
import resource
import stat

from gpuruntime import child_process
from gpuruntime.errors import LdcacheError
from gpuruntime.formats import elf
from gpuruntime.system import seccomp, syscalls
from gpuruntime.system.paths import Root, read_regular
from gpuruntime.trusted_files import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

DEADLINE_S = 5.0
MAX_PROGRAM_BYTES = 64 << 20
MAX_OUTPUT_BYTES = 64 << 20
_NAME = "ld.so.cache"
# Where the container has a directory that ldconfig does not need: its own tmpfs is mounted there.
_PLACES = ("/proc", "/dev", "/sys", "/run", "/tmp")  # noqa: S108 (a place to be covered)
_NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
_READ_ONLY = (
    syscalls.MOUNT_ATTR_RDONLY
    | syscalls.MOUNT_ATTR_NOSUID
    | syscalls.MOUNT_ATTR_NODEV
    | syscalls.MOUNT_ATTR_NOEXEC
)
_LIMITS = (
    (resource.RLIMIT_CPU, 5),
    (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_NPROC, 1),
    (resource.RLIMIT_CORE, 0),
)
_NOT_RUN = 126
_PROGRAM_FD = 3
_MAX_WHY_BYTES = 500
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def build_cache(root: Root, ldconfig: str) -> bytes:
    """Return the cache that the host's *ldconfig* makes of the container; raise LdcacheError."""
    program = _sealed_copy(ldconfig)
    try:
        place = next((path for path in _PLACES if _is_directory(root, path)), None)
        if place is None:
            raise _failed("the container has none of " + ", ".join(_PLACES))
        output = syscalls.new_tmpfs(MAX_OUTPUT_BYTES, _READ_ONLY & ~syscalls.MOUNT_ATTR_RDONLY)
        try:
            _run(root, program, output, place)
            fd = os.open(_NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=output)
            try:
                return read_regular(fd, _NAME, MAX_OUTPUT_BYTES)
            finally:
                os.close(fd)
        finally:
            os.close(output)
    except OSError as error:
        raise _failed(str(error)) from error
    finally:
        os.close(program)


def _sealed_copy(path: str) -> int:
    """Return a descriptor of a copy of the host's program *path* that nobody can change."""
    if not path.startswith("/"):
        raise _unusable(path, "not an absolute path of the host")
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not may_trust(status) or status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                raise _unusable(path, "not a plain file of root's alone")
            data = read_regular(fd, path, MAX_PROGRAM_BYTES)
        finally:
            os.close(fd)
        if not elf.is_static_program(data):
            raise _unusable(path, "not an ELF program without an interpreter")
        copy = os.memfd_create("ldconfig", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        view = memoryview(data)
        while view:
            view = view[os.write(copy, view) :]
        # Whoever cannot read a program cannot look into the process that it becomes.
        os.fchmod(copy, 0o111)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        raise _unusable(path, str(error)) from error
    return copy


def _is_directory(root: Root, path: str) -> bool:
    try:
        os.close(root.open_directory(path))
    except OSError:
        return False
    return True


def _run(root: Root, program: int, output: int, place: str) -> None:
    """Run *program* in the container, with *output* mounted on its *place*."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        child = child_process.fork(
            lambda writer: _be_child(root, (program, output, null, writer), place)
        )
    finally:
        os.close(null)
    # With the init of a process namespace, all in it ends.
    outcome = child.finish(DEADLINE_S, _MAX_WHY_BYTES)
    if outcome.how in (child_process.LATE, child_process.STUCK):
        raise _failed(f"it was not done in {DEADLINE_S:g} s")
    if outcome.status != 0:
        why = outcome.output.decode("utf-8", "replace")
        raise _failed(why or f"it ended with status {outcome.status}")


def _be_child(root: Root, fds: tuple[int, int, int, int], place: str) -> int:
    """Go into the sandbox, have ldconfig run there, and return its exit status."""
    program, output, null, writer = fds
    try:
        syscalls.die_with_parent()
        _enter(root, output, place)
        init = os.fork()
        if init == 0:
            _execute(program, null, place)
        _, wait_status = os.waitpid(init, 0)
    except OSError as error:
        os.write(writer, str(error).encode()[:_MAX_WHY_BYTES])
        return _NOT_RUN
    return os.waitstatus_to_exitcode(wait_status) & 0xFF


def _enter(root: Root, output: int, place: str) -> None:
    """Go into namespaces of our own, and into the container's root, which is read-only there."""
    # Descriptors stay in the mount namespace that they are from, the working directory does not.
    os.fchdir(root.fd)
    syscalls.unshare(_NAMESPACES)
    host = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.mount("", host, "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    recursive = syscalls.AT_EMPTY_PATH | syscalls.AT_RECURSIVE
    tree = syscalls.open_tree(here, "", syscalls.OPEN_TREE_CLONE | recursive)
    syscalls.mount_setattr(tree, _READ_ONLY, flags=recursive)
    syscalls.move_mount(tree, here)
    os.fchdir(tree)
    os.chroot(".")
    target = Root("/").open_path(place)
    syscalls.move_mount(output, target)


def _execute(program: int, null: int, place: str) -> NoReturn:
    """Become *program*, with nothing but what it needs."""
    try:
        syscalls.die_with_parent()
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.dup2(program, _PROGRAM_FD, inheritable=False)
        syscalls.close_range(_PROGRAM_FD + 1)
        for what, limit in _LIMITS:
            resource.setrlimit(what, (limit, limit))
        syscalls.drop_privileges()
        seccomp.confine(seccomp.LDCONFIG)
        # No links are made, and no second cache is read.
        os.execve(
            _PROGRAM_FD,
            ["ldconfig", "-X", "-i", "-f", "/etc/ld.so.conf", "-C", f"{place}/{_NAME}"],
            {},
        )
    finally:
        os._exit(_NOT_RUN)


def _unusable(path: str, why: str) -> LdcacheError:
    return LdcacheError(
        f'cannot use "{path}" as the ldconfig of the host: {why}',
        "name a static ldconfig of the host that only root may write",
    )


def _failed(why: str) -> LdcacheError:
    return LdcacheError(
        f"the host's ldconfig made no cache of the container: {why}",
        "remove /etc/ld.so.cache from the image, or run ldconfig in it",
    )
