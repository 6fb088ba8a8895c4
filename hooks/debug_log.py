# SPDX-License-Identifier: Apache-2.0
"""The log of the prestart hook, in the file that `nvidia-container-cli.debug` names.

The hook opens the file on the host, before it enters the container's mount namespace: there, the
same path may lead to a file of the image. A log that cannot be written is a warning, never a
failed container.
"""

from __future__ import annotations

import os
import stat
import time

from cdi import strictjson
from gpuruntime.errors import escape
from gpuruntime.trusted_files import may_trust

# No link is followed, and a FIFO or a terminal does not hang the hook.
_FLAGS = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
) | os.O_CLOEXEC


class DebugLog:
    """The open log *path* for the container in *bundle*.

    *problem* says why nothing is logged, "" if the file is open.
    """

    def __init__(self, path: str, bundle: str) -> None:
        self.problem = ""
        self._bundle = bundle
        self._fd = -1
        # The first call reads the time zone, which must be the host's.
        time.gmtime()
        try:
            self._fd = _open(path)
        except OSError as error:
            self.problem = f'cannot write the log "{path}": {error.strerror}'

    def record(self, text: str) -> None:
        """Append *text* as one line; a failure, such as a full disk, is ignored."""
        if self._fd < 0:
            return
        now = "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z".format(*time.gmtime()[:6])
        bundle, message = (strictjson.dumps(escape(item)) for item in (self._bundle, text))
        line = f'time="{now}" level=debug msg={message} bundle={bundle}\n'
        try:
            os.write(self._fd, line.encode())
        except OSError:
            # The work in the container matters more.
            pass


def _open(path: str) -> int:
    """Return the file *path*, opened for appending; raise OSError.

    The file must be a regular one that only root or the caller may write, without another name.
    """
    if not path.startswith("/"):
        raise OSError(0, "not an absolute path")
    fd = os.open(path, _FLAGS, 0o600)
    status = os.fstat(fd)
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = "not a regular file"
    elif status.st_nlink != 1:
        why = "the file has another hard link"
    elif not may_trust(status):
        why = "others than root may write the file"
    if why:
        os.close(fd)
        raise OSError(0, why)
    return fd
