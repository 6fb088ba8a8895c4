# SPDX-License-Identifier: Apache-2.0
"""The root half of feature discovery: it reads files of the machine and writes that of the labels.

What asks the driver and speaks to the API server is the user nobody: see least_rights. The PCI
configuration space, which tells virtual GPUs, and the directory of the labels are root's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from gpunode import machine
from gpunode.labels import PREFIX, Machine, Vgpu, is_valid
from gpunode.services.label_file import LabelFile, LabelFileError
from gpunode.watch import framing

_LOST = "the process that reads the machine does not answer"
_RESTART = "restart this service"


def serve(connection: socket.socket, files: Callable[[], tuple[str, str]]) -> None:
    """Answer the requests on *connection* until it is closed.

    *files* returns the path of the file with the machine's product, and that of the file of
    labels. A request has labels to write to the latter, or asks for the machine; no other path and
    no other content is written.
    """
    descriptor = connection.fileno()
    while (request := framing.read(descriptor)) is not None:
        _send(connection, _answer(request, *files()))


class RootHalf:
    """The other end of the connection, for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def machine(self) -> Machine:
        """Return the facts of the machine; raise LabelFileError if the root half has ended."""
        answer = self._ask({"machine": True})
        vgpu = answer["vgpu"]
        classes = {str(address): int(number) for address, number in answer["classes"].items()}
        return Machine(answer["product"], classes, None if vgpu is None else Vgpu(*vgpu))

    def publish(self, node_labels: Mapping[str, str]) -> None:
        """Write *node_labels* to the file; raise LabelFileError."""
        answer = self._ask({"labels": dict(node_labels)})
        if answer["error"] is not None:
            raise LabelFileError(*answer["error"])

    def _ask(self, request: dict[str, Any]) -> Any:  # noqa: ANN401 (JSON)
        try:
            _send(self._connection, request)
            answer = framing.read(self._connection.fileno())
        except (OSError, framing.FrameError) as error:
            raise LabelFileError(_LOST, _RESTART) from error
        if answer is None:
            raise LabelFileError(_LOST, _RESTART)
        return answer


def _answer(request: Any, product_file: str, output_file: str) -> dict[str, Any]:  # noqa: ANN401
    if "machine" in request:
        facts = machine.read(product_file)
        vgpu = facts.vgpu
        return {
            "product": facts.product,
            "classes": dict(facts.pci_classes),
            "vgpu": vgpu and [vgpu.host_driver_version, vgpu.host_driver_branch],
        }
    labels = request["labels"]
    if not all(name.startswith(PREFIX) and is_valid(text) for name, text in labels.items()):
        return {"error": ["labels that are not valid are not written", "report this as a bug"]}
    try:
        LabelFile(output_file).publish(labels)
    except LabelFileError as error:
        return {"error": [error.message, error.hint]}
    return {"error": None}


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    framing.write(connection.fileno(), message)
