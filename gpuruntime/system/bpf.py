# SPDX-License-Identifier: Apache-2.0
"""bpf(2) for the device programs of a cgroup: which are attached, their instructions, a new one.

On the start path, for the prestart hook alone. Every failure is a SyscallError.
"""

from __future__ import annotations

import ctypes
import struct

from gpuruntime.system import syscalls
from gpuruntime.system.device_program import INSTRUCTION

# linux/bpf.h: enum bpf_cmd, bpf_prog_type, bpf_attach_type; flags of an attachment.
_PROG_LOAD = 5, "BPF_PROG_LOAD"
_PROG_ATTACH = 8, "BPF_PROG_ATTACH"
_PROG_GET_FD_BY_ID = 13, "BPF_PROG_GET_FD_BY_ID"
_OBJ_GET_INFO_BY_FD = 15, "BPF_OBJ_GET_INFO_BY_FD"
_PROG_QUERY = 16, "BPF_PROG_QUERY"
_TYPE_CGROUP_DEVICE = 15
_CGROUP_DEVICE = 6
_ALLOW_MULTI, _REPLACE = 2, 4
# As many as one cgroup can have.
_MAX_PROGRAMS = 64
# Of union bpf_attr what each command needs. PROG_QUERY: target_fd, attach_type, query_flags,
# attach_flags, prog_ids, prog_cnt.
_QUERY = struct.Struct("=IIIIQI4x")
# PROG_LOAD: prog_type, insn_cnt, insns, license, log_level, log_size, log_buf, kern_version,
# prog_flags, prog_name.
_LOAD = struct.Struct("=IIQQIIQII16s")
# PROG_ATTACH: target_fd, attach_bpf_fd, attach_type, attach_flags, replace_bpf_fd.
_ATTACH = struct.Struct("=IIIII")
# OBJ_GET_INFO_BY_FD: bpf_fd, info_len, info.
_INFO = struct.Struct("=IIQ")
# The start of struct bpf_prog_info: type, id, tag, jited_prog_len, xlated_prog_len,
# jited_prog_insns, xlated_prog_insns.
_PROGRAM_INFO = struct.Struct("=II8sIIQQ")
_NAME = b"gpuruntime"
_LICENSE = b"Apache-2.0"


def attached(cgroup: int) -> tuple[list[int], int]:
    """Return the ids of the device programs on *cgroup* itself, and the flags of attachment."""
    ids = (ctypes.c_uint32 * _MAX_PROGRAMS)()
    buffer = _buffer(
        _QUERY.pack(cgroup, _CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), _MAX_PROGRAMS)
    )
    syscalls.bpf(*_PROG_QUERY, buffer)
    _, _, _, flags, _, count = _QUERY.unpack(buffer.raw)
    return list(ids[:count]), flags


def open_program(number: int) -> int:
    """Return a descriptor of the program with the id *number*, closed on exec."""
    return syscalls.bpf(*_PROG_GET_FD_BY_ID, _buffer(struct.pack("=III", number, 0, 0)))


def instructions(program: int) -> bytes:
    """Return the instructions of *program* as the kernel shows them, b"" where it does not."""
    *_, length, _, _ = _program_info(program, 0, 0)
    code = ctypes.create_string_buffer(length)
    *_, length, _, place = _program_info(program, ctypes.addressof(code), length)
    # The kernel takes the place away where it has put nothing there.
    return code.raw[:length] if place else b""


def _program_info(
    program: int, place: int, length: int
) -> tuple[int, int, bytes, int, int, int, int]:
    info = _buffer(_PROGRAM_INFO.pack(0, 0, b"", 0, length, 0, place))
    syscalls.bpf(
        *_OBJ_GET_INFO_BY_FD,
        _buffer(_INFO.pack(program, _PROGRAM_INFO.size, ctypes.addressof(info))),
    )
    return _PROGRAM_INFO.unpack(info.raw)


def load(code: bytes) -> int:
    """Return a descriptor of a new device program of the instructions *code*, closed on exec."""
    insns, license_ = _buffer(code), ctypes.create_string_buffer(_LICENSE)
    count = len(code) // INSTRUCTION.size
    places = ctypes.addressof(insns), ctypes.addressof(license_)
    attributes = _LOAD.pack(_TYPE_CGROUP_DEVICE, count, *places, 0, 0, 0, 0, 0, _NAME)
    return syscalls.bpf(*_PROG_LOAD, _buffer(attributes))


def replace(cgroup: int, flags: int, old: int, new: int) -> None:
    """Put the program *new* in the place of *old* on *cgroup*, attached with the same *flags*.

    Raises SyscallError, with ENOENT if *old* is not attached any more.
    """
    if flags & _ALLOW_MULTI:
        attributes = _ATTACH.pack(cgroup, new, _CGROUP_DEVICE, _ALLOW_MULTI | _REPLACE, old)
    else:
        # There is one only, and an attachment replaces it.
        attributes = _ATTACH.pack(cgroup, new, _CGROUP_DEVICE, flags, 0)
    syscalls.bpf(*_PROG_ATTACH, _buffer(attributes))


def _buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, len(data))
