# SPDX-License-Identifier: Apache-2.0
"""`make demo`: two of eight GPUs in a real container, by a real runc, through us.

On a machine without a GPU, or with SIMULATED=1, on the simulated GPU host. Nothing remains on the
machine, whether the demo succeeds, fails, or is ended by Ctrl-C or SIGTERM; it shows that.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import driver
import leftovers

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
REAL_HOST = SIMHOST.with_name("real_host.py")
# Of the demo's containers and, on a real host, of its cgroups.
PREFIX = "gpuruntime-demo-"
SIMHOST_MOUNTS = TREE / "build" / "simhost" / "mnt"
CONTAINER = HERE / "container.py"
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Where Debian has runc, which a PATH without root's directories lacks.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_libc = ctypes.CDLL(None)


class EndedError(Exception):
    """A signal that ends the demo."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def main() -> None:
    """Run the demo on the simulated host or on the real one; exit 1 if something remains."""
    if os.geteuid() != 0:
        sys.exit("demo: containers need root\nhint: run: sudo make demo")
    os.environ["PATH"] = PATH
    if shutil.which("runc") is None:
        sys.exit('demo: "runc" is not installed\nhint: run as root: make setup')
    # Whatever of ours outlives its parent becomes our child, and is seen.
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    failure = ended = None
    process: subprocess.Popen[bytes] | None = None
    nodes = leftovers.driver_nodes()
    work = tempfile.mkdtemp(prefix=PREFIX)
    os.chmod(work, 0o755)
    try:
        for number in SIGNALS:
            signal.signal(number, _end)
        reason = reason_to_simulate()
        nodes = leftovers.driver_nodes()
        print(f"demo: {reason}" if reason else "demo: a real GPU is here", flush=True)
        # A signal in between would find a process without a name, and not end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        process = start(work, mask, is_simulated=bool(reason))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = process.wait()
        if status != 0:
            failure = f"failed, status {status}"
    except EndedError as error:
        ended = error.signal
        failure = f"ended by {ended.name}"
        if process is not None:
            _stop(process)
    _ignore_signals()
    shutil.rmtree(work, ignore_errors=True)
    show_leftovers(work, process.pid if process else 0, nodes)
    if failure:
        print(f"demo: {failure}", file=sys.stderr, flush=True)
        if ended:
            # The caller, such as make, is to see which signal it was.
            signal.signal(ended, signal.SIG_DFL)
            os.kill(os.getpid(), ended)
        sys.exit(1)
    print("demo: ok")


def reason_to_simulate() -> str:
    """Return why the demo uses the simulated host, or "" if it uses the machine's GPUs."""
    host = "the simulated host: eight GPUs, driver 550"
    if os.environ.get("SIMULATED"):
        return f"SIMULATED is set, so on {host}"
    try:
        driver.list_gpus()
    except driver.NoGpuError as error:
        return f"{error}, so on {host}"
    return ""


def start(work: str, mask: set[signal.Signals], *, is_simulated: bool) -> subprocess.Popen[bytes]:
    """Start the part of the demo that runs on the GPU host, with the signal mask *mask*."""
    name = f"{PREFIX}{os.getpid()}"
    host = "simulated" if is_simulated else "real"
    supervisor = [SIMHOST, "run", "--"] if is_simulated else [REAL_HOST, PREFIX]
    return subprocess.Popen(
        [sys.executable, *supervisor, sys.executable, CONTAINER, name, work, host],
        # What tests watch the launcher with costs time.
        env={**os.environ, "SIMHOST_WATCHED": "off"},
        preexec_fn=lambda: _prepare_child(mask),  # noqa: PLW1509 - this process has no threads
    )


def _prepare_child(mask: set[signal.Signals]) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(number: int, _frame: object) -> None:
    """End the demo; a second signal does not disturb its clean-up."""
    _ignore_signals()
    raise EndedError(number)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Have the supervisor end everything that it has started, and wait for it."""
    process.terminate()
    try:
        process.wait(leftovers.SETTLE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def show_leftovers(work: str, supervisor: int, nodes: frozenset[str]) -> None:
    """Print that nothing of this run remains; exit with what does."""
    traces = leftovers.Traces(
        directories=(work, str(SIMHOST_MOUNTS)),
        cgroups=(f"simhost-{supervisor}", f"{PREFIX}{supervisor}"),
        nodes=nodes,
    )
    remaining = traces.remaining()
    if remaining:
        sys.exit(f"demo: left on the machine: {'; '.join(remaining)}")
    new_nodes = traces.new_nodes()
    if new_nodes:
        print(f"made by the driver's own tool, and kept: {', '.join(new_nodes)}")
    print("afterwards: no mount, cgroup, process or file of the demo is left", flush=True)


if __name__ == "__main__":
    main()
