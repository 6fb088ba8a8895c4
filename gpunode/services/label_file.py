# SPDX-License-Identifier: Apache-2.0
"""Publish labels as a file of node feature discovery, or on standard output."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping

from gpuruntime import atomic_replace
from gpuruntime.errors import GpuRuntimeError

DEFAULT = "/etc/kubernetes/node-feature-discovery/features.d/gfd"


class LabelFileError(GpuRuntimeError):
    """The file of labels cannot be written."""

    phase = "labels"


class LabelFile:
    """The file *path*, replaced as a whole; "" is standard output. It stays when we end."""

    def __init__(self, path: str) -> None:
        self.path = path

    def publish(self, node_labels: Mapping[str, str]) -> None:
        """Write *node_labels*, a line each; raise LabelFileError."""
        data = "".join(f"{name}={value}\n" for name, value in sorted(node_labels.items())).encode()
        if not self.path:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        # Node feature discovery ignores hidden files. A process id would be the same in each pod,
        # and a file may be left over from one that was killed.
        directory, name = os.path.split(self.path)
        temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}")
        try:
            atomic_replace.replace(self.path, temporary, data, lambda fd: os.fchmod(fd, 0o644))
        except OSError as error:
            raise LabelFileError(
                f'cannot write "{self.path}": {error.strerror}',
                "name a file in a directory that exists: --output-file",
            ) from error
