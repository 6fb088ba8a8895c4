# SPDX-License-Identifier: Apache-2.0
"""Device programs of cgroup v2: rules for some devices in front of the instructions of another.

Pure: instructions in, instructions out. On the start path, for the prestart hook alone. Such a
program has a struct bpf_cgroup_dev_ctx (linux/bpf.h) in R1 and answers 1, allowed, or 0.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # Type ("c" or "b"), major, minor.
    Device = tuple[str, int, int]

# struct bpf_insn of little-endian machines: code, destination and source, offset, immediate.
INSTRUCTION = struct.Struct("<BBhi")
# BPF_LDX | BPF_MEM | BPF_W; BPF_ALU64 | BPF_K | BPF_MOV; the same with BPF_X.
_LOAD, _SET, _COPY = 0x61, 0xB7, 0xBF
# BPF_ALU64 | BPF_K | BPF_AND, and | BPF_RSH; BPF_JMP | BPF_K | BPF_JNE, and | BPF_JSET.
_AND, _SHIFT_RIGHT = 0x57, 0x77
_JUMP_NOT_EQUAL, _JUMP_BITS = 0x55, 0x45
_CALL, _EXIT = 0x85, 0x95
# Takes two places. With a source it is no number but a map, or an address.
_LOAD_64 = 0x18
_ANSWER, _CONTEXT, _TYPE, _ACCESS, _MAJOR, _MINOR = range(6)
# The last register that a program may name; the kernel's own is the next, for blinded constants.
_LAST_REGISTER = 10
# struct bpf_cgroup_dev_ctx: access_type, major and minor. BPF_DEVCG_DEV_BLOCK and _CHAR are in
# the lower half of the first; BPF_DEVCG_ACC_READ and _WRITE are in the upper half, as is _MKNOD,
# which no rule of ours allows.
_TYPES = {"b": 1, "c": 2}
_READ_WRITE = 2 | 4
_HALF_BITS, _HALF = 16, 0xFFFF


def with_rules(program: bytes, devices: Iterable[Device]) -> bytes:
    """Return *program* preceded by rules that let *devices* be read and written.

    *program* itself if it begins with these rules. Raises ValueError, which says why, if its
    instructions cannot be loaded once more.
    """
    _require_loadable(program)
    rules = rules_for(devices)
    return program if program.startswith(rules) else rules + program


def rules_for(devices: Iterable[Device]) -> bytes:
    """Return the instructions that answer "allowed" for *devices*; all else goes past their end.

    R1 is left as it is for what follows; R2 to R5 are not.
    """
    code = [
        _instruction(_LOAD, _TYPE, _CONTEXT, 0),
        _instruction(_COPY, _ACCESS, _TYPE),
        _instruction(_AND, _TYPE, immediate=_HALF),
        _instruction(_SHIFT_RIGHT, _ACCESS, immediate=_HALF_BITS),
        _instruction(_LOAD, _MAJOR, _CONTEXT, 4),
        _instruction(_LOAD, _MINOR, _CONTEXT, 8),
    ]
    for kind, major, minor in devices:
        # Each condition jumps over what is left of its rule.
        code += [
            _instruction(_JUMP_NOT_EQUAL, _TYPE, offset=5, immediate=_TYPES[kind]),
            _instruction(_JUMP_NOT_EQUAL, _MAJOR, offset=4, immediate=major),
            _instruction(_JUMP_NOT_EQUAL, _MINOR, offset=3, immediate=minor),
            _instruction(_JUMP_BITS, _ACCESS, offset=2, immediate=~_READ_WRITE),
            _instruction(_SET, _ANSWER, immediate=1),
            _instruction(_EXIT),
        ]
    return b"".join(code)


def _instruction(
    code: int, destination: int = 0, source: int = 0, offset: int = 0, immediate: int = 0
) -> bytes:
    return INSTRUCTION.pack(code, destination | source << 4, offset, immediate)


def _require_loadable(program: bytes) -> None:
    """Raise ValueError if *program*, as the kernel shows it, is not what was once loaded."""
    if not program or len(program) % INSTRUCTION.size:
        raise ValueError("the kernel does not show its instructions (kernel.kptr_restrict)")
    is_second_half = False
    for code, registers, _, _ in INSTRUCTION.iter_unpack(program):
        if is_second_half:
            is_second_half = False
            continue
        source = registers >> 4
        if max(registers & 0xF, source) > _LAST_REGISTER:
            raise ValueError("the kernel shows it blinded (net.core.bpf_jit_harden)")
        if code == _CALL:
            raise ValueError("it calls functions")
        if code == _LOAD_64:
            if source:
                raise ValueError("it uses a map")
            is_second_half = True
