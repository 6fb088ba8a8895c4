# SPDX-License-Identifier: Apache-2.0
"""The process that calls NVML for changes of MIG: one operation after the other, from a pipe."""

from __future__ import annotations

import os
from typing import Any

from gpunode.mig.operations import Operations
from gpunode.watch import framing
from gpuruntime.discover.nvml_calls import NvmlError
from gpuruntime.errors import escape

_OPERATIONS = frozenset(
    {
        *("state", "set_mode", "create_gpu_instance", "create_compute_instance"),
        *("destroy_compute_instance", "destroy_gpu_instance"),
    }
)


def main(library: str) -> None:
    """Serve the operations of *library* until the end of standard input."""
    try:
        operations = Operations(library)
        framing.write(1, {"result": None})
        while (request := framing.read(0)) is not None:
            framing.write(1, _response(operations, request))
    except NvmlError as error:
        framing.write(1, {"error": escape(str(error)), "code": error.code})
    except (OSError, ImportError) as error:
        framing.write(1, {"error": escape(str(error)), "code": None})
    # The exit handlers of NVML may block.
    os._exit(0)


def _response(operations: Operations, request: dict[str, Any]) -> dict[str, Any]:
    if request["operation"] not in _OPERATIONS:
        return {"error": f"unknown operation {request['operation']}", "code": None}
    try:
        return {"result": getattr(operations, request["operation"])(**request["arguments"])}
    except NvmlError as error:
        return {"error": escape(str(error)), "code": error.code}
