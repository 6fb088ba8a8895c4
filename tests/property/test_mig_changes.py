# SPDX-License-Identifier: Apache-2.0
"""A change of MIG that fails or is killed at any step ends in the requested or the old state.

The engine runs in a forked process with the fake NVML, so that a kill ends it as a crash would.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clean_forks
from hypothesis import given, settings
from hypothesis import strategies as st
from node import mig_process
from node.node_host import gpu_lines
from simhost import artefacts

from gpunode.layouts import RequestedInstance
from gpunode.mig.states import Target

_SLICES = {"1g.10gb": 1, "1g.10gb+me": 1, "1g.20gb": 1, "2g.20gb": 2, "3g.40gb": 3, "4g.40gb": 4}
_GPUS = 2


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

    def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return what *function* returns in a process of its own, or a Killed."""
        return clean_forks.call(function, self._library, str(self._directory), *arguments)


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
        _, old = node.run(mig_process.apply, first)
        answer = node.run(mig_process.state)
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
        result = node.run(mig_process.apply, second)
        is_open = (Path(directory) / "journal.json").exists()
        node.clear_faults()
        end = node.run(mig_process.recover)
        requested = mig_process.plain(second)
        if isinstance(result, clean_forks.Killed):
            assert end in (old, requested)
        else:
            assert end == (requested if result[0] == "applied" else old)
            # A rollback that failed too is the work of the next call.
            assert result[1] == end or is_open
        if is_busy and busy is not None:
            after = node.run(mig_process.state)
            computes = [
                (gpu["index"], one["id"], each["id"])
                for gpu in after
                for one in gpu["instances"]
                for each in one["compute"]
            ]
            assert busy in computes
        pending = [[gpu["pending"], gpu["mode"]] for gpu in node.run(mig_process.state)]
        assert all(one == two for one, two in pending)
        assert not (Path(directory) / "journal.json").exists()
