# SPDX-License-Identifier: Apache-2.0
"""Unix sockets in a directory that is shared with the kubelet: identity, limits, errors."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import Self

from gpuruntime.errors import GpuRuntimeError

# Of sun_path, less the byte that ends it.
MAX_PATH_BYTES = 107


class KubeletError(GpuRuntimeError):
    """The kubelet's directory or one of its sockets cannot be used."""

    phase = "kubelet"


def check_path(path: str) -> None:
    """Raise KubeletError if *path* is too long for the path of a unix socket."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise KubeletError(
            f'the socket path "{path}" has {length} bytes; the kernel allows {MAX_PATH_BYTES}',
            "use a shorter directory: --kubelet-socket",
        )


class PinnedSocket:
    """A socket file that is held open, so that no other file can get its inode number.

    Two of them are equal exactly if they are the same socket, even if one was made a moment
    after the other was removed.
    """

    def __init__(self, path: str) -> None:
        """Pin the socket that *path* names; raise OSError if there is none."""
        self.descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        self.identity = (status.st_dev, status.st_ino)
        if not stat.S_ISSOCK(status.st_mode):
            self.close()
            raise OSError(0, "it is not a socket", path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def is_at(self, path: str) -> bool:
        """Return whether *path* still names this socket."""
        try:
            status = os.stat(path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def duplicate(self) -> PinnedSocket:
        """Return another pin of the same socket."""
        return PinnedSocket(self.path)

    @property
    def path(self) -> str:
        """A path of exactly this socket, whatever the path of its file names now."""
        return f"/proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        """Let the socket go."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def pin(path: str) -> PinnedSocket | None:
    """Return the socket that *path* names, None if there is none."""
    try:
        return PinnedSocket(path)
    except OSError:
        return None


def is_served(path: str) -> bool:
    """Return whether a process accepts connections at the socket *path*."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        client.setblocking(False)  # noqa: FBT003 (of the standard library)
        try:
            client.connect(path)
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def check_directory(directory: str) -> None:
    """Raise KubeletError if no socket can be made in *directory*."""
    probe = os.path.join(directory, f".{os.getpid():x}")
    try:
        # An empty file: what fails here fails for a socket, and gRPC reports no reason.
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        raise KubeletError(
            f'the directory "{directory}" of the kubelet\'s socket does not exist',
            "start the kubelet, or name its socket: --kubelet-socket",
        ) from error
    except OSError as error:
        raise KubeletError(
            f'cannot make a socket in "{directory}": {error.strerror}',
            "run as root with the directory mounted writable, or name another: --kubelet-socket",
        ) from error
    with contextlib.suppress(OSError):
        os.unlink(probe)
