# SPDX-License-Identifier: Apache-2.0
"""The one rule of ownership: which files are trusted."""

from __future__ import annotations

import _stat as stat
import posix as os

OVERFLOW_UID = 65534


def may_trust(status: os.stat_result) -> bool:
    """Return whether nobody but root, or we ourselves, can have written what *status* describes.

    In a user namespace without a mapping for the host's root, root's files show the overflow uid.
    """
    if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    if status.st_uid in (0, os.geteuid()):
        return True
    return status.st_uid == OVERFLOW_UID and not _has_host_root()


def may_trust_entries(status: os.stat_result) -> bool:
    """Return whether nobody but root, or we ourselves, can replace a trusted file in a directory.

    *status* is that of the directory. In a sticky one, such as /tmp, users can only replace files
    of their own.
    """
    mode, *others = status
    if mode & stat.S_ISVTX:
        mode &= ~(stat.S_IWGRP | stat.S_IWOTH)
    return may_trust(os.stat_result((mode, *others)))


def _has_host_root() -> bool:
    """Return whether the host's uid 0 is mapped here (always so outside user namespaces).

    The owner of /proc is it, also where namespaces nest, whose maps have numbers of the next one.
    """
    return os.stat("/proc").st_uid != OVERFLOW_UID
