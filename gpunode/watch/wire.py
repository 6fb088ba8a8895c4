# SPDX-License-Identifier: Apache-2.0
"""What the watcher's child sends, decoded strictly into values.

The driver runs in the child: what the child sends is checked like any input from outside.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpunode.model import (
    DriverState,
    Event,
    GpuTelemetry,
    Link,
    NodeModel,
    Telemetry,
    Topology,
    Update,
)
from gpunode.watch.framing import FrameError
from gpuruntime.model import Gpu, Inventory, LeftOutDevice, MigDevice
from gpuruntime.snapshots import inventory_json

Decode = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The child's answer to a request.

    *model* is None if it has not changed, *telemetry* if it was not requested. *load* differs
    between two loads of the kernel module. *energy* is the energy in mJ that each GPU has used
    since it was initialised, by UUID. *ends*: the child ends, and another one is to be started.
    """

    state: DriverState
    reason: str
    hint: str
    model: NodeModel | None
    energy: Mapping[str, int]
    load: str
    telemetry: tuple[GpuTelemetry, ...] | None
    ends: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """The child has seen a sign of a change, which the next answer describes."""


Message = Answer | Event | Changed


def decode(message: object, time: float) -> Message:
    """Return what *message* says, which arrived at *time*; raise FrameError."""
    try:
        return _message(message, time)
    except (ValueError, TypeError) as error:
        raise FrameError(f"not a message of the watcher's child: {error}") from None


def plain(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return an Update or a Telemetry in the form of JSON, which `reported` decodes."""
    if isinstance(value, Inventory):
        return inventory_json.encode(value)
    if isinstance(value, (Gpu, MigDevice, LeftOutDevice)):
        return inventory_json.plain(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        members = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        if isinstance(value, NodeModel):
            members["links"] = [
                [*pair, link.topology, link.nvlinks] for pair, link in value.links.items()
            ]
        return {name: plain(member) for name, member in members.items()}
    return value


def reported(message: object) -> Update | Telemetry:
    """Return what another process has encoded by `plain`; raise FrameError."""
    kinds = {"update": Update, "telemetry": Telemetry}
    try:
        ((name, content),) = _exactly(dict)(message).items()
        value: Update | Telemetry = _decoder(kinds[name])(content)
    except (ValueError, TypeError, KeyError) as error:
        raise FrameError(f"not a message of the agent: {error}") from None
    return value


def _message(message: object, time: float) -> Message:
    if not isinstance(message, dict) or len(message) != 1:
        raise ValueError("one member expected")
    ((kind, content),) = message.items()
    if kind == "answer":
        return _answer(content)
    if kind == "event":
        return _event({**content, "time": time})
    if kind == "changed":
        return Changed()
    raise ValueError(f'unknown kind "{kind}"')


def _answer(content: object) -> Answer:
    answer: Answer = _decoder(Answer)(content)
    if answer.state in (DriverState.STARTING, DriverState.HANGING):
        raise ValueError(f"the state {answer.state.value} is not the child's to say")
    return answer


def _event(content: object) -> Event:
    event: Event = _decoder(Event)(content)
    return event


def _node_model(value: Any) -> NodeModel:  # noqa: ANN401 (JSON)
    members = _exactly(dict)(value)
    links = _exactly(list)(members.get("links"))
    rest: NodeModel = _dataclass(NodeModel)({**members, "links": {}})
    return dataclasses.replace(rest, links=dict(map(_link, links)))


def _link(row: Any) -> tuple[tuple[str, str], Link]:  # noqa: ANN401 (JSON)
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("a link of four values expected")
    first, second = _exactly(str)(row[0]), _exactly(str)(row[1])
    return (first, second), Link(Topology(row[2]), _exactly(int)(row[3]))


def _exactly(*kinds: type) -> Decode:
    """Return the decoder of a value whose JSON type is one of *kinds*."""

    def decoded(value: Any) -> Any:  # noqa: ANN401 (of one of *kinds*)
        # True is an int to isinstance.
        if type(value) not in kinds:
            raise ValueError(f"{kinds[0].__name__} expected, not {type(value).__name__}")
        return value

    return decoded


# The decoders of values that are neither dataclasses of ours nor forms of typing.
_SIMPLE: dict[Any, Decode] = {
    str: _exactly(str),
    int: _exactly(int),
    float: _exactly(float, int),
    bool: _exactly(bool),
    NodeModel: _node_model,
    Gpu: inventory_json.gpu,
    Inventory: inventory_json.decode,
    LeftOutDevice: inventory_json.left_out_device,
    MigDevice: inventory_json.mig_device,
}


@functools.cache
def _decoder(kind: Any) -> Decode:  # noqa: ANN401 (a type, or a form of typing)
    """Return the decoder of the values of *kind*."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        one = _decoder(arguments[0])
        return lambda value: None if value is None else one(value)
    if origin is tuple:
        item = _decoder(arguments[0])
        items = _exactly(list)
        return lambda value: tuple([item(element) for element in items(value)])
    assert origin is Mapping, kind
    return _mapping(arguments[1])


def _mapping(kind: Any) -> Decode:  # noqa: ANN401 (a type)
    one = _decoder(kind)
    members = _exactly(dict)
    return lambda value: {name: one(member) for name, member in members(value).items()}


def _dataclass(kind: Any) -> Decode:  # noqa: ANN401 (a dataclass)
    # The links of a NodeModel are decoded on their own.
    hints = typing.get_type_hints(kind)
    fields = {
        name: _exactly(dict) if name == "links" else _decoder(hint) for name, hint in hints.items()
    }

    def decoded(value: Any) -> Any:  # noqa: ANN401 (a *kind*)
        if type(value) is not dict or value.keys() != fields.keys():
            raise ValueError(f"an object with {', '.join(sorted(fields))} expected")
        return kind(**{name: decode(value[name]) for name, decode in fields.items()})

    return decoded
