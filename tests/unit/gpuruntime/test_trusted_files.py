# SPDX-License-Identifier: Apache-2.0
"""Whose files are believed."""

from __future__ import annotations

import os

import pytest

from gpuruntime.trusted_files import may_trust, may_trust_entries


def status(mode: int, uid: int) -> os.stat_result:
    """Return the status of a file with *mode* and owner *uid*."""
    return os.stat_result((0o100000 | mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "expected"),
    [
        (0o644, 0, True),
        (0o600, 0, True),
        (0o755, os.geteuid(), True),
        (0o664, 0, False),
        (0o646, 0, False),
        (0o666, 0, False),
        (0o777, os.geteuid(), False),
        (0o1777, 0, False),
        (0o644, 4711, False),
        # The host's root is mapped here: then this is nobody's file.
        (0o644, 65534, False),
    ],
)
def test_only_what_root_or_we_alone_can_write(mode: int, uid: int, expected: bool) -> None:
    """Else a user of the node could have root mount or run what it likes."""
    assert may_trust(status(mode, uid)) is expected


@pytest.mark.parametrize(
    ("mode", "uid", "expected"),
    [
        (0o755, 0, True),
        (0o2755, 0, True),
        (0o1777, 0, True),
        (0o3775, os.geteuid(), True),
        (0o777, 0, False),
        (0o2775, 0, False),
        # Its owner can replace files in it even so.
        (0o1777, 4711, False),
    ],
)
def test_a_directory_is_judged_by_who_can_replace_files_in_it(
    mode: int, uid: int, expected: bool
) -> None:
    """In a sticky one only the owner of a file, of the directory, and root."""
    assert may_trust_entries(status(mode, uid)) is expected
