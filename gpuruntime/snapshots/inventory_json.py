# SPDX-License-Identifier: Apache-2.0
"""Encode and decode an inventory as JSON, for its snapshot and for `gpuruntime info`."""

from __future__ import annotations

from gpuruntime import model
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Decode = Callable[[Any], Any]


def encode(inventory: model.Inventory) -> dict[str, Any]:
    """Return *inventory* as dicts and lists of strings and numbers."""
    document: dict[str, Any] = plain(inventory)
    return document


def decode(document: object) -> model.Inventory:
    """Return the inventory that `encode` converted to *document*; raise ValueError if not valid.

    Only the structure is checked: a caller that reads a file must check that it is trusted.
    """
    inventory: model.Inventory = _inventory(document)
    return inventory


def plain(value: Any) -> Any:  # noqa: ANN401 (a field, and its JSON value)
    """Return a value of model, or a field of one, as dicts and lists of strings and numbers."""
    if isinstance(value, Record):
        return {name: plain(getattr(value, name)) for name in value.__slots__}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def _exactly(kind: type) -> Decode:
    """Return the decoder of a value whose JSON type is *kind*."""

    def decoded(value: Any) -> Any:  # noqa: ANN401 (a *kind*)
        # True is an int to isinstance.
        if type(value) is not kind:
            raise ValueError(f"{kind.__name__} expected, not {type(value).__name__}")
        return value

    return decoded


def _many(one: Decode) -> Decode:
    """Return the decoder of a tuple of any length, whose items *one* decodes."""

    def decoded(value: Any) -> Any:  # noqa: ANN401 (a tuple)
        return tuple([one(item) for item in _list(value)])

    return decoded


def _each(*parts: Decode) -> Decode:
    """Return the decoder of a tuple with one item for each of *parts*."""

    def decoded(value: Any) -> Any:  # noqa: ANN401 (a tuple)
        if len(_list(value)) != len(parts):
            raise ValueError(f"{len(parts)} items expected, not {len(value)}")
        return tuple([part(item) for part, item in zip(parts, value)])

    return decoded


def _by_name(names: tuple[str, ...], one: Decode) -> Decode:
    """Return the decoder of a dict with the keys *names*, whose values *one* decodes."""

    def decoded(value: Any) -> Any:  # noqa: ANN401 (a dict)
        _check_names(value, names)
        return {name: one(value[name]) for name in names}

    return decoded


def _record(cls: Any, **fields: Decode) -> Decode:  # noqa: ANN401 (a subclass of Record)
    """Return the decoder of *cls*, each of whose fields has a decoder in *fields*."""

    def decoded(value: Any) -> Any:  # noqa: ANN401 (a *cls*)
        _check_names(value, fields)
        return cls(**{name: decode(value[name]) for name, decode in fields.items()})

    return decoded


def _check_names(value: Any, names: Any) -> None:  # noqa: ANN401 (JSON, and names of fields)
    if type(value) is not dict or value.keys() != dict.fromkeys(names).keys():
        raise ValueError(f"an object with {', '.join(sorted(names))} expected")


# Decoders of a value each: they raise ValueError if its structure is not valid.
_list = _exactly(list)
_text, _number, _flag = _exactly(str), _exactly(int), _exactly(bool)
_texts = _many(_text)
mig_device = _record(
    model.MigDevice,
    index=_number,
    uuid=_text,
    gpu_instance=_number,
    compute_instance=_number,
)
gpu = _record(
    model.Gpu,
    index=_number,
    uuid=_text,
    minor=_number,
    name=_text,
    bus_id=_text,
    mig_enabled=_flag,
    mig_devices=_many(mig_device),
    architecture=_text,
    brand=_text,
    coherent=_flag,
    memory_node=_number,
)
_node = _record(model.Node, host_path=_text, container_path=_text, group=_number)
_nodes = _many(_node)
_gpu_nodes = _record(
    model.GpuNodes,
    gpu=gpu,
    node=_node,
    drm=_nodes,
    links=_texts,
    mig=_many(_each(mig_device, _node, _node)),
    others=_nodes,
)
_library = _record(
    model.Library,
    host_path=_text,
    container_path=_text,
    soname=_text,
    abi=_text,
    capability=_text,
    needed=_texts,
    dev_link=_text,
    links=_texts,
)
_file = _record(
    model.File,
    kind=_text,
    host_path=_text,
    container_path=_text,
    capability=_text,
    links=_texts,
)
_driver = _record(
    model.Driver,
    version=_text,
    libraries=_many(_library),
    files=_many(_file),
    problems=_texts,
    platform=_text,
)
left_out_device = _record(
    model.LeftOutDevice,
    name=_text,
    uuid=_text,
    bus_id=_text,
    reason=_text,
    hint=_text,
)
_inventory = _record(
    model.Inventory,
    driver=_driver,
    gpus=_many(_gpu_nodes),
    control_nodes=_nodes,
    management_nodes=_nodes,
    features=_by_name(model.FEATURES, _nodes),
    gds_files=_many(_file),
    cuda_version=_text,
    problems=_texts,
    left_out=_many(left_out_device),
    decision=_text,
)
