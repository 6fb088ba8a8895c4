# SPDX-License-Identifier: Apache-2.0
"""Split a service in two: a root process that does one thing, and the service without rights.

The service runs in a child, which is the user nobody and cannot gain privileges again. Its parent
serves it until it ends, and passes signals on.
"""

from __future__ import annotations

import logging
import os
import pwd
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from gpuruntime.errors import GpuRuntimeError
from gpuruntime.system import syscalls

log = logging.getLogger(__name__)

USER = "nobody"
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def split(serve: Callable[[socket.socket], None], groups: Sequence[int] = ()) -> socket.socket:
    """Return a connection to a parent process that runs *serve* at the other end of it.

    Only the child returns. If this process is root, the child is the user nobody in *groups*,
    without capabilities (see drop_rights). The parent ends with the exit status of the child. To
    be called before anything has started a thread.
    """
    assert threading.active_count() == 1
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        if os.geteuid() == 0:
            drop_rights(groups)
        # After the change of user, which would cancel it.
        syscalls.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        return theirs
    theirs.close()
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: _pass_on(pid, received))
    thread = threading.Thread(target=_serve, args=(serve, ours), daemon=True)
    thread.start()
    _, status = os.waitpid(pid, 0)
    # Without the clean-up of an interpreter whose thread may wait for the kubelet.
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def groups_of_nodes(root: str) -> list[int]:
    """Return the group that may use the GPUs' nodes below *root*, if not only root may."""
    try:
        group = os.stat(f"{root.rstrip('/')}/dev/nvidiactl").st_gid
    except OSError:
        return []
    return [group] if group else []


def drop_rights(groups: Sequence[int] = ()) -> None:
    """Become the user nobody in *groups*; raise GpuRuntimeError if there is no such user.

    Where that user cannot run this program, as in a checkout below /root, this process remains
    the user root, without capabilities.
    """
    try:
        user = pwd.getpwnam(USER)
    except KeyError as error:
        raise GpuRuntimeError(
            f'the user "{USER}" does not exist', f"add {USER} to /etc/passwd"
        ) from error
    os.setgroups(groups)
    os.setresgid(user.pw_gid, user.pw_gid, 0)
    os.setresuid(user.pw_uid, user.pw_uid, 0)
    can_run = os.access(sys.executable, os.X_OK, effective_ids=True) and all(
        os.access(path, os.R_OK, effective_ids=True) for path in (os.__file__, __file__)
    )
    os.setresuid(0, 0, 0)
    os.setresgid(0, 0, 0)
    if can_run:
        os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
        # The capabilities of root end with this.
        os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
        syscalls.forbid_new_privileges()
    else:
        log.warning(
            'the user "%s" cannot run %s: this service is the user root, without capabilities',
            *(USER, sys.executable),
        )
        syscalls.drop_privileges()


def _serve(serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
    with connection:
        serve(connection)


def _pass_on(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
