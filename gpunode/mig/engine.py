# SPDX-License-Identifier: Apache-2.0
"""Change GPUs to their targets: all of them, or none.

All plans are made before the first step. The journal has the old and the new state from before the
first step until the end, so that the next call can return to the old state after a crash.

An instance can come into use between the last look and its end: NVML then refuses the step, and
the change is undone like after any other error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gpunode import layouts
from gpunode.layouts import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstance,
    DestroyGpuInstance,
    LayoutError,
    Step,
)
from gpunode.mig import journal, states
from gpunode.mig.commands import CommandError
from gpunode.mig.states import GpuState, Target
from gpunode.mig.writer import WriteError, Writer
from gpuruntime.errors import GpuRuntimeError, RequestError

Reset = Callable[[Sequence[str]], None]
OpenWriter = Callable[[], AbstractContextManager[Writer]]

_IN_USE = 19  # NVML_ERROR_IN_USE


class RebootNeededError(GpuRuntimeError):
    """The MIG mode of a GPU changes only at a reset, or a reboot."""

    exit_code = 3


class InUseError(LayoutError):
    """What has to be destroyed, or the GPU whose mode has to change, is in use."""


class Hooks(Protocol):
    """What is run before the changes."""

    def run(self, point: str) -> None:
        """Run the hooks of *point*; raise GpuRuntimeError."""


class Engine:
    """Changes through writers of *open_writer*, with the journal in *directory*.

    The caller holds the lock of the directory. *reset* resets the GPUs of PCI addresses, None to
    leave modes pending.
    """

    def __init__(
        self, open_writer: OpenWriter, directory: str, reset: Reset | None, hooks: Hooks
    ) -> None:
        self._open_writer = open_writer
        self._journal = f"{directory}/journal.json"
        self._reset = reset
        self._hooks = hooks

    def recover(self) -> bool:
        """End the change of a call that was cut off; return whether there was one.

        The GPUs get their old state, or the new one if only that is possible. Raises
        GpuRuntimeError if neither is, or if one of the GPUs does not answer; the journal then
        remains.
        """
        changes = journal.load(self._journal)
        if not changes:
            return False
        with self._open_writer() as writer:
            indices = {state.uuid: index for index, state in _states(writer).items()}
            missing = sorted(set(changes) - set(indices))
            if missing:
                raise WriteError(
                    f"a change of MIG was cut off, and {', '.join(missing)} does not answer now",
                    f'reset the GPU; if it was removed for good, remove "{self._journal}"',
                )
            present = {uuid: indices[uuid] for uuid in changes}
            new = {index: changes[uuid][1] for uuid, index in present.items()}
            if not _unmet(_states(writer), new):
                journal.remove(self._journal)
                return True
            try:
                self._change(writer, {index: changes[uuid][0] for uuid, index in present.items()})
            except GpuRuntimeError:
                self._change(writer, new)
        journal.remove(self._journal)
        return True

    def apply(self, writer: Writer, targets: Mapping[int, Target]) -> bool:
        """Change the GPUs *targets*, by index; return whether there was a change.

        Raises GpuRuntimeError: the GPUs then have their old state again, or, if the text says
        so, the next call restores it. A RebootNeededError leaves modes pending if this engine has
        no reset.
        """
        before = _states(writer)
        check(before, targets)
        unmet = _unmet(before, targets)
        if not unmet:
            return False
        if any(not target.has_mode(before[index]) for index, target in unmet.items()):
            self._hooks.run("pre-apply-mode")
        if any(target.instances is not None for target in unmet.values()):
            self._hooks.run("pre-apply-config")
        old = {index: before[index].target for index in unmet}
        journal.save(
            self._journal, {before[index].uuid: (old[index], unmet[index]) for index in unmet}
        )
        try:
            self._change(writer, unmet)
        except GpuRuntimeError as error:
            if isinstance(error, RebootNeededError) and self._reset is None:
                journal.remove(self._journal)
            else:
                self._roll_back(old, error)
            raise
        journal.remove(self._journal)
        return True

    def _roll_back(self, old: Mapping[int, Target], error: GpuRuntimeError) -> None:
        """Return to *old* with a new process, for that of before may have ended or hang."""
        try:
            with self._open_writer() as writer:
                self._change(writer, old)
        except GpuRuntimeError as second:
            raise WriteError(
                f"{error.message}; the old layout could not be restored: {second.message}",
                "remove the cause, then run the command again: it restores the old layout first",
            ) from error
        journal.remove(self._journal)

    def _change(self, writer: Writer, targets: Mapping[int, Target]) -> None:
        self._change_modes(writer, targets)
        now = _states(writer)
        check(now, targets)
        plans = {index: _steps(now[index], target) for index, target in targets.items()}
        for index, steps in plans.items():
            for step in steps:
                _execute(writer, index, step)
        unmet = _unmet(_states(writer), targets)
        if unmet:
            raise WriteError(
                f"the layout of GPU {', '.join(map(str, unmet))} is not the requested one after "
                "all steps succeeded",
                'look at "gpu-node mig status": another program may change MIG',
            )

    def _change_modes(self, writer: Writer, targets: Mapping[int, Target]) -> None:
        now = _states(writer)
        for index, target in targets.items():
            if target.has_mode(now[index]):
                continue
            if now[index].mode != target.mode:
                for step in _clearing(now[index]):
                    _execute(writer, index, step)
            with _named_in_use(writer, index):
                writer.call("set_mode", gpu=index, enabled=target.mode)
        now = _states(writer)
        waiting = [index for index, target in targets.items() if not target.has_mode(now[index])]
        if not waiting:
            return
        gpus = ", ".join(map(str, waiting))
        if self._reset is None:
            raise RebootNeededError(
                f"the MIG mode of GPU {gpus} changes at the next reset",
                "reset the GPUs without --skip-reset, or reboot the node, then apply again",
            )
        try:
            self._reset([now[index].bus_id for index in waiting])
            now = _states(writer)
            waiting = [index for index in waiting if not targets[index].has_mode(now[index])]
            problem = "it is still pending after a reset" if waiting else ""
        except CommandError as error:
            problem = error.message
        if problem:
            raise RebootNeededError(
                f"the MIG mode of GPU {gpus} cannot change now: {problem}",
                "apply with --skip-reset, reboot the node, then apply again",
            )


def check(present: Mapping[int, GpuState], targets: Mapping[int, Target]) -> None:
    """Raise GpuRuntimeError if a target cannot be met, before anything is changed."""
    for index, target in targets.items():
        if index not in present:
            raise RequestError(
                f"GPU {index} does not answer", 'look at "nvidia-smi", and reset the GPU'
            )
        state = present[index]
        if state.mode != target.mode and state.all_holders:
            raise InUseError(
                f"GPU {index}: the MIG mode cannot change while the GPU is in use by "
                f"{', '.join(state.all_holders)}",
                "end what uses it, then apply the config again",
            )
        try:
            _steps(state, target)
        except layouts.PlaceInUseError as error:
            raise InUseError(f"GPU {index}: {error.message}", error.hint) from None
        except LayoutError as error:
            raise LayoutError(f"GPU {index}: {error.message}", error.hint) from None


def described(present: Mapping[int, GpuState], targets: Mapping[int, Target]) -> list[str]:
    """Return the steps to *targets* in words, in order."""
    lines = []
    for index, target in targets.items():
        state = present[index]
        if not target.has_mode(state):
            if state.mode != target.mode:
                lines += [f"GPU {index}: {_words(step)}" for step in _clearing(state)]
            lines.append(f"GPU {index}: {'enable' if target.mode else 'disable'} MIG mode")
    for index, target in targets.items():
        lines += [f"GPU {index}: {_words(step)}" for step in _steps(present[index], target)]
    return lines


def _steps(state: GpuState, target: Target) -> tuple[Step, ...]:
    """Return the steps of the layout; a change of the mode comes first and leaves no instance."""
    if target.instances is None or not target.mode:
        return ()
    present = state.instances if state.mode == target.mode else ()
    return layouts.plan(states.without_placements(state.profiles), present, target.instances).steps


def _clearing(state: GpuState) -> list[Step]:
    steps: list[Step] = []
    for instance in state.instances:
        steps += (
            DestroyComputeInstance(instance.id, one.id, one.slices)
            for one in instance.compute_instances
        )
        steps.append(DestroyGpuInstance(instance.id, instance.profile, instance.start))
    return steps


def _execute(writer: Writer, gpu: int, step: Step) -> None:
    with _named_in_use(writer, gpu):
        _call(writer, gpu, step)


@contextlib.contextmanager
def _named_in_use(writer: Writer, gpu: int) -> Iterator[None]:
    """Turn NVML's error for something in use into InUseError, with what uses the GPU."""
    try:
        yield
    except WriteError as error:
        if error.code != _IN_USE:
            raise
        state = _states(writer).get(gpu)
        holders = state.all_holders if state is not None else ()
        raise InUseError(
            f"GPU {gpu} came into use during the change, by "
            f"{', '.join(holders) or 'a process that NVML does not list'}",
            "end what uses it, then apply the config again",
        ) from error


def _call(writer: Writer, gpu: int, step: Step) -> None:
    if isinstance(step, DestroyComputeInstance):
        writer.call(
            "destroy_compute_instance", gpu=gpu, instance=step.gpu_instance, compute=step.id
        )
    elif isinstance(step, DestroyGpuInstance):
        writer.call("destroy_gpu_instance", gpu=gpu, instance=step.id)
    elif isinstance(step, CreateComputeInstance):
        writer.call(
            "create_compute_instance", gpu=gpu, instance=step.gpu_instance, slices=step.slices
        )
    else:
        instance = writer.call(
            "create_gpu_instance", gpu=gpu, profile=step.profile, start=step.start
        )
        for slices in step.compute_slices:
            writer.call("create_compute_instance", gpu=gpu, instance=instance, slices=slices)


def _words(step: Step) -> str:
    if isinstance(step, DestroyComputeInstance):
        return f"destroy compute instance {step.id} of GPU instance {step.gpu_instance}"
    if isinstance(step, DestroyGpuInstance):
        return f"destroy GPU instance {step.id} ({step.profile} at slice {step.start})"
    if isinstance(step, CreateGpuInstance):
        slices = ", ".join(map(str, step.compute_slices))
        parts = f"compute instances of {slices} slices"
        return f"create {step.profile} at slice {step.start} with {parts}"
    return f"create a compute instance of {step.slices} slices in GPU instance {step.gpu_instance}"


def _unmet(present: Mapping[int, GpuState], targets: Mapping[int, Target]) -> dict[int, Target]:
    return {
        index: target
        for index, target in targets.items()
        if index not in present or not target.is_met(present[index])
    }


def _states(writer: Writer) -> dict[int, GpuState]:
    return states.gpu_states(writer.call("state"))
