# SPDX-License-Identifier: Apache-2.0
"""The rule for trusted files and directories."""

from __future__ import annotations

import _stat as stat
import posix as os

OVERFLOW_UID = 65534


def may_trust(status: os.stat_result) -> bool:
    """Return whether only root or the current user can have written the file with *status*.

    In a user namespace that does not map the host's root, root's files have the overflow uid.
    """
    if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    if status.st_uid in (0, os.geteuid()):
        return True
    return status.st_uid == OVERFLOW_UID and not _has_host_root()


def may_trust_entries(status: os.stat_result) -> bool:
    """Return whether only root or the current user can replace a trusted file in a directory.

    *status* is that of the directory. In a sticky directory, such as /tmp, users can replace only
    their own files.
    """
    mode, *others = status
    if mode & stat.S_ISVTX:
        mode &= ~(stat.S_IWGRP | stat.S_IWOTH)
    return may_trust(os.stat_result((mode, *others)))


def _has_host_root() -> bool:
    """Return whether the host's uid 0 is mapped here, as always outside user namespaces.

    /proc belongs to the host's root. uid_map does not show that in nested namespaces, because it
    has the uids of the parent namespace.
    """
    return os.stat("/proc").st_uid != OVERFLOW_UID
