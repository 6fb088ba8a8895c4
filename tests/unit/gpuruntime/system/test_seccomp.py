# SPDX-License-Identifier: Apache-2.0
"""META-02: the list of system calls, the filter made of it, and a process that it confines."""

from __future__ import annotations

import errno
import os
import re
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from gpuruntime.system import seccomp

TREE = Path(__file__).parents[4]
START_PYTHON = "/usr/bin/python3"
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, X32_BIT = 0x40000003, 0x40000000
VERSIONS = ((3, 9), (3, 10), (3, 11), (3, 14))
# On aarch64 these calls have no number of their own: what the C library makes in place of them.
INSTEAD = {"chmod": "fchmodat", "select": "pselect6"}
KERNEL_OF = {"x86_64": "<asm/unistd.h>", "aarch64": "<asm-generic/unistd.h>"}
# Calls that no work in a container's root needs, and how one is made.
FORBIDDEN = {
    "socket": "import socket; libc.socket(1, 1, 0)",
    "execve": "os.execv('/bin/true', ['true'])",
    "clone": "os.fork() or os._exit(0)",
    "ptrace": "libc.ptrace(0, 0, 0, 0)",
    "unshare": "libc.unshare(0)",
    "setns": "libc.setns(0, 0)",
    "process_vm_readv": "libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0)",
    "kill": "os.kill(os.getppid(), 0)",
    "prctl": "libc.prctl(4, 1, 0, 0, 0)",
    "chroot": "libc.chroot(b'/')",
    "mknodat": "os.mknod('/dev/null/x')",
    "memfd_create": "os.memfd_create('x')",
    "mprotect": "libc.mprotect(None, 0, 4)",
    "executable memory": "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
}
HEAD = f"""
import ctypes, errno, mmap, os, socket, struct, sys
sys.path.append({str(TREE)!r})
from gpuruntime.system import seccomp
libc = ctypes.CDLL(None, use_errno=True)
"""


def verdict(
    code: bytes, arch: int, number: int, arguments: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
) -> int:
    """Return what the filter *code* answers, as the kernel would find out."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)
    instructions = list(struct.iter_unpack("<HBBI", code))
    at = value = 0
    while True:
        operation, if_true, if_false, constant = instructions[at]
        at += 1
        if operation == 0x06:
            return int(constant)
        if operation == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
            continue
        holds = {
            0x15: value == constant,
            0x25: value > constant,
            0x35: value >= constant,
            0x45: bool(value & constant),
        }[operation]
        at += if_true if holds else if_false


def numbers(header: str, names: list[str]) -> dict[str, int]:
    """Return the numbers that the kernel's *header* gives *names*."""
    text = f"#define __ARCH_WANT_RENAMEAT\n#define __ARCH_WANT_NEW_STAT\n#include {header}\n"
    text += "".join(f"{name} == __NR_{name}\n" for name in names)
    done = subprocess.run(
        ["gcc", "-E", "-P", "-"], input=text, capture_output=True, text=True, check=True
    )
    return {name: int(n) for name, n in re.findall(r"^(\w+) == (\d+)$", done.stdout, re.MULTILINE)}


@pytest.mark.parametrize("version", VERSIONS)
def test_meta_02_there_are_at_most_forty_calls(version: tuple[int, int]) -> None:
    """The bound that we promise."""
    assert 0 < len(seccomp.calls(version)) <= seccomp.MAX_CALLS == 40
    assert len(seccomp.LDCONFIG) <= seccomp.MAX_CALLS


@pytest.mark.parametrize("allowed", [*map(seccomp.calls, VERSIONS), seccomp.LDCONFIG])
@pytest.mark.parametrize("machine", ARCHES)
def test_the_numbers_are_the_kernels(machine: str, allowed: dict[str, tuple[int, int]]) -> None:
    """A wrong number would allow another call."""
    column = list(ARCHES).index(machine)
    wanted = {name: pair[column] for name, pair in allowed.items() if pair[column] >= 0}
    names = [INSTEAD.get(name, name) if machine == "aarch64" else name for name in wanted]
    if machine == "x86_64" != os.uname().machine:
        pytest.skip("the headers of this machine are not those of x86-64")
    found = numbers(KERNEL_OF[machine], names)
    assert [found.get(name) for name in names] == list(wanted.values())


@pytest.mark.parametrize("machine", ARCHES)
def test_meta_02_what_is_not_in_the_list_ends_the_process(machine: str) -> None:
    """Every number of a call there is; two calls are in the list with some arguments only."""
    allowed = seccomp.calls()
    code = seccomp.program(machine, allowed)
    ours = {pair[list(ARCHES).index(machine)] for pair in allowed.values()}
    ioctl = allowed["ioctl"][list(ARCHES).index(machine)]
    for number in range(470):
        expected = seccomp.ALLOW if number in ours - {ioctl} else seccomp.KILL
        if number == ioctl:
            expected = seccomp.ERRNO | errno.ENOTTY
        assert verdict(code, ARCHES[machine], number) == expected, number


def test_calls_of_older_c_libraries_are_in_the_list() -> None:
    """Debian 11 has such a one: stat(3) of `/`, and of modules to be found, is this call."""
    for version in VERSIONS:
        code = seccomp.program("x86_64", seccomp.calls(version))
        assert verdict(code, ARCHES["x86_64"], 4) == seccomp.ALLOW


@pytest.mark.parametrize("machine", ARCHES)
def test_calls_that_are_newer_than_the_list_are_not_there(machine: str) -> None:
    """A newer C library then does without; it would not survive being ended."""
    code = seccomp.program(machine, seccomp.calls())
    for number in (470, 500, X32_BIT - 1):
        assert verdict(code, ARCHES[machine], number) == seccomp.ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", ARCHES)
def test_other_ways_to_call_the_kernel_end_the_process(machine: str) -> None:
    """Numbers mean other calls there: 11 is execve of a 32-bit program and munmap of ours."""
    code = seccomp.program(machine, seccomp.calls())
    others = {*ARCHES.values(), I386, 0} - {ARCHES[machine]}
    for number in (0, 3, 11, 59, 63, 221):
        assert {verdict(code, arch, number) for arch in others} == {seccomp.KILL}
    if machine == "x86_64":
        for number in (0, 3, 11, 59):
            assert verdict(code, ARCHES[machine], X32_BIT | number) == seccomp.KILL


@pytest.mark.parametrize("machine", ARCHES)
def test_arguments_that_are_not_allowed(machine: str) -> None:
    """Memory that can be executed; requests to a device. The kernel's own types are 32 bits."""
    column, arch = list(ARCHES).index(machine), ARCHES[machine]
    allowed = seccomp.calls()
    code = seccomp.program(machine, allowed)
    mmap, ioctl = (allowed[name][column] for name in ("mmap", "ioctl"))
    for protection in range(16):
        answer = verdict(code, arch, mmap, (0, 4096, protection, 0, 0, 0))
        assert answer == (seccomp.KILL if protection & 4 else seccomp.ALLOW)
    getflags, tiocsti = 0x80086601, 0x5412
    assert verdict(code, arch, ioctl, (3, getflags, 0, 0, 0, 0)) == seccomp.ALLOW
    not_a_terminal = seccomp.ERRNO | errno.ENOTTY
    assert verdict(code, arch, ioctl, (3, tiocsti, 0, 0, 0, 0)) == not_a_terminal
    assert verdict(code, arch, ioctl, (3, 0, getflags, 0, 0, 0)) == not_a_terminal


def test_a_tracer_may_answer_in_place_of_the_kernel() -> None:
    """Errors that strace injects reach the process."""
    code = seccomp.program("x86_64", seccomp.calls())
    assert verdict(code, ARCHES["x86_64"], 0xFFFFFFFF) == seccomp.ALLOW


def test_there_is_no_filter_for_another_machine() -> None:
    """Its numbers are others."""
    with pytest.raises(KeyError):
        seccomp.program("riscv64", seccomp.calls())


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run *code* after HEAD as the hook's Python."""
    return subprocess.run(
        [START_PYTHON, "-I", "-S", "-B", "-c", HEAD + code],
        capture_output=True, text=True, check=False, timeout=30, stdin=subprocess.DEVNULL,
    )  # fmt: skip


CONFINE = "os.write(1, b'confined') if seccomp.confine() else os.write(1, b'not')\n"


@pytest.mark.parametrize("name", FORBIDDEN)
def test_meta_02_a_forbidden_call_ends_a_confined_process(name: str) -> None:
    """At once: what comes after it does not happen."""
    done = python(CONFINE + FORBIDDEN[name] + "\nos.write(1, b' and alive')")
    assert (done.returncode, done.stdout) == (-signal.SIGSYS, "confined"), done.stderr


@pytest.mark.parametrize("name", FORBIDDEN)
def test_meta_02_control_without_the_filter_it_is_a_call(name: str) -> None:
    """Allowed or refused by the kernel, it ends nothing."""
    done = python("try:\n " + FORBIDDEN[name] + "\nexcept OSError:\n pass")
    assert done.returncode == 0, done.stderr


def test_a_confined_process_cannot_gain_privileges() -> None:
    """What the kernel says of it."""
    done = python(
        "seccomp.confine()\n"
        "for line in open('/proc/self/status'):\n"
        " if line.startswith(('NoNewPrivs', 'Seccomp:')): os.write(1, line.encode())"
    )
    assert done.stdout.split() == ["NoNewPrivs:", "1", "Seccomp:", "2"]


def answering(code: int) -> str:
    """Return code that installs a filter of somebody else's: prctl fails with *code*."""
    return f"""
outer = [
    (0x20, 0, 0, 0), (0x15, 0, 3, {157 if os.uname().machine == "x86_64" else 167}),
    (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, 0x50000 | {code}), (0x06, 0, 0, 0x7FFF0000),
]
data = b"".join(struct.pack("<HBBI", *one) for one in outer)
seccomp.syscalls.confine(data, len(outer))
"""


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_kernel_without_filters_confines_nothing(code: int) -> None:
    """It is said, not hidden."""
    done = python(answering(code) + CONFINE)
    assert (done.returncode, done.stdout) == (0, "not"), done.stderr


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.ENOMEM])
def test_any_other_refusal_is_an_error(code: int) -> None:
    """Somebody forbids it who could have allowed it."""
    done = python(answering(code) + CONFINE)
    assert done.returncode == 1
    assert "SyscallError" in done.stderr
    assert "prctl(PR_SET_SECCOMP" in done.stderr


IN_CHROOT = (
    "seccomp.confine(seccomp.LDCONFIG)\n"
    "os.execve('/sbin/ldconfig', ['ldconfig', '-X', '-i', '-f', CONF, '-C', CACHE], {})"
)


def test_ns_03_the_hosts_ldconfig_works_confined(tmp_path: Path) -> None:
    """With a list of its own, which has execve."""
    conf = tmp_path / "ld.so.conf"
    conf.write_text("/usr/lib/x86_64-linux-gnu\n")
    cache = tmp_path / "cache"
    names = f"CONF, CACHE = {str(conf)!r}, {str(cache)!r}\n"
    done = python(names + IN_CHROOT)
    assert done.returncode == 0, done.stderr
    assert b"libc.so.6" in cache.read_bytes()


@pytest.mark.parametrize("name", sorted(FORBIDDEN.keys() - {"execve", "mknodat"}))
def test_ns_03_it_may_do_nothing_else(name: str) -> None:
    """Neither start another nor look into one."""
    confined = CONFINE.replace("confine()", "confine(seccomp.LDCONFIG)")
    done = python(confined + FORBIDDEN[name])
    assert (done.returncode, done.stdout) == (-signal.SIGSYS, "confined"), done.stderr
