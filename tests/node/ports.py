# SPDX-License-Identifier: Apache-2.0
"""Ports of this machine for the servers of tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
