# SPDX-License-Identifier: Apache-2.0
"""The hook as a process: what it may call, how long it takes, what limits it bears, how it ends.

Most tests start the hook by its launcher on a bundle, without a runtime; those that say so have a
real one.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hook_program
import pytest
from effort import tries
from scenarios.machine import SCENARIOS
from scenarios.scenario import make_root

from gpuruntime.snapshots import hook_log
from gpuruntime.system import seccomp

pytestmark = pytest.mark.system("runc")
TREE = Path(__file__).parents[2]
HOOK = TREE / ".venv" / "bin" / "gpu-cdi-hook"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
LINK = f"--link=libcuda.so.1::{LIBRARIES}/libcuda.so"
LIBRARY = "--library=libnv.so.1::/opt/nv/libnv.so.550.1::x86-64"
PROFILE = "--application-profile"
WORDS = ("update-container", LINK, LIBRARY, PROFILE, "--chmod=751::/opt/secret")
NOT_NEEDED = "it made a system call that no hook needs"
KILLS = tries(50)
PATIENCE_S = 60


def make_bundle(work: Path) -> Path:
    """Make a bundle whose root has what the operations look for; return its directory."""
    root = work / "rootfs"
    for name in ("etc", "dev", "proc/driver/nvidia", "sbin", "opt/secret", LIBRARIES[1:]):
        (root / name).mkdir(parents=True)
    (root / "proc/driver/nvidia/params").write_text("the container's\n")
    (root / "sbin/ldconfig").touch()
    (root / "opt/secret").chmod(0o700)
    (work / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    return work


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a bundle of this test's own."""
    return make_bundle(tmp_path)


def call(bundle: Path, *command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Start *command*, a hook with its arguments, with the state of *bundle*."""
    given = {"capture_output": True, "input": json.dumps({"bundle": str(bundle)}), **how}
    return subprocess.run(
        [str(word) for word in command],
        text=True, check=False, timeout=PATIENCE_S, env=ENVIRONMENT, **given,
    )  # fmt: skip


def tree(root: Path) -> dict[str, Any]:
    """Return what there is below *root*, and what links and small files hold."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in root.rglob("*")
    }


def assert_done(root: Path) -> None:
    """Check what WORDS ask for, with its modes, and that nothing else is left."""
    modes = {
        "etc/ld.so.cache": 0o644,
        "etc/ld.so.conf.d": 0o755,
        "etc/ld.so.conf.d/00-gpuruntime.conf": 0o644,
        "opt/secret": 0o751,
    }
    assert {n: stat.S_IMODE((root / n).stat().st_mode) for n in modes} == modes
    assert os.readlink(f"{root}{LIBRARIES}/libcuda.so") == "libcuda.so.1"
    assert b"/opt/nv/libnv.so.1" in (root / "etc/ld.so.cache").read_bytes()
    assert strays(root) == []


def strays(root: Path) -> list[str]:
    """Return the temporary names below *root*."""
    return [str(path) for path in root.rglob("*") if path.name.startswith(".gpuruntime")]


# ---- system calls ----

# What an attacker's code would do in the process that works in the container's root.
FORBIDDEN = {
    "socket": "libc.socket(1, 1, 0)",
    "execve": "os.execv('/bin/true', ['true'])",
    "clone": "os.fork() or os._exit(0)",
    "ptrace": "libc.ptrace(0, 0, 0, 0)",
    "unshare": "libc.unshare(0)",
    "process_vm_readv": "libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0)",
}
# In place of an operation: code that was brought in by what the hook reads.
BROUGHT_IN = """
import ctypes, os
from gpuruntime.system import ops, seccomp
libc = ctypes.CDLL(None)
def execute(self, root, warn):
    try:
        CALL
    except OSError:
        pass
    os.symlink("x", "mark", dir_fd=root.fd)
ops.MaskParams.execute = execute
"""
WITHOUT_FILTER = "seccomp.confine = lambda: True\n"


@pytest.mark.parametrize("name", FORBIDDEN)
def test_meta_02_a_forbidden_call_ends_the_hook(bundle: Path, name: str) -> None:
    """Before anything comes of it, with a message that says so."""
    hook = hook_program.make(bundle / "hook", BROUGHT_IN.replace("CALL", FORBIDDEN[name]))
    done = call(bundle, hook, "update-container", "--mask-params")
    assert done.returncode == 1
    assert NOT_NEEDED in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert not (bundle / "rootfs/mark").is_symlink()


@pytest.mark.parametrize("name", FORBIDDEN)
def test_meta_02_control_without_the_filter_it_goes_on(bundle: Path, name: str) -> None:
    """The same code, in a hook that does not confine itself."""
    code = BROUGHT_IN.replace("CALL", FORBIDDEN[name]) + WITHOUT_FILTER
    hook = hook_program.make(bundle / "hook", code)
    done = call(bundle, hook, "update-container", "--mask-params")
    assert done.returncode == 0, done.stderr
    # execve does not come back.
    assert (bundle / "rootfs/mark").is_symlink() == (name != "execve")


# A filter of somebody else's, under which prctl(PR_SET_SECCOMP) fails with ERRNO.
OUTER = """
import os, struct
from gpuruntime.system import seccomp
prctl = 157 if os.uname().machine == "x86_64" else 167
outer = [
    (0x20, 0, 0, 0), (0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, 22),
    (0x06, 0, 0, 0x50000 | ERRNO), (0x06, 0, 0, 0x7FFF0000),
]
data = b"".join(struct.pack("<HBBI", *one) for one in outer)
seccomp.syscalls.confine(data, len(outer))
"""


def test_meta_02_who_forbids_the_filter_gets_no_container(bundle: Path) -> None:
    """The runtime's own confinement may be such; nothing is done without ours."""
    before = tree(bundle / "rootfs")
    hook = hook_program.make(bundle / "hook", OUTER.replace("ERRNO", str(errno.EPERM)))
    done = call(bundle, hook, *WORDS)
    assert done.returncode == 1
    assert "cannot confine the process" in done.stderr
    assert "bug" not in done.stderr
    assert tree(bundle / "rootfs") == before


def test_a_kernel_without_filters_is_told(bundle: Path) -> None:
    """The work is done by the other rules alone."""
    hook = hook_program.make(bundle / "hook", OUTER.replace("ERRNO", str(errno.EINVAL)))
    done = call(bundle, hook, *WORDS)
    assert done.returncode == 0
    assert "warning: the kernel has no system call filters" in done.stderr
    assert_done(bundle / "rootfs")


# Each line is a run: options of strace, arguments of the hook, what comes before.
RUNS = f"""
run a '' "{WORDS[0]} --cuda-compat=550.1 --mask-params {" ".join(WORDS[1:])}"
run b '-e inject=openat2:error=ENOSYS' "update-container --cuda-compat=550.2 {LIBRARY}"
run c '-e inject=openat2:error=EAGAIN:when=4..6' "create-symlinks --link=a::/etc/directory"
run d '-e inject=fsopen,open_tree,mount_setattr:error=ENOSYS' "update-container --mask-params"
run e '' "update-ldcache --folder={LIBRARIES}"
run f '' "chmod --mode=700 --path=/opt/secret"
run g '' "--deadline=1 update-container --mask-params" no-state
mount --bind $root/etc $root/etc
mount -o remount,bind,ro $root/etc
run h '' "update-container {LIBRARY}"
"""
SCRIPT = """
bundle=$1 hook=$2 root=$1/rootfs
run() {
    if [ "$4" = no-state ]; then sleep 3; else echo "{\\"bundle\\": \\"$bundle\\"}"; fi |
        strace -f -o $bundle/trace.$1 $2 $hook $3
}
mount -t tmpfs none /proc/driver
mkdir /proc/driver/nvidia
echo 'ModifyDeviceFiles: 1' >/proc/driver/nvidia/params
mkdir $root/etc/directory
touch $root/lib/ld-musl-x86_64.so.1
mount --bind $bundle/library $root$3/libcuda.so.1
"""
# What a run on this machine does not show, and why it is in the list.
UNSEEN = {
    "fstat": "other C libraries",
    "stat": "C libraries before 2.33, as that of Debian 11",
    "restart_syscall": "a process that was stopped, by the freezer of its cgroup",
    "clock_gettime": "machines whose clock cannot be read without a call",
}


@pytest.mark.system("strace")
def test_meta_02_the_list_is_what_the_operations_need(bundle: Path, kept: Path) -> None:
    """Every call of the list is made by some operation, or its fallback; no other call is.

    The log of hooks is full, and is put aside by a hook that has something to say.
    """
    root = bundle / "rootfs"
    kept.write_bytes(bytes(hook_log.MAX_BYTES))
    kept.chmod(0o600)
    library = Path("/usr/lib/x86_64-linux-gnu/libc.so.6").read_bytes()
    (bundle / "library").write_bytes(library)
    (root / LIBRARIES[1:] / "libcuda.so.1").touch()
    compat = root / "usr/local/cuda/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.999.9").write_bytes(library)
    (root / "lib").mkdir()
    script = SCRIPT + RUNS
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh"]
    call(bundle, *command, bundle, HOOK, LIBRARIES)
    seen: set[str] = set()
    for path in sorted(bundle.glob("trace.*")):
        seen |= made_when_confined(path.read_text(errors="replace"))
    assert seen == set(seccomp.calls()) - UNSEEN.keys()
    assert kept.with_name(hook_log.OLD).stat().st_size == hook_log.MAX_BYTES
    assert "was not done in 1 s" in kept.read_text()


def made_when_confined(trace: str) -> set[str]:
    """Return the system calls of *trace* that a process made after it had confined itself."""
    confined: set[str] = set()
    seen = set()
    for line in trace.splitlines():
        pid, _, rest = line.partition(" ")
        name = re.match(r"\s*(?:<\.\.\. )?(\w+)", rest)
        if "PR_SET_SECCOMP" in rest:
            confined.add(pid)
        elif name is not None and pid in confined and "resumed" not in rest:
            seen.add(name[1])
    return seen - {"killed"}


# ---- the deadline ----


@pytest.mark.parametrize("value", ["0", "601", "", "x", "1.5", "-1", "+1", "\u0661", "9" * 5000])
def test_a_deadline_that_is_none_is_refused(bundle: Path, value: str) -> None:
    """It is bounded, and nothing is done."""
    before = tree(bundle)
    for words in ((f"--deadline={value}",), ("--deadline", value)):
        done = call(bundle, HOOK, *words, *WORDS)
        assert done.returncode == 2
        assert "is not a deadline" in done.stderr
        assert "Traceback" not in done.stderr
    assert tree(bundle) == before


@pytest.mark.parametrize("words", [("--deadline=600",), ("--deadline", "1"), ()])
def test_the_work_is_done_within_the_deadline(bundle: Path, words: tuple[str, ...]) -> None:
    """With any there may be."""
    done = call(bundle, HOOK, *words, *WORDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert_done(bundle / "rootfs")


def test_time_01_a_state_without_an_end(bundle: Path) -> None:
    """The caller keeps standard input open; the deadline is that of the arguments."""
    reading, writing = os.pipe()
    try:
        start = time.monotonic()
        done = call(bundle, HOOK, "--deadline=1", *WORDS, input=None, stdin=reading)
        assert 0.9 < time.monotonic() - start < 9
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == 1
    assert "reading the state" in done.stderr
    assert "was not done in 1 s" in done.stderr


def test_link_11_a_silent_file_system_does_not_hold_the_hook(tmp_path: Path) -> None:
    """No signal ends a request that the server has read: the runtime must not wait for it."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    wrapper = tmp_path / "gpu-cdi-hook"
    wrapper.write_text(f'#!/bin/sh\nexec {HOOK} --deadline=1 "$@"\n')
    wrapper.chmod(0o755)
    code = f"""
import sys
sys.path.insert(0, {str(SCENARIOS)!r})
import silent_fuse
silent_fuse.HOOK = {str(wrapper)!r}
silent_fuse.main()
"""
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    status, seconds, said = json.loads(done.stdout)
    assert status == 1
    assert 0.9 < seconds < 9
    assert "was not done in 1 s" in said


# Work that has started a process, and that does not hear the alarm; the file names both.
DEAF = """
import os, signal, time
from gpuruntime.system import ops
def execute(self, root, warn):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    helper = os.fork()
    if helper == 0:
        time.sleep(60)
    os.write(os.open("pids", os.O_CREAT | os.O_WRONLY, dir_fd=root.fd), b"%d" % helper)
    time.sleep(60)
ops.MaskParams.execute = execute
# What starts processes is not confined.
ops.MaskParams.ldconfig = "x"
"""
WITHOUT_GROUP = {"call(SYS_kill, -worker->pid, SIGKILL, 0, 0, 0);": ""}


def end_deaf_work(
    bundle: Path, weak: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], int, float]:
    """Return what came of deaf work, the process that it started, and the seconds."""
    hook = hook_program.make(bundle / "hook", DEAF, changes=weak)
    start = time.monotonic()
    done = call(bundle, hook, "--deadline=1", "update-container", "--mask-params")
    seconds = time.monotonic() - start
    return done, int((bundle / "rootfs/pids").read_text()), seconds


def test_time_01_the_process_tree_ends_with_the_hook(bundle: Path) -> None:
    """All of it, a second after the deadline."""
    done, helper, seconds = end_deaf_work(bundle, {})
    assert done.returncode == 1
    assert 0.9 < seconds < 9
    assert "was not done in 1 s" in done.stderr
    try:
        wait_until_gone([helper])
    finally:
        end(helper)


def test_time_01_control_without_the_group_something_stays(bundle: Path) -> None:
    """The weak hook ends its child alone."""
    _, helper, _ = end_deaf_work(bundle, WITHOUT_GROUP)
    try:
        time.sleep(1)
        assert is_alive(helper)
    finally:
        end(helper)


def test_time_02_whoever_works_ends_with_the_hook(bundle: Path) -> None:
    """A runtime ends the hook alone, which then cannot end anything any more."""
    command = [HOOK, *WORDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=ENVIRONMENT) as hook:
        # It waits for the state.
        children = Path(f"/proc/{hook.pid}/task/{hook.pid}/children")
        deadline = time.monotonic() + PATIENCE_S
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        (child,) = map(int, children.read_text().split())
        status = Path(f"/proc/{child}/status")
        while "Seccomp:\t2" not in status.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        hook.kill()
        hook.wait()
        try:
            wait_until_gone([child])
        finally:
            end(child)
    assert not (bundle / "rootfs" / "etc" / "ld.so.cache").exists()


def end(pid: int) -> None:
    """End the process *pid*, if it is there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def is_alive(pid: int) -> bool:
    """Return whether the process *pid* is there and no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pids: list[int]) -> None:
    """Wait until none of *pids* lives, not for ever."""
    end = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, pids
        time.sleep(0.005)


# ---- what a caller may leave us ----

HABITS = (
    *("full-stdout", "many-fds", "few-files", "small-stack", "no-stdin", "block-all"),
    *("ignore-signals", "umask-none", "deleted-directory", "no-stdio"),
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program that starts others as an unfriendly caller does."""
    path = tmp_path_factory.mktemp("caller") / "caller"
    source = TREE / "tests" / "fakes" / "runtime" / "caller.c"
    subprocess.run(["gcc", "-static", "-O1", "-o", str(path), str(source)], check=True)
    return path


@pytest.mark.parametrize("habits", [*((habit,) for habit in HABITS), HABITS[:-1]])
def test_env_14_the_work_is_done_for_any_caller(
    bundle: Path, caller: Path, habits: tuple[str, ...]
) -> None:
    """One habit at a time, then together; the state is in a file where standard input is closed.

    The modes of what is made are those that it is made with, whatever the umask.
    """
    (bundle / "state.json").write_text(json.dumps({"bundle": str(bundle)}))
    state = f"--container-spec={bundle}/state.json"
    done = call(bundle, caller, *habits, "--", HOOK, HOOK, *WORDS, state)
    assert done.returncode == 0, done.stderr
    assert_done(bundle / "rootfs")


def test_env_14_deep_paths_need_more_descriptors_than_eight(bundle: Path, caller: Path) -> None:
    """The walk keeps one for each directory above."""
    deep = "/".join("abcdefghijklmnopqrst")
    words = ("update-container", f"--link=x::/{deep}/link")
    done = call(bundle, caller, "few-files", "--", HOOK, HOOK, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert (bundle / "rootfs" / deep / "link").is_symlink()


def full_pipe() -> tuple[int, int]:
    """Return the two ends of a pipe to which nothing more can be written."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    return reading, writing


@pytest.mark.parametrize("words", [("--deadline=x", *WORDS), WORDS, ("no-such-hook",)])
def test_env_14_a_full_stderr_holds_nothing(bundle: Path, words: tuple[str, ...]) -> None:
    """Nobody reads what the hook says; it has work to warn of, or an error, or nothing to do."""
    reading, writing = full_pipe()
    os.link(bundle / "rootfs/sbin/ldconfig", bundle / "rootfs/sbin/twin")
    if words == WORDS:
        words = (*words, "--chmod=700::/sbin/twin")
        assert "warning" in call(bundle, HOOK, *words).stderr
    try:
        start = time.monotonic()
        done = call(bundle, HOOK, *words, capture_output=False, stderr=writing)
        assert time.monotonic() - start < 9
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == (2 if "--deadline=x" in words else 0)


def test_env_14_a_full_stderr_does_not_hold_the_report_of_a_killed_worker(bundle: Path) -> None:
    """Another Python makes it, whose standard error is the caller's own."""
    hook = hook_program.make(bundle / "hook", BROUGHT_IN.replace("CALL", FORBIDDEN["socket"]))
    reading, writing = full_pipe()
    words = (hook, "update-container", "--mask-params")
    try:
        start = time.monotonic()
        done = call(bundle, *words, capture_output=False, stderr=writing)
        assert time.monotonic() - start < 9
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == 1


def test_env_14_a_terminal_that_nobody_reads_holds_nothing(bundle: Path) -> None:
    """It is ready to be written to, and then takes less than a page."""
    code = BROUGHT_IN.replace("CALL", "[warn('x' * 4000) for _ in range(30)]")
    hook = hook_program.make(bundle / "hook", code)
    reading, writing = os.openpty()
    words = (hook, "--deadline=1", "update-container", "--mask-params")
    try:
        start = time.monotonic()
        call(bundle, *words, capture_output=False, stderr=writing)
        assert time.monotonic() - start < 9
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.system("strace")
def test_time_01_a_worker_that_writes_without_end_is_late(bundle: Path) -> None:
    """Also where the launcher reads more slowly than the worker writes: it is traced."""
    code = BROUGHT_IN.replace("CALL", "exec('while True: os.write(2, bytes(4096))')")
    blocked = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
    hook = hook_program.make(bundle / "hook", code + blocked)
    start = time.monotonic()
    tracer = ("strace", "-o", "/dev/null")
    done = call(bundle, *tracer, hook, "--deadline=1", "update-container", "--mask-params")
    assert time.monotonic() - start < 9
    assert done.returncode == 1
    assert "was not done in 1 s" in done.stderr
    assert len(done.stderr) < 70 << 10


@pytest.mark.parametrize("words", [("--deadline=x", *WORDS), ("no-such-hook",)])
def test_env_14_a_closed_stderr_ends_nothing(bundle: Path, words: tuple[str, ...]) -> None:
    """The exit status is that of the work, also where what the hook says reaches nobody."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = call(bundle, HOOK, *words, capture_output=False, stderr=writing)
    finally:
        os.close(writing)
    assert done.returncode == (2 if "--deadline=x" in words else 0)


def test_log_01_a_thousand_warnings_hold_nothing(bundle: Path) -> None:
    """What does not fit into a report is left out."""
    code = BROUGHT_IN.replace("CALL", "[warn('x' * 4000) for _ in range(1000)]")
    hook = hook_program.make(bundle / "hook", code)
    done = call(bundle, hook, "--deadline=5", "update-container", "--mask-params")
    assert done.returncode == 0
    assert 60 << 10 < len(done.stderr) < 70 << 10


def test_env_15_a_hook_without_arguments(bundle: Path) -> None:
    """Nor with empty ones, or with one that has no end."""
    for words in ((), ("",), ("--",), ("-",), ("--deadline",), ("update-container", "")):
        done = call(bundle, HOOK, *words)
        assert "Traceback" not in done.stderr
        assert "bug" not in done.stderr
    long = "x" * (50 << 10)
    done = call(bundle, HOOK, "update-container", *[f"--link={long}::/{long}"] * 4)
    assert done.returncode == 2
    assert len(done.stderr) < 4096


# ---- limits of the container, by a real runtime ----


@pytest.fixture
def kept() -> Iterator[Path]:
    """Return the log of hooks, whose directory is there, as where gpuruntime is installed."""
    log = Path(hook_log.PATH)
    log.parent.mkdir(mode=0o755)
    yield log
    shutil.rmtree(log.parent)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle for runc, whose process says that it has started."""
    work = tmp_path_factory.mktemp("container")
    make_root(work / "rootfs")
    subprocess.run(["runc", "spec", "--bundle", str(work)], check=True)
    return work


def start(
    container: Path,
    *command: str,
    resources: dict[str, Any],
    options: tuple[str, ...] = (),
    runtime: str = "runc",
    stage: str = "createContainer",
) -> subprocess.CompletedProcess[str]:
    """Start the container by *runtime* with the hook *command*, within *resources*."""
    path = container / "config.json"
    config = json.loads(path.read_text())
    config["process"].update(terminal=False, args=["/bin/busybox", "echo", "started"])
    config["root"]["readonly"] = False
    config["linux"]["resources"] = resources
    entry = {"path": command[0], "args": list(command), "env": ["A=b"]}
    config["hooks"] = {stage: [entry]}
    path.write_text(json.dumps(config))
    name = f"gpuruntime-process-{os.getpid()}"
    return subprocess.run(
        [runtime, "run", "--bundle", str(container), *options, name],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["createContainer", "createRuntime", "prestart"])
@pytest.mark.parametrize(
    "runtime", ["runc", pytest.param("crun", marks=pytest.mark.system("runc", "crun"))]
)
def test_what_a_hook_says_is_kept(container: Path, kept: Path, runtime: str, stage: str) -> None:
    """Crun drops both; the log is the host's in each of the namespaces where hooks run."""
    how = {"resources": {}, "runtime": runtime, "stage": stage}
    done = start(container, str(HOOK), "of-a-later-version", **how)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    done = start(container, str(HOOK), "update-container", "--link", "bad", **how)
    assert (done.returncode != 0, done.stdout) == (True, "")
    warned, failed, hint = (row[1:] for row in hook_log.parse(kept.read_text()))
    there = "gpu-cdi-hook: warning: there is no hook "
    assert warned == ("warned", f'{there}"of-a-later-version", nothing is done')
    assert failed[0] == hint[0] == "failed"
    assert '"bad" is not TARGET::LINK' in failed[1]
    assert hint[1].startswith("hint: ")
    # The control: the engine is told by runc alone.
    assert ("is not TARGET::LINK" in done.stderr) is (runtime == "runc")


def test_what_keeps_a_hook_from_being_loaded_is_kept(kept: Path, tmp_path: Path) -> None:
    """It is said before there is any hook."""
    hook = hook_program.make(tmp_path / "hook", "import hooks\nraise ImportError('no x')")
    done = call(TREE, hook)
    assert done.returncode == 1
    rows = [f"{text}\n" for _, _, text in hook_log.parse(kept.read_text())]
    assert "".join(rows) == done.stderr
    assert rows[0] == "gpu-cdi-hook: runtime: cannot load the hook: ImportError: no x\n"


def test_ns_02_a_root_that_is_not_pivoted(container: Path) -> None:
    """As in an initramfs: the same work at the same place."""
    done = start(container, str(HOOK), *WORDS, resources={}, options=("--no-pivot",))
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    assert os.readlink(f"{container}/rootfs{LIBRARIES}/libcuda.so") == "libcuda.so.1"


def test_meta_02_a_forbidden_call_starts_no_container(container: Path) -> None:
    """The runtime relays why."""
    hook = hook_program.make(container / "hook", BROUGHT_IN.replace("CALL", FORBIDDEN["socket"]))
    words = (str(hook), "update-container", "--mask-params")
    done = start(container, *words, resources={})
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert NOT_NEEDED in done.stderr


@pytest.mark.parametrize("limit", [3, 4, 5, 6, 7, 8, 9, 12, 20])
def test_cg_01_processes(container: Path, limit: int) -> None:
    """From 8 on the hook works. Below, the runtime cannot start it, or it names the limit."""
    resources = {"pids": {"limit": limit}}
    done = start(container, str(HOOK), *WORDS, resources=resources)
    if limit >= 8:
        assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    if done.returncode != 0:
        assert "started" not in done.stdout
        assert "Traceback" not in done.stderr
        if "gpu-cdi-hook: mount" in done.stderr:
            assert "give the container a pids limit of 8 or more" in done.stderr


@pytest.mark.parametrize("limit", [4, 8, 12, 16, 32, 64])
def test_cg_01_memory(container: Path, limit: int) -> None:
    """From 16 MiB on the hook works. Below, the runtime says that it has not enough, or we do."""
    resources = {"memory": {"limit": limit << 20}}
    done = start(container, str(HOOK), *WORDS, resources=resources)
    if limit >= 16:
        assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    elif done.returncode != 0:
        assert "started" not in done.stdout
        assert "Traceback" not in done.stderr
        assert re.search("memory limit|killed|OOM", done.stderr), done.stderr


def test_cg_02_a_hook_without_memory_starts_no_container(container: Path) -> None:
    """The kernel ends the process that works; what is missing is said by us or the runtime."""
    code = BROUGHT_IN.replace("CALL", "bytearray(256 << 20)")
    hook = hook_program.make(container / "hook", code)
    words = (str(hook), "update-container", "--mask-params")
    done = start(container, *words, resources={"memory": {"limit": 64 << 20}})
    assert done.returncode != 0
    assert "started" not in done.stdout
    # runc 1.1 puts its own words in place of the hook's where something was ended so.
    assert "memory limit" in done.stderr
    assert not (container / "rootfs/mark").is_symlink()


def test_cg_01_a_share_of_a_millisecond(container: Path) -> None:
    """The least there is: 1 ms of each 100 ms. What does not come to an end says so."""
    resources = {"cpu": {"quota": 1000, "period": 100000}}
    done = start(container, str(HOOK), *WORDS, resources=resources)
    assert done.returncode == 0 or "was not done in 10 s" in done.stderr


# ---- sudden ends ----


def mounts_of_host() -> list[str]:
    """Return the mounts that this process sees."""
    return sorted(Path("/proc/self/mountinfo").read_text().splitlines())


def processes_of(bundle: Path) -> list[int]:
    """Return the processes whose command line names *bundle*."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(bundle) in path.read_bytes() and int(path.parts[2]) != os.getpid():
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return found


def children(pid: int) -> list[int]:
    """Return the children of *pid*, none if it has ended."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


# In a mount namespace, since one of the operations mounts.
KILLED = """
mount -t tmpfs none /proc/driver
mkdir /proc/driver/nvidia
echo 'ModifyDeviceFiles: 1' >/proc/driver/nvidia/params
exec "$@"
"""


def test_time_02_killed_at_any_moment(bundle: Path) -> None:
    """No process and no mount stays; the next run does all, and takes away what was half-made."""
    (bundle / "state.json").write_text(json.dumps({"bundle": str(bundle)}))
    root = bundle / "rootfs"
    words = (*WORDS, "--mask-params", f"--container-spec={bundle}/state.json")
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", KILLED, "sh", HOOK, *words]
    before = mounts_of_host()

    def run_whole() -> float:
        start = time.monotonic()
        done = call(bundle, *command)
        assert (done.returncode, done.stderr) == (0, "")
        assert_done(root)
        return time.monotonic() - start

    # The first one has everything to read from the disk.
    run_whole()
    usual = run_whole()
    chance = random.Random(6)
    ended = 0
    for _ in range(KILLS):
        (root / "etc/ld.so.cache").unlink(missing_ok=True)
        (root / LIBRARIES[1:] / "libcuda.so").unlink(missing_ok=True)
        with subprocess.Popen(
            list(map(str, command)), env=ENVIRONMENT, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as hook:  # fmt: skip
            time.sleep(usual * chance.random())
            victims = [hook.pid, *children(hook.pid)]
            try:
                os.kill(chance.choice(victims), signal.SIGKILL)
            except ProcessLookupError:
                pass
            ended += hook.wait(PATIENCE_S) != 0
        end = time.monotonic() + 30
        while processes_of(bundle):
            assert time.monotonic() < end
            time.sleep(0.005)
        assert mounts_of_host() == before
        # As long as it takes now: the machine may be busier than before, or less.
        usual = run_whole()
    assert ended > KILLS // 2


@pytest.mark.system("strace")
def test_the_hook_does_not_wait_for_the_disk(bundle: Path) -> None:
    """Another container can keep that busy for longer than the deadline is."""
    trace = bundle / "trace"
    done = call(bundle, "strace", "-f", "-o", trace, HOOK, *WORDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert_done(bundle / "rootfs")
    calls = trace.read_text()
    # The control: its writing is in the trace.
    assert "renameat" in calls
    assert not re.search(r"\b(f(data)?sync|sync|syncfs|sync_file_range|msync)\(", calls)


@pytest.mark.system("strace")
@pytest.mark.parametrize("moment", ["symlinkat", "renameat", "fchmod", "write", "mkdirat"])
def test_time_02_killed_at_each_call_that_changes_something(bundle: Path, moment: str) -> None:
    """The first one, the second, and so on, until there are no more."""
    root = bundle / "rootfs"
    for count in range(1, 40):
        for path in ("etc/ld.so.cache", f"{LIBRARIES[1:]}/libcuda.so"):
            (root / path).unlink(missing_ok=True)
        inject = f"inject={moment}:signal=KILL:when={count}"
        tracer = ("strace", "-f", "-o", bundle / "trace", "-e", inject)
        killed = call(bundle, *tracer, HOOK, *WORDS).returncode != 0
        done = call(bundle, HOOK, *WORDS)
        assert (done.returncode, done.stderr) == (0, "")
        assert_done(root)
        if not killed:
            assert count > 1
            return
    pytest.fail("it never came to an end")
