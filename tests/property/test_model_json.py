# SPDX-License-Identifier: Apache-2.0
"""Laws of an inventory in JSON: it comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuruntime import model
from gpuruntime.snapshots import inventory_json

pytestmark = pytest.mark.property

# Names of files are any bytes, of which Python makes lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["", "/lib/\udcff", "\n"]
)
NUMBER = st.integers(-1, 1 << 40)


def many(one: st.SearchStrategy[Any], most: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return tuples of a few of *one*."""
    return st.lists(one, max_size=most).map(tuple)


TEXTS = many(TEXT)
MIG = st.builds(
    model.MigDevice, index=NUMBER, uuid=TEXT, gpu_instance=NUMBER, compute_instance=NUMBER
)
GPU = st.builds(
    model.Gpu,
    index=NUMBER,
    uuid=TEXT,
    minor=NUMBER,
    name=TEXT,
    bus_id=TEXT,
    mig_enabled=st.booleans(),
    mig_devices=many(MIG),
    architecture=TEXT,
    brand=TEXT,
    coherent=st.booleans(),
    memory_node=NUMBER,
)
NODE = st.builds(model.Node, host_path=TEXT, container_path=TEXT, group=NUMBER)
GPU_NODES = st.builds(
    model.GpuNodes,
    gpu=GPU,
    node=NODE,
    drm=many(NODE),
    links=TEXTS,
    mig=many(st.tuples(MIG, NODE, NODE)),
)
LIBRARY = st.builds(
    model.Library,
    host_path=TEXT,
    container_path=TEXT,
    soname=TEXT,
    abi=TEXT,
    capability=TEXT,
    needed=TEXTS,
    dev_link=TEXT,
    links=TEXTS,
)
FILE = st.builds(
    model.File, kind=TEXT, host_path=TEXT, container_path=TEXT, capability=TEXT, links=TEXTS
)
DRIVER = st.builds(
    model.Driver, version=TEXT, libraries=many(LIBRARY), files=many(FILE), problems=TEXTS
)
LEFT_OUT = st.builds(
    model.LeftOutDevice, name=TEXT, uuid=TEXT, bus_id=TEXT, reason=TEXT, hint=TEXT
)
INVENTORY = st.builds(
    model.Inventory,
    driver=DRIVER,
    gpus=many(GPU_NODES),
    control_nodes=many(NODE),
    management_nodes=many(NODE),
    features=st.dictionaries(st.sampled_from(model.FEATURES), many(NODE)),
    gds_files=many(FILE),
    cuda_version=TEXT,
    problems=TEXTS,
    left_out=many(LEFT_OUT),
)
JUNK = st.sampled_from([None, True, 0, -1, 1.0, "x", [], ["x"], {}, {"x": 1}])


def through_text(plain: Any) -> Any:
    """Return what is read of what is written."""
    return json.loads(json.dumps(plain))


@given(INVENTORY)
def test_an_inventory_comes_back_as_it_was(inventory: model.Inventory) -> None:
    """Field by field, through the text of a file."""
    back = inventory_json.decode(through_text(inventory_json.encode(inventory)))
    assert back == inventory
    assert repr(back) == repr(inventory)


def places(plain: Any) -> list[tuple[Any, Any]]:
    """Return each (container, key) of a tree of JSON."""
    keys = plain.keys() if isinstance(plain, dict) else range(len(plain))
    found: list[tuple[Any, Any]] = [(plain, key) for key in keys]
    for key in keys:
        if isinstance(plain[key], (dict, list)):
            found += places(plain[key])
    return found


@given(INVENTORY, st.data())
def test_what_was_damaged_is_refused_or_is_another_inventory(
    inventory: model.Inventory, data: st.DataObject
) -> None:
    """Whatever is accepted is exactly what would be written of it."""
    plain = copy.deepcopy(inventory_json.encode(inventory))
    where, key = data.draw(st.sampled_from(places(plain)))
    match data.draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            where[key] = data.draw(JUNK)
        case "remove":
            del where[key]
        case "add" if isinstance(where, dict):
            where["other"] = data.draw(JUNK)
        case "add":
            where.insert(key, data.draw(JUNK))
    try:
        back = inventory_json.decode(plain)
    except ValueError:
        return
    assert json.dumps(inventory_json.encode(back), sort_keys=True) == json.dumps(
        plain, sort_keys=True
    )


@pytest.mark.parametrize("junk", [None, True, 1, "x", [], {}, {"driver": {}}])
def test_what_is_no_inventory_is_refused(junk: object) -> None:
    """A file of another version, or of somebody else."""
    with pytest.raises(ValueError, match="expected"):
        inventory_json.decode(junk)


def test_each_field_is_needed_and_none_besides() -> None:
    """What an older version lacks, and what a newer one has, is no inventory of this one."""
    node = model.Node(host_path="/a", container_path="/b")
    driver = model.Driver(version="1", libraries=(), files=())
    plain = inventory_json.encode(model.Inventory(driver=driver, gpus=(), control_nodes=(node,)))
    for name in plain:
        with pytest.raises(ValueError, match=f"{name}.* expected"):
            inventory_json.decode({key: value for key, value in plain.items() if key != name})
    with pytest.raises(ValueError, match="expected"):
        inventory_json.decode({**plain, "more": []})
    without_one = {key: value for key, value in plain["features"].items() if key != "imex"}
    with pytest.raises(ValueError, match=r"imex.* expected"):
        inventory_json.decode({**plain, "features": without_one})
    broken = copy.deepcopy(plain)
    broken["control_nodes"][0]["group"] = False
    with pytest.raises(ValueError, match="int expected, not bool"):
        inventory_json.decode(broken)
