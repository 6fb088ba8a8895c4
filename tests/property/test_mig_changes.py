# SPDX-License-Identifier: Apache-2.0
"""A change of MIG that fails or is killed at any step ends in the requested or the old state.

The engine runs in a forked process with the fake NVML, so that a kill ends it as a crash would.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml  # noqa: F401 (imported before the forks, which load NVML)
from hypothesis import given, settings
from hypothesis import strategies as st
from node.mig_writer import Direct
from node.node_host import gpu_lines
from simhost import artefacts

from gpunode.layouts import RequestedInstance
from gpunode.mig import states
from gpunode.mig.engine import Engine
from gpunode.mig.states import Target
from gpuruntime.errors import GpuRuntimeError

_SLICES = {"1g.10gb": 1, "1g.10gb+me": 1, "1g.20gb": 1, "2g.20gb": 2, "3g.40gb": 3, "4g.40gb": 4}
_GPUS = 2


class _NoHooks:
    def run(self, point: str) -> None:
        pass


class _Node:
    """Two GPUs whose state is in *directory*."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = directory / "fakenvml.conf"
        self._library = str(
            artefacts.driver_tree(artefacts.DEFAULT_VERSION)
            / artefacts.LIBRARY_DIRECTORY
            / "libnvidia-ml.so.1"
        )
        self._data.write_text("\n".join(["driver 1", *gpu_lines(_GPUS), ""]))

    def add(self, line: str) -> None:
        """Append *line* to the data."""
        with self._data.open("a") as stream:
            stream.write(f"{line}\n")

    def clear_faults(self) -> None:
        """Remove faults from the data."""
        lines = self._data.read_text().splitlines(keepends=True)
        self._data.write_text("".join(x for x in lines if not x.startswith("fault")))

    def run(self, work: Callable[[Engine, Direct], object]) -> Any:
        """Return what *work* returned in a forked process, "killed" if the process was killed."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.environ["FAKENVML_CONF"] = str(self._data)
                direct = Direct(self._library)

                @contextmanager
                def opened() -> Any:
                    yield direct

                # A reset that leaves a pending mode pending.
                engine = Engine(opened, str(self._directory), lambda _: None, _NoHooks())
                os.write(writer, json.dumps(work(engine, direct)).encode())
            except BaseException:  # noqa: BLE001 (the process must not return into pytest)
                os.write(writer, json.dumps(traceback.format_exc()).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
        _, status = os.waitpid(pid, 0)
        return "killed" if os.WIFSIGNALED(status) else json.loads(data)


def _plain(targets: dict[int, Target]) -> list[Any]:
    return [
        [
            index,
            target.mode,
            sorted([one.profile, sorted(one.compute_slices)] for one in target.instances or ()),
        ]
        for index, target in sorted(targets.items())
    ]


def _present(writer: Direct) -> dict[int, Target]:
    return {
        index: state.target for index, state in states.gpu_states(writer.call("state")).items()
    }


def _apply(targets: dict[int, Target]) -> Callable[[Engine, Direct], object]:
    def work(engine: Engine, writer: Direct) -> object:
        try:
            engine.apply(writer, targets)
        except GpuRuntimeError:
            return ["refused", _plain(_present(writer))]
        return ["applied", _plain(_present(writer))]

    return work


def _recover(engine: Engine, writer: Direct) -> object:
    engine.recover()
    return _plain(_present(writer))


def _state(_engine: Engine, writer: Direct) -> Any:
    return writer.call("state")


@st.composite
def _instance(draw: st.DrawFn) -> RequestedInstance:
    profile = draw(st.sampled_from(sorted(_SLICES)))
    slices = _SLICES[profile]
    parts = draw(st.sampled_from([(slices,), (1,) * slices, ()]))
    return RequestedInstance(profile, parts)


_TARGET = st.one_of(
    st.just(Target(mode=False, instances=())),
    st.lists(_instance(), max_size=4).map(lambda those: Target(True, tuple(those))),
)
_TARGETS = st.tuples(_TARGET, _TARGET).map(lambda pair: dict(enumerate(pair)))
_FAULTS = st.tuples(
    st.sampled_from(["write-fails", "write-kills", "write-killed"]), st.integers(1, 14)
)


@given(
    first=_TARGETS,
    second=_TARGETS,
    fault=_FAULTS,
    is_busy=st.booleans(),
    needs_reset=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_end_state_is_the_requested_or_the_old_one(
    first: dict[int, Target],
    second: dict[int, Target],
    fault: tuple[str, int],
    *,
    is_busy: bool,
    needs_reset: bool,
) -> None:
    """After a fault and the next call, and no instance in use is destroyed."""
    with tempfile.TemporaryDirectory() as directory:
        node = _Node(Path(directory))
        _, old = node.run(_apply(first))
        answer = node.run(_state)
        busy = next(
            (
                (gpu["index"], one["id"], each["id"])
                for gpu in answer
                for one in gpu["instances"]
                for each in one["compute"]
            ),
            None,
        )
        if is_busy and busy is not None:
            node.add(f"process {busy[0]} 1 100 {busy[1]} {busy[2]}")
        if needs_reset:
            node.add("migreset 1")
        node.add(f"fault {fault[0]} {fault[1]} 999")
        result = node.run(_apply(second))
        is_open = (Path(directory) / "journal.json").exists()
        node.clear_faults()
        end = node.run(_recover)
        requested = _plain(second)
        if result == "killed":
            assert end in (old, requested)
        else:
            assert end == (requested if result[0] == "applied" else old)
            # A rollback that failed too is the work of the next call.
            assert result[1] == end or is_open
        if is_busy and busy is not None:
            after = node.run(_state)
            computes = [
                (gpu["index"], one["id"], each["id"])
                for gpu in after
                for one in gpu["instances"]
                for each in one["compute"]
            ]
            assert busy in computes
        pending = [[gpu["pending"], gpu["mode"]] for gpu in node.run(_state)]
        assert all(one == two for one, two in pending)
        assert not (Path(directory) / "journal.json").exists()
