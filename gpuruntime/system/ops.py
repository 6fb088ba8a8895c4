# SPDX-License-Identifier: Apache-2.0
"""Operations below a container's root: records that describe themselves and can be executed.

On the start path. A hook plans a list of them, and then executes each one on the root.
"""

from __future__ import annotations

import _stat as stat
import errno
import posix as os

from cdi.pathnames import dirname, join, normpath, split
from gpuruntime.errors import MountError
from gpuruntime.system import mounts
from gpuruntime.system.operation import Operation
from gpuruntime.system.paths import change_mode, file_content, list_names
from gpuruntime.system.replace import replace_file, replace_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuruntime.system.paths import Root

PARAMS = "/proc/driver/nvidia/params"
DEVICES = "/proc/devices"
MAX_PARAMS_BYTES = 64 << 10
_MODIFIED, _MASKED = b"ModifyDeviceFiles: 1", b"ModifyDeviceFiles: 0"
PROFILES = "/etc/nvidia/nvidia-application-profiles-rc.d"
PROFILE = "10-container.conf"
MAX_PROFILE_BYTES = 64 << 10
MAX_NAMES = 100_000
MAX_MINOR = 63
_GPU = "nvidia"


class RootIsMount(Operation):
    """See to it that the root is a file system that was mounted for the container."""

    __slots__ = ()

    def describe(self) -> str:
        """Return the operation in one line."""
        return "see whether the root is a mount"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Raise MountError if *root* is a directory like any other."""
        del warn
        if mounts.is_mount(root.fd):
            return
        raise MountError(
            "the container's root is not a mount", "mount a file system there, as engines do"
        )


class Link(Operation):
    """Make *path* a link to *target*, in place of a link or file that is there."""

    __slots__ = ("path", "target")

    def __init__(self, path: str, target: str) -> None:
        self.path = path
        self.target = target

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"link {self.path} -> {self.target}"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*; raise MountError."""
        directory, name = split(self.path)
        try:
            if replace_link(root.directory(directory), name, self.target):
                root.forget(self.path)
        except OSError as error:
            if error.errno == errno.EBUSY:
                # Somebody has mounted what he wants to be there.
                warn(f'"{self.path}" in the container is a mount, and stays as it is')
                return
            if error.errno == errno.EXDEV:
                raise MountError(
                    f'cannot link "{self.path}" to "{self.target}" in the container: '
                    "a link of the image leads to a volume",
                    f'mount the volume at "{directory}" itself',
                ) from error
            raise MountError(
                f'cannot link "{self.path}" to "{self.target}" in the container: {error.strerror}',
                f'mount nothing read-only over "{directory}"; with a read-only root, use runc'
                if error.errno == errno.EROFS
                else f'let "{directory}" be a directory of the image, without read-only mounts',
            ) from error


class DeviceLink(Link):
    """A link to a device node, for the containers that have the node."""

    __slots__ = ()

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Make the link below *root* if the container has the node; warn if that fails."""
        # As text: the directory of the link is made only for it, and ".." would not resolve.
        node = normpath(join(dirname(self.path), self.target))
        if not root.exists(node):
            return
        try:
            super().execute(root, warn)
        except MountError as error:
            # The node itself is there: the container can do without another name of it.
            warn(f"left out: {error.message}")


class MaskParams(Operation):
    """Hide from the container that the driver may make device nodes.

    Its libraries would make nodes of GPUs that the container does not have.
    """

    __slots__ = ()

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"mount over {PARAMS} with ModifyDeviceFiles: 0"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*; nothing to do where the host does not modify. MountError."""
        del warn
        try:
            content = _masked_params()
            if content is not None:
                # A container without the driver's /proc has nothing to be masked.
                mounts.cover(root, PARAMS, content, 0o444)
        except OSError as error:
            raise MountError(
                f'cannot mask "{PARAMS}" in the container: {error}',
                "give the container a /proc of its own, or load the driver with "
                "NVreg_ModifyDeviceFiles=0",
            ) from error


def _masked_params() -> bytes | None:
    """Return the host's params with the line changed, or None if there is nothing to change."""
    try:
        fd = os.open(PARAMS, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Without the driver's module. But not in a /proc that has the processes alone.
        os.close(os.open(DEVICES, os.O_PATH | os.O_CLOEXEC))
        return None
    try:
        # One read gives a file of /proc whole.
        lines = os.read(fd, MAX_PARAMS_BYTES).splitlines()
    finally:
        os.close(fd)
    if _MODIFIED not in lines:
        return None
    return b"".join((_MASKED if line == _MODIFIED else line) + b"\n" for line in lines)


class ApplicationProfile(Operation):
    """Tell the driver's libraries in the container which GPUs it has: EGL lists others as well."""

    __slots__ = ()

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"list the container's GPUs in {PROFILES}/{PROFILE}"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*. It protects nothing: what goes wrong is a warning."""
        try:
            mask = _gpu_mask(root, warn)
            if mask:
                _write_profile(root, _profile(mask))
        except OSError as error:
            warn(f'"{PROFILES}/{PROFILE}" in the container is not written: {error}')


def _gpu_mask(root: Root, warn: Callable[[str], None]) -> int:
    """Return the GPUs that have a node in the container, bit by minor number."""
    try:
        dirfd = root.open_directory("/dev")
    except OSError as error:
        if error.errno == errno.ENOENT:
            return 0
        raise
    mask = 0
    try:
        for name in list_names(dirfd, MAX_NAMES):
            number = name[len(_GPU) :]
            if not (name.startswith(_GPU) and number.isascii() and number.isdigit()):
                continue
            status = os.stat(name, dir_fd=dirfd, follow_symlinks=False)
            if not stat.S_ISCHR(status.st_mode):
                continue
            minor = os.minor(status.st_rdev)
            if minor > MAX_MINOR:
                warn(f'"/dev/{name}" has no place in an application profile: minor {minor}')
            else:
                mask |= 1 << minor
    finally:
        os.close(dirfd)
    return mask


def _profile(mask: int) -> bytes:
    # The driver's own dialect of JSON: with hexadecimal numbers.
    setting = f'["EGLVisibleDGPUDevices", {mask:#x}]'
    profile = f'{{"name": "_container_", "settings": {setting}}}'
    rule = '{"pattern": [], "profile": "_container_"}'
    return f'{{"profiles": [{profile}], "rules": [{rule}]}}'.encode()


def _write_profile(root: Root, content: bytes) -> None:
    os.close(root.open_to_write("/etc"))
    dirfd = root.open_directory(PROFILES, create=True, mode=0o555)
    try:
        if file_content(dirfd, PROFILE, MAX_PROFILE_BYTES) != content:
            replace_file(dirfd, PROFILE, content, 0o444)
    finally:
        os.close(dirfd)


class Chmod(Operation):
    """Give *path* the permissions *mode*."""

    __slots__ = ("mode", "path")

    def __init__(self, path: str, mode: int) -> None:
        self.path = path
        self.mode = mode

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"change the mode of {self.path} to {self.mode:o}"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*, if there is such a path. It never keeps one from starting."""
        try:
            fd = root.open_name(self.path)
            try:
                status = os.fstat(fd)
                is_link = stat.S_ISLNK(status.st_mode)
                if not is_link and stat.S_IMODE(status.st_mode) == self.mode:
                    return
                why = _why_not_ours(root, fd, status)
                if why:
                    warn(f'"{self.path}" in the container {why}, and keeps its mode')
                    return
                change_mode(fd, self.mode)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno != errno.ENOENT:
                warn(f'cannot change the mode of "{self.path}" in the container: {error.strerror}')


def _why_not_ours(root: Root, fd: int, status: os.stat_result) -> str:
    """Return why the mode of *fd* may be for others than the container to set, "" if it is not."""
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
        # The other name may be a file that is not the container's.
        return "has several names"
    return "is on a mount of the host's" if mounts.is_of_host(root, fd) else ""
