# SPDX-License-Identifier: Apache-2.0
"""Rules for devices in front of a device program: what the two decide together.

Run by an interpreter of the few instructions that occur. As the kernel's verifier, it lets no
register be read that nobody has set, and nothing be left without an exit.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest

from gpuruntime.system import device_grant, device_program
from gpuruntime.system.device_program import INSTRUCTION

if TYPE_CHECKING:
    from gpuruntime.system.device_program import Device

BLOCK, CHARACTER = 1, 2
MAKE, READ, WRITE = 1, 2, 4
# As runc 1.1 makes it and the kernel shows it, cut: mknod of all, /dev/null and /dev/tty.
RUNC = bytes.fromhex(
    "611200000000000054020000ffff000061130000000000007403000010000000"
    "611404000000000061150800000000005502050001000000bc31000000000000"
    "54010000010000005d31020000000000b4000000010000009500000000000000"
    "5502050002000000bc3100000000000054010000010000005d31020000000000"
    "b400000001000000950000000000000055020400020000005504030001000000"
    "5505020003000000b40000000100000095000000000000005502040002000000"
    "55040300050000005505020000000000b4000000010000009500000000000000"
    "b4000000000000009500000000000000"
)
NOTHING = bytes.fromhex("b4000000000000009500000000000000")
EVERYTHING = bytes.fromhex("b4000000010000009500000000000000")
DEVICES: list[Device] = [("c", 195, 1), ("c", 195, 255), ("b", 8, 3)]
ANY_64 = bytes.fromhex("18020000010000008500000001000000")
_RUN = {
    0x05: lambda _a, _b: True,
    0x15: lambda a, b: a == b,
    0x55: lambda a, b: a != b,
    0x5D: lambda a, b: a != b,
    0x45: lambda a, b: a & b != 0,
}
_COMPUTE = {
    0xB4: lambda _a, b: b,
    0xB7: lambda _a, b: b,
    0xBC: lambda _a, b: b,
    0xBF: lambda _a, b: b,
    0x54: lambda a, b: a & b,
    0x57: lambda a, b: a & b,
    0x74: lambda a, b: a >> b,
    0x77: lambda a, b: a >> b,
}
FROM_REGISTER = (0x5D, 0xBC, 0xBF)
LOAD_WORD, EXIT = 0x61, 0x95


def answer(program: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """Return what *program* answers; linux/bpf.h, struct bpf_cgroup_dev_ctx."""
    context = {0: access << 16 | kind, 4: major, 8: minor}
    code = list(INSTRUCTION.iter_unpack(program))
    # R1, the context, which is no number, is only read from.
    registers: dict[int, int] = {1: 0}
    at = 0
    while True:
        operation, pair, offset, immediate = code[at]
        target, source = pair & 0xF, pair >> 4
        at += 1
        if operation == EXIT:
            return registers[0]
        if operation == LOAD_WORD:
            assert source == 1
            assert registers[1] == 0
            registers[target] = context[offset]
            continue
        value = registers[source] if operation in FROM_REGISTER else immediate
        if operation in _COMPUTE:
            sets = operation in (0xB4, 0xB7, 0xBC, 0xBF)
            registers[target] = _COMPUTE[operation](0 if sets else registers[target], value)
        elif _RUN[operation](registers[target], value):
            at += offset


@pytest.mark.parametrize(
    ("kind", "access", "major", "minor", "allowed"),
    [
        (CHARACTER, READ, 195, 1, True),
        (CHARACTER, WRITE, 195, 1, True),
        (CHARACTER, READ | WRITE, 195, 255, True),
        (BLOCK, READ, 8, 3, True),
        # The node is there; the container makes none.
        (CHARACTER, MAKE, 195, 1, False),
        (CHARACTER, MAKE | READ | WRITE, 195, 1, False),
        (CHARACTER, 8, 195, 1, False),
        # Another GPU, another driver, another type.
        (CHARACTER, READ, 195, 0, False),
        (CHARACTER, READ, 195, 3, False),
        (CHARACTER, READ, 8, 3, False),
        (CHARACTER, READ, 196, 1, False),
        (CHARACTER, READ, 195, 257, False),
        (CHARACTER, READ, 195 + 256, 1, False),
        (BLOCK, READ, 195, 1, False),
        (0, READ, 195, 1, False),
    ],
)
def test_the_rules_allow_what_they_name_and_nothing_else(
    kind: int, access: int, major: int, minor: int, *, allowed: bool
) -> None:
    """In front of a program that allows nothing."""
    program = device_program.with_rules(NOTHING, DEVICES)
    assert answer(program, kind, access, major, minor) == int(allowed)


@pytest.mark.parametrize("old", [NOTHING, EVERYTHING, RUNC], ids=["nothing", "everything", "runc"])
def test_about_all_else_the_old_program_decides(old: bytes) -> None:
    """Of every type, access and number about the named ones."""
    program = device_program.with_rules(old, DEVICES)
    numbers = (0, 1, 2, 3, 5, 8, 194, 195, 196, 255, 256)
    for kind, access, major, minor in itertools.product(range(3), range(8), numbers, numbers):
        named = ({BLOCK: "b", CHARACTER: "c"}.get(kind), major, minor) in DEVICES
        is_ours = named and not access & MAKE
        expected = 1 if is_ours else answer(old, kind, access, major, minor)
        assert answer(program, kind, access, major, minor) == expected


def test_the_old_program_is_what_the_kernel_showed() -> None:
    """The control of the interpreter: runc's own rules."""
    assert answer(RUNC, CHARACTER, READ | WRITE, 1, 3) == 1
    assert answer(RUNC, CHARACTER, MAKE, 195, 1) == 1
    assert answer(RUNC, CHARACTER, READ, 195, 1) == 0


def test_no_devices_are_no_rules() -> None:
    """The old program decides alone."""
    program = device_program.with_rules(RUNC, [])
    assert answer(program, CHARACTER, READ, 195, 1) == 0
    assert answer(program, CHARACTER, READ, 1, 3) == 1


def test_rules_that_are_there_are_not_added_again() -> None:
    """Where an engine and a directory of hooks have each put the hook there."""
    once = device_program.with_rules(RUNC, DEVICES)
    assert device_program.with_rules(once, DEVICES) == once
    assert len(device_program.with_rules(once, [("c", 195, 3)])) > len(once)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (b"", "kernel.kptr_restrict"),
        (NOTHING[:-1], "kernel.kptr_restrict"),
        (bytes.fromhex("8500000001000000") + NOTHING, "it calls functions"),
        (bytes.fromhex("18110000010000000000000000000000") + NOTHING, "it uses a map"),
        (bytes.fromhex("b70b000001000000") + NOTHING, "net.core.bpf_jit_harden"),
        (bytes.fromhex("bfb0000001000000") + NOTHING, "net.core.bpf_jit_harden"),
    ],
)
def test_what_cannot_be_loaded_again_is_refused_with_the_reason(program: bytes, why: str) -> None:
    """The kernel would refuse it as well, and say less."""
    with pytest.raises(ValueError, match=why):
        device_program.with_rules(program, DEVICES)


def test_the_second_half_of_a_number_is_no_instruction() -> None:
    """It may look like a call."""
    program = device_program.with_rules(ANY_64 + NOTHING, DEVICES)
    assert program.endswith(ANY_64 + NOTHING)


V1 = "31 24 0:27 {root} {point} rw,relatime shared:9 - cgroup cgroup rw,devices"
V2 = "40 24 0:30 / {point} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
TMPFS = "24 1 0:23 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755"
V1_THERE = V1.format(root="/", point="/sys/fs/cgroup/devices")
V2_ALONE = V2.format(point="/sys/fs/cgroup")
HYBRID = V2.format(point="/sys/fs/cgroup/unified")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([TMPFS, V1_THERE], (1, "/", "/sys/fs/cgroup/devices")),
        ([TMPFS, V1_THERE, HYBRID], (1, "/", "/sys/fs/cgroup/devices")),
        ([TMPFS, HYBRID, V1_THERE], (1, "/", "/sys/fs/cgroup/devices")),
        ([V2_ALONE], (2, "/", "/sys/fs/cgroup")),
        ([TMPFS, V1_THERE, V2_ALONE], (2, "/", "/sys/fs/cgroup")),
        ([V2_ALONE, V1.format(root="/", point="/mnt/devices")], (2, "/", "/sys/fs/cgroup")),
        ([V2_ALONE, TMPFS, V1_THERE], (1, "/", "/sys/fs/cgroup/devices")),
        (
            [TMPFS, V1.format(root="/a\\040b", point="/sys/fs/cgroup/de\\134vices")],
            (1, "/a b", "/sys/fs/cgroup/de\\vices"),
        ),
    ],
)
def test_the_hierarchy_that_is_mounted_decides(
    lines: list[str], expected: tuple[int, str, str]
) -> None:
    """A hybrid kernel lists both versions for each process."""
    assert device_grant.hierarchy(f"{line}\n" for line in lines) == expected


@pytest.mark.parametrize("lines", [[], [TMPFS], [TMPFS, HYBRID], [V2_ALONE, TMPFS]])
def test_without_a_hierarchy_nothing_can_be_allowed(lines: list[str]) -> None:
    """Nor is anything guessed."""
    with pytest.raises(ValueError, match="neither is cgroup2 mounted"):
        device_grant.hierarchy(f"{line}\n" for line in lines)


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()])
def test_a_cgroup_that_we_are_in_is_refused(pid: int) -> None:
    """It is the engine's where no cgroup was made for the container."""
    with pytest.raises(device_grant.DeviceGrantError, match="the engine is in"):
        device_grant.cgroup_of(pid)
