# SPDX-License-Identifier: Apache-2.0
"""The launcher for aarch64, under an emulator: the tests of the other modules again.

The recorders are native: an emulated exec is a real exec on this machine.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import platform
import shutil
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from containers import seen
from containers.ways import WAYS
from effort import IS_FULL
from launcher import (
    test_choice_of_runtime,
    test_command_lines,
    test_creates,
    test_hook_role,
    test_interpreter,
    test_roles,
)
from launcher.conftest import (
    FREESTANDING,
    LAUNCHER,
    VERSION,
    Bench,
    Workshop,
    compile_c,
    constants,
)

if TYPE_CHECKING:
    from launcher.conftest import Outcome

CROSS_CC = "aarch64-linux-gnu-gcc"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
EM_AARCH64 = b"\xb7\x00"
# The tests that an emulator cannot run.
NATIVE = {
    # /proc/self/exe is the emulator.
    *("test_launcher_never_becomes_itself", "test_python_reports_when_only_ourselves_are_left"),
    "test_runtime_names_start_the_shim",
    # It tells variables apart by their names, and needs an argument.
    *("test_first_of_two_paths_counts", "test_no_arguments_at_all_fails_closed"),
    # Its own system calls would be traced.
    *("test_descriptors_are_closed_without_close_range", "test_control_sees_relative_opens"),
    # The tables are enough.
    "test_what_the_launcher_passes_through_creates_nothing",
    "test_the_launcher_finds_what_is_there",
    # These make processes without the emulator, and without its files.
    "test_without_proc_nobody_guesses_which_it_is",
    "test_files_of_the_host_s_root_are_believed_in_a_user_namespace_without_him",
}
MODULES = (
    *(test_choice_of_runtime, test_command_lines, test_creates, test_hook_role),
    *(test_interpreter, test_roles),
)
# Of a test with more cases, one of so many: what a table shows, the native launcher shows in full.
MOST, ONE_OF = 16, 4
# The fixtures of those modules: these two use the bench of this module.
bundle = test_creates.bundle
tree = test_interpreter.tree

if shutil.which(CROSS_CC) is None:
    pytest.skip(f"{CROSS_CC} is not installed: no aarch64 launcher", allow_module_level=True)
if EMULATOR is None:
    pytest.skip(
        "qemu-aarch64-static is not installed: the aarch64 launcher is not run",
        allow_module_level=True,
    )


class CrossWorkshop(Workshop):
    """Builds the launcher for aarch64."""

    def compile_launcher(
        self, output: Path, *, extra: tuple[str, ...] = (), **changed: str
    ) -> None:
        """Compile the launcher with the cross compiler."""
        super().compile_launcher(output, cc=CROSS_CC, extra=extra, **changed)


class EmulatedBench(Bench):
    """Starts aarch64 programs by the emulator, and native programs directly."""

    def start(self, command: list[Any], *, program: str | None = None, **how: Any) -> Outcome:
        """Start *command*; see `Bench`."""
        executable = program or command[0]
        with Path(executable).open("rb") as stream:
            if stream.read(20)[18:] != EM_AARCH64:
                return super().start(command, program=program, **how)
        emulated = ["qemu", "-0", command[0], executable, *command[1:]]
        return super().start(emulated, program=EMULATOR, **how)


@pytest.fixture(scope="session")
def workshop(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Return a second workshop, with the same recorders."""
    made = CrossWorkshop(tmp_path_factory.mktemp("aarch64"))
    for name in ("recorder", "caller"):
        shutil.copy(workshop.path(name), made.path(name))
    made.build("plain")
    return made


@pytest.fixture(scope="module", autouse=True)
def _reserved_signals() -> None:
    """Have the two signals that C libraries keep for themselves as they are by default.

    GNU make starts programs with both ignored. The launcher undoes that, but the emulator keeps
    them for itself, too, and has the launcher's call come to nothing.
    """
    number = {"x86_64": 13, "aarch64": 134}[platform.machine()]
    default = (ctypes.c_ulong * 4)()
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    for signal_number in (32, 33):
        # rt_sigaction(2) itself: the function of the C library refuses these.
        assert syscall(number, signal_number, default, None, 8) == 0


@pytest.fixture
def bench(bench: Bench) -> Bench:
    """Return the programs of that workshop."""
    return EmulatedBench(bench.workshop)


def emulated(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a test, without the build that the sanitisers watch."""
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    functools.update_wrapper(copied, function)
    del copied.__wrapped__  # type: ignore[attr-defined]
    marks: list[pytest.Mark] = getattr(function, "pytestmark", [])
    copied.pytestmark = [_reduced(mark) for mark in marks]  # type: ignore[attr-defined]
    return copied


def _reduced(mark: pytest.Mark) -> pytest.Mark:
    """Return *mark* with one build, and with some of its cases where there are many."""
    if mark.name != "parametrize":
        return mark
    name, cases = mark.args
    if name == "build":
        return pytest.mark.parametrize("build", ["plain"]).mark
    if IS_FULL or len(cases) <= MOST or "ids" in mark.kwargs:
        return mark
    return pytest.mark.parametrize(name, list(cases)[::ONE_OF], **mark.kwargs).mark


for module in MODULES:
    for name, function in vars(module).items():
        if not name.startswith("test_") or name in NATIVE:
            continue
        parameters = inspect.signature(function).parameters
        # "real" and "either" are built by the native compiler.
        if {"bench", "tree"} & set(parameters) and "real" not in parameters:
            globals()[name] = emulated(function)


def test_the_emulated_is_for_aarch64(bench: Bench) -> None:
    """The control: were it this machine's, all the others here would show nothing."""
    launcher = bench.workshop.build("plain") / "launcher"
    assert launcher.read_bytes()[18:20] == EM_AARCH64
    assert bench.runtime("state").who == "lowlevel/runc"


@pytest.mark.parametrize("missing", sorted(NATIVE))
def test_what_is_left_out_exists(missing: str) -> None:
    """A test that was renamed would be left out no more, or for ever."""
    assert any(hasattr(module, missing) for module in MODULES)


@pytest.mark.system("runc")
def test_a_container_by_the_emulated_launcher(tmp_path: Path) -> None:
    """The whole way: the runtime, the hook and the container's files, each started by it."""
    launcher = tmp_path / "launcher"
    tree = Path(__file__).parents[2]
    values = constants(
        LIBDIR=str(tree),
        PYTHON="/usr/bin/python3",
        CLI_PYTHON=str(tree / ".venv" / "bin" / "python"),
        VERSION=VERSION,
    )
    compile_c(LAUNCHER, launcher, *FREESTANDING, *values, cc=CROSS_CC)
    results = seen.play("emulated", str(EMULATOR), str(launcher))
    assert results["called"] == ["gpu-cdi-hook", "gpu-container-runtime"]
    for name in ("auto", "unasked"):
        seen.assert_way(results, name, WAYS[name], proc_driver=True)
