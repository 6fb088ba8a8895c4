# SPDX-License-Identifier: Apache-2.0
"""What the device plugin offers after updates of the watcher and changes of the config."""

from __future__ import annotations

import dataclasses

import pytest
from nodes import gpu, mig_uuid, model, uuid

from gpunode import plugin_spec, roster
from gpunode.config import file as files
from gpunode.config.effective import Config, OptionText, effective
from gpunode.delivery import Delivery
from gpunode.devices import LayoutError
from gpunode.kubelet.backend import Unit
from gpunode.model import DriverState, DriverStatus, Event, EventKind, NodeModel, Update
from gpunode.plugin_spec import Names
from gpunode.services.plugin_state import PluginState

READY = DriverStatus(DriverState.READY, 0.0)
FOUR = "{timeSlicing: {resources: [{name: gpu, replicas: 4}]}}"


def _config(sharing: str = "", **options: str) -> Config:
    text = f"sharing: {sharing}" if sharing else ""
    given = {name: OptionText(value, name) for name, value in options.items()}
    return effective(given, files.parse(text, "c.yaml"))


def _units(state: PluginState) -> dict[str, list[tuple[str, bool]]]:
    """Return resource → (id, whether it is healthy) of each unit."""
    delivery = Delivery(state.config, ("envvar",), Names())
    return {
        name: [(unit.id, unit.healthy) for unit in published.units]
        for name, published in state.published(delivery).items()
    }


def _xid(xid: int, index: int = 0, instance: int | None = None) -> Event:
    return Event(EventKind.XID, 1.0, uuid(index), xid, instance)


def _state(node: NodeModel, config: Config, *events: Event) -> PluginState:
    state = PluginState(config, {})
    state.advance(Update(READY, node), 0.0)
    state.advance(Update(READY, node, events), 1.0)
    return state


def test_all_shares_of_a_sick_gpu_are_unhealthy() -> None:
    """Report 2200 of HAMi: only one share of a sick GPU went away."""
    state = _state(model(gpu(0), gpu(1)), _config(FOUR), _xid(48))
    assert _units(state) == {
        "nvidia.com/gpu": [
            *((f"{uuid(0)}::{i}", False) for i in range(4)),
            *((f"{uuid(1)}::{i}", True) for i in range(4)),
        ]
    }


def test_all_mig_devices_of_a_sick_gpu_are_unhealthy_and_one_of_a_sick_instance() -> None:
    """An event with a GPU instance is of that instance only."""
    node, config = model(gpu(0, mig=["1g.5gb"] * 2)), _config(mig_strategy="mixed")
    name = "nvidia.com/mig-1g.5gb"
    units = [mig_uuid(0, 0), mig_uuid(0, 1)]
    assert _units(_state(node, config, _xid(48)))[name] == [(unit, False) for unit in units]
    of_instance = _units(_state(node, config, _xid(48, instance=2)))[name]
    assert of_instance == [(units[0], True), (units[1], False)]


def test_a_lost_gpu_stays_as_an_unhealthy_unit() -> None:
    """The node keeps its capacity; the other GPUs are offered as before."""
    both, one = model(gpu(0), gpu(1)), model(gpu(1))
    state = _state(both, _config())
    state.advance(Update(READY, one, (Event(EventKind.LOST, 2.0, uuid(0)),)), 2.0)
    assert _units(state) == {"nvidia.com/gpu": [(uuid(0), False), (uuid(1), True)]}
    state.advance(Update(READY, both, (Event(EventKind.BACK, 3.0, uuid(0)),)), 3.0)
    state.advance(Update(READY, both), 603.0)
    assert _units(state) == {"nvidia.com/gpu": [(uuid(0), True), (uuid(1), True)]}


def test_another_driver_forgets_what_it_does_not_list() -> None:
    """A GPU that was removed from the machine is not lost."""
    state = _state(model(gpu(0), gpu(1)), _config())
    state.advance(Update(READY, model(gpu(1)), (Event(EventKind.DRIVER_CHANGED, 2.0),)), 2.0)
    assert _units(state) == {"nvidia.com/gpu": [(uuid(1), True)]}


def test_units_stay_while_the_driver_does_not_answer() -> None:
    """Unhealthy, not gone; healthy as soon as it answers."""
    node = model(gpu(0))
    state = _state(node, _config())
    state.advance(Update(DriverStatus(DriverState.HANGING, 2.0), node), 2.0)
    assert _units(state) == {"nvidia.com/gpu": [(uuid(0), False)]}
    state.advance(Update(READY, node), 3.0)
    assert _units(state) == {"nvidia.com/gpu": [(uuid(0), True)]}


def test_nothing_is_offered_before_the_driver_has_answered() -> None:
    """The units are not known."""
    state = PluginState(_config(), {})
    state.advance(Update(DriverStatus(DriverState.ABSENT, 0.0), None), 0.0)
    assert _units(state) == {}


def test_a_layout_that_does_not_fit_offers_nothing_until_it_does() -> None:
    """Another layout is not an error of the running plugin."""
    state = _state(model(gpu(0, mig=["1g.5gb"])), _config(mig_strategy="single"))
    assert len(_units(state)["nvidia.com/gpu"]) == 1
    state.advance(Update(READY, model(gpu(0, mig=["1g.5gb", "2g.10gb"]))), 2.0)
    assert _units(state) == {}
    assert "more than one MIG device type" in str(state.layout_error)
    state.advance(Update(READY, model(gpu(0, mig=["2g.10gb"]))), 3.0)
    assert state.layout_error is None
    assert len(_units(state)["nvidia.com/gpu"]) == 1


def test_a_new_config_is_used_only_if_it_fits() -> None:
    """A config that cannot be used must not take away what is offered."""
    state = _state(model(gpu(0), gpu(1, mig=["1g.5gb"])), _config(mig_strategy="mixed"))
    before = _units(state)
    with pytest.raises(LayoutError):
        state.set_config(_config(mig_strategy="single"))
    assert _units(state) == before
    assert state.config.mig_strategy == "mixed"
    state.set_config(_config(FOUR))
    assert len(_units(state)["nvidia.com/gpu"]) == 8


def test_if_no_config_fits_the_newest_one_counts() -> None:
    """It is the one that an operator expects when the MIG devices are made."""
    state = _state(model(gpu(0, mig=[])), _config(mig_strategy="single"))
    assert state.layout_error is not None
    state.set_config(_config(FOUR, mig_strategy="single"))
    assert state.layout_error is not None
    state.advance(Update(READY, model(gpu(0, mig=["1g.5gb"]))), 2.0)
    assert len(_units(state)["nvidia.com/gpu"]) == 4


def test_a_device_without_a_cdi_name_is_unhealthy_with_cdi() -> None:
    """A container would not get it; with another strategy it may."""
    state = _state(model(gpu(0, numa=1), gpu(1)), _config())
    by_cdi = Delivery(state.config, ("cdi-cri",), Names({uuid(0): uuid(0)}))
    assert state.published(by_cdi)["nvidia.com/gpu"].units == (
        Unit(uuid(0), healthy=True, numa_nodes=(1,)),
        Unit(uuid(1), healthy=False),
    )
    assert state.unhealthy(by_cdi) == {uuid(1): "no CDI spec of the device plugin has it"}
    assert state.unhealthy(dataclasses.replace(by_cdi, strategies=("envvar",))) == {}


def test_a_roster_keeps_lost_gpus_in_their_place() -> None:
    """By index, and not those that are not lost."""
    before = model(gpu(0), gpu(1), gpu(2))
    after = roster.with_lost(model(gpu(2)), before, {uuid(0)})
    assert [item.gpu.index for item in after.gpus] == [0, 2]
    assert roster.with_lost(before, None, {uuid(0)}) is before
    assert plugin_spec.names_of(after.inventory, Config()).devices == {uuid(2): uuid(2)}  # type: ignore[arg-type]
