# SPDX-License-Identifier: Apache-2.0
"""A writer of MIG that calls NVML in its own process, for tests that fork."""

from __future__ import annotations

from typing import Any

from gpunode.mig.operations import Operations
from gpunode.mig.writer import WriteError
from gpuruntime.discover.nvml_calls import NvmlError


class Direct:
    """The operations of this process, with the errors of the writer."""

    def __init__(self, library: str) -> None:
        self._operations = Operations(library)

    def call(self, operation: str, **arguments: object) -> Any:
        """Return the result of *operation*; raise WriteError."""
        try:
            return getattr(self._operations, operation)(**arguments)
        except NvmlError as error:
            raise WriteError(str(error), code=error.code) from None
