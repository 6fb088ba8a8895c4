# SPDX-License-Identifier: Apache-2.0
"""The one rule of ownership: which files are trusted."""

from __future__ import annotations

import os
import stat

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


def _has_host_root() -> bool:
    """Return whether the host's uid 0 is mapped here (always so outside user namespaces).

    The owner of /proc is it, also where namespaces nest, whose maps have numbers of the next one.
    """
    return os.stat("/proc").st_uid != OVERFLOW_UID
