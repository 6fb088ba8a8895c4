# SPDX-License-Identifier: Apache-2.0
"""System calls that Python does not have, as thin wrappers named like the calls.

Each failure is a SyscallError that shows the call with its arguments.
"""

from __future__ import annotations

import _ctypes  # ctypes without the half of the interpreter's own start that its types cost
import _signal  # type: ignore[import-not-found]  # signal without enum
import _struct
import errno
import posix as os  # os without its quarter of that

from gpuruntime.system.text import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from typing import Any

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08
MS_RDONLY = 0x01
MS_NOSUID = 0x02
MS_NODEV = 0x04
MS_NOEXEC = 0x08
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CAPABILITY_VERSION = 0x20080522
_MAX_CAPABILITIES = 64
PROC_SUPER_MAGIC = 0x9FA0
FS_IOC_GETFLAGS = 0x80086601
MNT_DETACH = 2
AT_STATX_DONT_SYNC = 0x4000
STATX_MNT_ID = 0x1000
# Where struct statx has its mask and the number of the mount, in words.
_STATX_MASK, _STATX_MNT_ID = 0, 18

# Above 423 the numbers are the same on every architecture.
_NR = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "close_range": 436,
    "openat2": 437,
    "mount_setattr": 442,
}
_MACHINE = os.uname().machine
# Of older calls the numbers differ.
_NR.update(
    {
        "x86_64": {"bpf": 321, "statx": 332},
        "aarch64": {"bpf": 280, "statx": 291},
    }.get(_MACHINE, {})
)


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class _Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "l"


class _Pointer(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "P"


class _Function(_ctypes.CFuncPtr):
    """A function of the C library whose error is kept for `_ctypes.get_errno`."""

    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


_HANDLE = _ctypes.dlopen(None, _ctypes.RTLD_LOCAL)  # type: ignore[arg-type]


def _function(name: str) -> _Function:
    """Return the function *name* of the C library that this process has; raise OSError."""
    return _Function(_ctypes.dlsym(_HANDLE, name))


class _Library:
    """The C library that this process has: its functions are attributes, as those of a CDLL."""

    def __getattr__(self, name: str) -> _Function:
        """Return the function *name*, the same each time; raise OSError."""
        function = _function(name)
        setattr(self, name, function)
        return function


_libc = _Library()
# A path, as any pointer, is None or bytes.
_libc.mount.argtypes = [_Pointer] * 3 + [_Long, _Pointer]
_libc.umount2.argtypes = [_Pointer, _Int]
_libc.prctl.argtypes = [_Int] + [_Long] * 4
_libc.unshare.argtypes = [_Int]
_libc.setns.argtypes = [_Int, _Int]
_libc.capset.argtypes = [_Pointer, _Pointer]
_libc.fstatfs.argtypes = [_Int, _Pointer]
_libc.ioctl.argtypes = [_Int, _Long, _Pointer]
# Room for struct statfs, of 120 bytes, and for struct statx, of 256.
_Words = _Long * 32


class SyscallError(OSError):
    """A system call that failed; *call* shows it with its arguments."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(code, os.strerror(code))
        self.call = call

    def __str__(self) -> str:
        return f"{self.call}: {self.strerror}"


# Call → syscall(2) with the types of its arguments.
_calls: dict[str, _Function] = {}


def _declared(name: str, arguments: tuple[Any, ...]) -> _Function:
    """Return syscall(2), as it makes the call *name* with *arguments*; raise SyscallError."""
    if name not in _NR:
        raise SyscallError(errno.ENOSYS, name)
    function = _function("syscall")
    function.restype = _Long
    function.argtypes = [_Long, *(_Long if isinstance(a, int) else _Pointer for a in arguments)]
    _calls[name] = function
    return function


def _call(name: str, *arguments: Any) -> int:  # noqa: ANN401 (integers, and what pointers are)
    """Make the call, again after EINTR; return its result or raise SyscallError."""
    function = _calls.get(name) or _declared(name, arguments)
    number = _NR[name]
    while True:
        result: int = function(number, *arguments)
        if result >= 0:
            return result
        code = _ctypes.get_errno()
        if code != errno.EINTR:
            shown = ", ".join(str(a) if isinstance(a, (int, bytes)) else "..." for a in arguments)
            raise SyscallError(code, f"{name}({shown})")


def _check(call: Callable[[], int], shown: str) -> None:
    """Make a *call* of the C library, again after EINTR; raise SyscallError, which shows it."""
    while call() != 0:
        code = _ctypes.get_errno()
        if code != errno.EINTR:
            raise SyscallError(code, shown)


def _c_string(path: str) -> bytes:
    data = encode(path)
    if b"\0" in data:
        raise SyscallError(errno.EINVAL, "a path with a NUL byte")
    return data


def openat2(dirfd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open *path* below *dirfd* as openat2(2) does; O_CLOEXEC is added."""
    how = _struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    return _call("openat2", dirfd, _c_string(path), how, len(how))


def open_tree(dirfd: int, path: str, flags: int) -> int:
    """Return a descriptor of the mount tree at *path*, closed on exec; open_tree(2)."""
    return _call("open_tree", dirfd, _c_string(path), flags | OPEN_TREE_CLOEXEC)


def move_mount(from_fd: int, to_fd: int) -> None:
    """Attach the detached mount *from_fd* on the file or directory *to_fd*; move_mount(2)."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    _call("move_mount", from_fd, b"", to_fd, b"", flags)


def mount_setattr(
    fd: int, attributes: int, propagation: int = MS_PRIVATE, flags: int = AT_EMPTY_PATH
) -> None:
    """Set MOUNT_ATTR_* *attributes* on the mount *fd*; mount_setattr(2)."""
    attr = _struct.pack("=QQQQ", attributes, 0, propagation, 0)
    _call("mount_setattr", fd, b"", flags, attr, len(attr))


def new_tmpfs(size_bytes: int, attributes: int) -> int:
    """Return a descriptor of a new, detached tmpfs of *size_bytes*; fsopen(2), fsmount(2)."""
    context = _call("fsopen", b"tmpfs", FSOPEN_CLOEXEC)
    try:
        for key, value in ((b"size", str(size_bytes).encode()), (b"mode", b"0755")):
            _call("fsconfig", context, FSCONFIG_SET_STRING, key, value, 0)
        _call("fsconfig", context, FSCONFIG_CMD_CREATE, None, None, 0)
        return _call("fsmount", context, FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def mount(source: str, target_fd: int, kind: str, flags: int, data: str = "") -> None:
    """Mount on what *target_fd* stands for; mount(2), for kernels without the calls above."""
    target = b"/proc/self/fd/%d" % target_fd
    arguments = _c_string(source), target, _c_string(kind), flags, _c_string(data)
    shown = f"mount({source}, {target_fd}, {kind}, {flags:#x})"
    _check(lambda: int(_libc.mount(*arguments)), shown)


def umount_detached(fd: int) -> None:
    """Take the mount *fd* out of the tree, now or when it is last used; umount2(2), MNT_DETACH."""
    target = b"/proc/self/fd/%d" % fd
    _check(lambda: int(_libc.umount2(target, MNT_DETACH)), f"umount2({fd}, MNT_DETACH)")


def close_range(first: int) -> None:
    """Close every descriptor from *first* on; close_range(2), or one by one without it."""
    try:
        _call("close_range", first, 0xFFFFFFFF, 0)
    except SyscallError:
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _prctl(option: int, value: int, shown: str, address: int = 0) -> None:
    _check(lambda: int(_libc.prctl(option, value, address, 0, 0)), shown)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends; prctl(2), PR_SET_PDEATHSIG."""
    _prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, "prctl(PR_SET_PDEATHSIG, SIGKILL)")


def set_undumpable() -> None:
    """Forbid others of our uid to look into this process; prctl(2), PR_SET_DUMPABLE."""
    _prctl(PR_SET_DUMPABLE, 0, "prctl(PR_SET_DUMPABLE, 0)")


def forbid_new_privileges() -> None:
    """Have no program that this process executes gain privileges; prctl(2), for good."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS, 1)")


def unshare(flags: int) -> None:
    """Give this process namespaces of its own, those of CLONE_NEW* *flags*; unshare(2)."""
    _check(lambda: int(_libc.unshare(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace *fd*, which is of the CLONE_NEW* *kind*; setns(2)."""
    _check(lambda: int(_libc.setns(fd, kind)), f"setns({kind:#x})")


def bpf(command: int, name: str, attributes: ctypes.Array[ctypes.c_char]) -> int:
    """Have the kernel carry out *command*, called *name*; *attributes* may change; bpf(2)."""
    while True:
        try:
            return _call("bpf", command, attributes, len(attributes))
        except SyscallError as error:
            # A signal came while it checked a program.
            if error.errno != errno.EAGAIN:
                raise SyscallError(error.errno or 0, f"bpf({name})") from None


def confine(instructions: bytes, count: int) -> None:
    """Have the kernel filter the calls of this process by *count* BPF *instructions*; prctl(2).

    For good, and after it neither this process nor a program that it executes gains privileges.
    """
    program = (_Long * (len(instructions) // 8)).from_buffer_copy(instructions)
    # struct sock_fprog.
    head = (_Long * 2).from_buffer_copy(_struct.pack("@HP", count, _ctypes.addressof(program)))
    forbid_new_privileges()
    shown = "prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ...)"
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, shown, _ctypes.addressof(head))


def drop_privileges() -> None:
    """Give up every capability, also for programs that are executed; capset(2), prctl(2)."""
    for capability in range(_MAX_CAPABILITIES):
        try:
            _prctl(PR_CAPBSET_DROP, capability, f"prctl(PR_CAPBSET_DROP, {capability})")
        except SyscallError as error:
            if error.errno != errno.EINVAL:
                raise
            # The kernel has no more of them.
            break
    header = _struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    none = bytes(24)
    _check(lambda: int(_libc.capset(header, none)), "capset(none)")
    _prctl(PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS, 1)")


def kind_of(fd: int) -> int:
    """Return the magic number of the file system that *fd* is on; fstatfs(2)."""
    status = _Words()
    _check(lambda: int(_libc.fstatfs(fd, status)), f"fstatfs({fd})")
    return int(status[0])


def mount_id(fd: int) -> int | None:
    """Return the number of the mount that *fd* is in, None from a kernel before 5.8; statx(2)."""
    status = _Words()
    try:
        _call("statx", fd, b"", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_MNT_ID, status)
    except SyscallError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None
    return int(status[_STATX_MNT_ID]) if int(status[_STATX_MASK]) & STATX_MNT_ID else None


def inode_flags(fd: int) -> int:
    """Return the FS_*_FL flags of the file or directory *fd*; ioctl(2), FS_IOC_GETFLAGS."""
    flags = _Long(0)
    pointer = _ctypes.byref(flags)
    _check(lambda: int(_libc.ioctl(fd, FS_IOC_GETFLAGS, pointer)), f"ioctl({fd}, FS_IOC_GETFLAGS)")
    # The kernel writes an int, whatever the number of the request says.
    return int(flags.value) & 0xFFFFFFFF
