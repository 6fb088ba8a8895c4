# SPDX-License-Identifier: Apache-2.0
"""What a container asks for and the host lacks: nodes, GPUs, specs of its driver."""

from __future__ import annotations

from typing import Any

import pytest
from containers import seen

pytestmark = pytest.mark.system("runc")

PROGRAM = seen.HERE / "missing.py"
UVM = "/dev/nvidia-uvm"
REFRESH = 'hint: run "gpuruntime cdi refresh --output '
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return what all creates came to, on one host."""
    return seen.play("missing", program=PROGRAM)


def assert_refused(call: Found, text: str) -> None:
    """Assert that the container does not start, and why."""
    assert call["status"] == 1
    assert text in call["stderr"]
    assert "\nhint: " in call["stderr"]
    assert (call["started"], call["untouched"]) == (False, True)


def assert_started(call: Found) -> None:
    """Assert that the container starts."""
    assert call["status"] == 0, call["stderr"]
    assert call["started"]


@pytest.mark.parametrize("mode", ["jit-cdi", "cdi"])
def test_the_node_for_compute_is_made_by_the_driver_s_own_program(found: Found, mode: str) -> None:
    """Nothing made it since the boot: the module is loaded at the first use."""
    call = found["nodes"][f"{mode}, program"]
    assert_started(call)
    assert call["calls"] == ["-u -c 0 -c 1"]
    assert {"/dev/nvidia1", UVM} <= set(call["devices"])
    assert "nvidia-modprobe" in call["log"]


@pytest.mark.parametrize("mode", ["jit-cdi", "cdi"])
def test_while_nothing_is_missing_the_program_is_not_run(found: Found, mode: str) -> None:
    """The control."""
    call = found["nodes"][f"{mode}, nothing missing"]
    assert_started(call)
    assert call["calls"] == []


@pytest.mark.parametrize("mode", ["jit-cdi", "cdi"])
@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("no program", 0),
        ("program in vain", 1),
        ("not allowed", 0),
        # There, nobody can make a node.
        ("user namespace", 0),
    ],
)
def test_a_container_for_compute_does_not_start_without_its_node(
    found: Found, mode: str, case: str, calls: int
) -> None:
    """CUDA would find no GPU, and the program would go on without."""
    call = found["nodes"][f"{mode}, {case}"]
    assert_refused(call, f'device node "{UVM}": No such file or directory')
    assert len(call["calls"]) == calls


def test_who_asks_for_utilities_needs_no_node_for_compute(found: Found) -> None:
    """Such as monitoring."""
    call = found["nodes"]["jit-cdi, utility"]
    assert_started(call)
    assert "/dev/nvidia1" in call["devices"]
    assert UVM not in call["devices"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("no such GPU", 'there is no device \\"99\\"'),
        ("no node", UVM),
        ("driver", "Driver Not Loaded"),
        ("no spec's device", "nvidia.com/gpu=99"),
        ("half", "nvidia.com/gpu=99"),
        ("stale", "stale"),
    ],
)
def test_where_the_operator_says_so_a_container_starts_without(
    found: Found, case: str, why: str
) -> None:
    """With nothing of what it asked for, and a warning that says why."""
    call = found["warnings"][case]
    assert_started(call)
    assert call["untouched"]
    [warning] = [line for line in call["log"].splitlines() if "level=warning" in line]
    assert "starts without what it asks for: " in warning
    assert why in warning


def test_what_is_there_is_given_all_the_same(found: Found) -> None:
    """The controls: of the host, and of the option."""
    assert "/dev/nvidia1" in found["warnings"]["there"]["devices"]
    assert "level=warning" not in found["warnings"]["there"]["log"]
    assert_refused(found["warnings"]["control"], 'there is no device "99"')


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("requirement", "requirements not met"),
        ("malformed", "invalid environment variable: process.env["),
        ("management", "for privileged containers"),
    ],
)
def test_what_is_wrong_or_not_allowed_is_an_error_all_the_same(
    found: Found, case: str, why: str
) -> None:
    """It is not the host that lacks something."""
    assert_refused(found["warnings"][case], why)


def test_a_container_that_starts_without_keeps_no_hook_that_would_fail(found: Found) -> None:
    """The engine's would ask for the same, and has the last word."""
    call = found["warnings"]["hook"]
    assert_started(call)
    assert not call["untouched"]
    assert call["devices"] == {}
    assert call["prestart"] == []


def test_what_policy_ignores_is_no_missing_gpu(found: Found) -> None:
    """The container may not ask in that way at all."""
    call = found["warnings"]["policy"]
    assert_started(call)
    assert call["untouched"]
    assert "ignored: " in call["log"]


@pytest.mark.parametrize("asked", ["plain", "qualified", "none"])
def test_a_spec_of_another_driver_is_not_injected(found: Found, asked: str) -> None:
    """The old libraries with the new module fail in ways that nobody understands."""
    call = found["stale"][f"other driver, {asked}"]
    assert_refused(call, "the loaded driver is 570.86.15")
    assert "libcuda.so.550.163.01" in call["stderr"]
    assert REFRESH in call["stderr"]


def test_a_spec_with_a_file_that_is_gone_is_not_injected(found: Found) -> None:
    """Our text names the file, and what to do; the low-level runtime's would not."""
    call = found["stale"]["file gone"]
    assert_refused(call, "libnvidia-cfg.so.550.163.01")
    assert REFRESH in call["stderr"]


@pytest.mark.parametrize("case", ["fits", "fits again", "driver unknown"])
def test_a_spec_of_the_loaded_driver_is_injected(found: Found, case: str) -> None:
    """The control; and where the module does not say its version."""
    assert_started(found["stale"][case])
    assert "/dev/nvidia1" in found["stale"][case]["devices"]


@pytest.mark.parametrize("case", ["third party", "both", "other driver, third party"])
def test_a_spec_of_somebody_else_is_not_ours_to_judge(found: Found, case: str) -> None:
    """Even if it has a libcuda of another version, and a file that is made later."""
    assert_started(found["stale"][case])
    assert not found["stale"][case]["untouched"]
