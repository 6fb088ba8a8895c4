# SPDX-License-Identifier: Apache-2.0
"""Changes of MIG whose NVML is in the same process, so that a kill ends both: for forks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema  # noqa: F401 (imported before the forks)
import pynvml  # noqa: F401 (imported before the forks, which load NVML)
from node.fake_node_api import NAMESPACE, NODE

from gpunode.api.client import connect
from gpunode.api.mig_node import MigNode
from gpunode.mig import states
from gpunode.mig.engine import Engine
from gpunode.mig.host import Host
from gpunode.mig.manager import Manager, Options, State
from gpunode.mig.operations import Operations
from gpunode.mig.states import Target
from gpunode.mig.writer import WriteError
from gpuruntime.discover import user_space
from gpuruntime.discover.nvml_calls import NvmlError
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import GpuRuntimeError

_PATIENCE_S = 30


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


# ---- the engine ----


class _NoHooks:
    def run(self, point: str) -> None:
        pass


def plain(targets: dict[int, Target]) -> list[Any]:
    """Return *targets* as lists that can be compared."""
    return [
        [
            index,
            target.mode,
            sorted([one.profile, sorted(one.compute_slices)] for one in target.instances or ()),
        ]
        for index, target in sorted(targets.items())
    ]


def _present(writer: Direct) -> list[Any]:
    return plain(
        {index: state.target for index, state in states.gpu_states(writer.call("state")).items()}
    )


def _engine(library: str, directory: str) -> tuple[Engine, Direct]:
    """Return an engine whose NVML has the data of *directory*, and its writer."""
    os.environ["FAKENVML_CONF"] = f"{directory}/fakenvml.conf"
    direct = Direct(library)

    @contextmanager
    def opened() -> Iterator[Any]:
        yield direct

    # A reset that leaves a pending mode pending.
    return Engine(opened, directory, lambda _: None, _NoHooks()), direct


def apply(library: str, directory: str, targets: dict[int, Target]) -> tuple[str, list[Any]]:
    """Change the GPUs to *targets*; return "applied" or "refused", and the state."""
    engine, writer = _engine(library, directory)
    try:
        engine.apply(writer, targets)
    except GpuRuntimeError:
        return "refused", _present(writer)
    return "applied", _present(writer)


def recover(library: str, directory: str) -> list[Any]:
    """End the change that was cut off; return the state."""
    engine, writer = _engine(library, directory)
    engine.recover()
    return _present(writer)


def state(library: str, directory: str) -> Any:
    """Return what NVML says of the GPUs."""
    return _engine(library, directory)[1].call("state")


# ---- the manager ----


class _DirectHost(Host):
    """A host whose NVML is called by this process itself."""

    def writer(self) -> Any:
        """Return the operations of this process."""
        return contextlib.nullcontext(Direct(user_space.find_nvml(DriverRoot(self.driver_root))))


def run_manager(kubeconfig: str, root: str, state_directory: str, options: dict[str, Any]) -> None:
    """Run a manager with *options* until it says success; raise AssertionError if it does not."""
    stop, wake = threading.Event(), threading.Event()
    node = MigNode(connect(kubeconfig), NODE, NAMESPACE)
    host = _DirectHost(root, state_directory, 20)
    manager = Manager(node, host, Options(**options), stop, wake)
    threading.Thread(target=manager.run, daemon=True).start()
    deadline = time.monotonic() + _PATIENCE_S
    while manager.state is not State.SUCCESS:
        assert time.monotonic() < deadline
        time.sleep(0.02)
