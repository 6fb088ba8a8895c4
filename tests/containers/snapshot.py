# SPDX-License-Identifier: Apache-2.0
"""`snapshot.py`: creates on a host that changes, hangs or lies about its inventory.

Prints one JSON object: case → results of the creates (creates.py). For the simulated host.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import creates
from creates import CONF, LIBRARIES, READY, RUN, SNAPSHOT, Creates
from drivers import TREE, FailedError, run
from scenario import WORK, main

sys.path.append(str(TREE / "tests" / "scenarios"))
import silent_fuse

Results = dict[str, Any]
ROOT = "nvidia-container-cli.root"
# GPU 0 of the simulated host.
GPU_ENTRY = Path("/proc/driver/nvidia/gpus/0000:1a:00.0")
OTHER_ROOT = WORK / "root"
HASTE = {"discovery-timeout": creates.DEADLINE_S}
HANGS, FAILS = "fault init-hangs", "fault init-fails"


def warm(bench: Creates) -> Results:
    """Create several times on a host that does not change, except for a driver that fails."""
    creates.forget()
    results = {"cold": bench.create(), "warm": bench.create("0,2")}
    for fault in (FAILS, HANGS):
        bench.fault(fault)
        results[fault] = bench.create("all")
    bench.fault()
    results["no GPU"] = bench.create(None)
    results["modes"] = [oct(os.stat(path).st_mode) for path in (RUN, SNAPSHOT)]
    return results


def rewrite_loader_cache() -> None:
    """Replace the loader cache by a file with the same content."""
    shutil.copy("/etc/ld.so.cache", "/etc/ld.so.cache~")
    os.rename("/etc/ld.so.cache~", "/etc/ld.so.cache")


def touch_libraries() -> None:
    """Create and remove a library: the library directory changes."""
    path = LIBRARIES / "libnvidia-other.so.1"
    path.touch()
    path.unlink()


CHANGES: dict[str, Callable[[], object]] = {
    "mode of a node": lambda: os.chmod("/dev/nvidia3", 0o660),
    "loader cache": rewrite_loader_cache,
    "GPU gone": lambda: shutil.rmtree(GPU_ENTRY),
}


def changes(bench: Creates) -> Results:
    """Change the host between two creates, once for each of several changes."""
    results: Results = {}
    for name, change in CHANGES.items():
        before = bench.create()
        change()
        results[name] = {"before": before, "after": bench.create(), "again": bench.create()}
    OTHER_ROOT.mkdir()
    run("mount", "--rbind", "/", OTHER_ROOT)
    before = bench.create()
    bench.configure(**{ROOT: str(OTHER_ROOT)})
    results["driver root"] = {
        "before": before,
        "after": bench.create(),
        "again": bench.create(),
    }
    bench.configure()
    # Lazily: a mount below another one on the same mount point has no path.
    run("umount", "--lazy", OTHER_ROOT)
    results["back"] = bench.create()
    bench.configure(**{"swarm-resource": "SOMETHING"})
    results["config"] = {"before": results["back"], "after": bench.create()}
    bench.configure()
    return results


def at_once(bench: Creates) -> Results:
    """Start several creates at once, on a host without a snapshot and with a slow driver."""
    bench.fault("initdelay_us 400000")
    creates.forget()
    count_before = creates.questions()
    calls = bench.create_at_once(6)
    bench.fault()
    return {"calls": calls, "asked": creates.questions() - count_before}


def hangs(bench: Creates) -> Results:
    """Create with a driver that hangs."""
    creates.forget()
    bench.configure(**HASTE)
    bench.fault(HANGS)
    results: Results = {"first": bench.create(), "at once after": bench.create()}
    touch_libraries()
    count_before = creates.questions()
    first = bench.start("1")
    # The second starts when most of the timeout of the first has passed.
    time.sleep(0.75 * creates.DEADLINE_S)
    second = bench.start("1")
    results["of another host"], results["late"] = first.finish(), second.finish()
    results["asked for both"] = creates.questions() - count_before
    touch_libraries()
    count_before = creates.questions()
    results["four"] = bench.create_at_once(4)
    results["asked for four"] = creates.questions() - count_before
    results["no GPU"] = [bench.create(None), bench.create("void")]
    bench.fault()
    touch_libraries()
    results["well again"] = bench.create()
    bench.configure()
    return results


def fails(bench: Creates) -> Results:
    """Create with a driver that is not loaded."""
    creates.forget()
    bench.fault(FAILS)
    results: Results = {"first": bench.create(), "at once after": bench.create()}
    bench.fault()
    results["still"] = bench.create()
    touch_libraries()
    results["of another host"] = bench.create()
    return results


def held(bench: Creates) -> Results:
    """Hold the inventory lock, as a discovery does, during creates."""
    creates.forget()
    bench.create()
    lock = os.open(RUN / "inventory.lock", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    results: Results = {"warm": bench.create()}
    SNAPSHOT.unlink()
    READY.unlink()
    before = sorted(os.listdir(RUN))
    results["no GPU"] = [bench.create(None), bench.create("void")]
    results["same"] = before == sorted(os.listdir(RUN))
    results["cold"] = bench.create()
    results["next"] = bench.create("2")
    os.close(lock)
    return results


def short(bench: Creates) -> Results:
    """Create with few descriptors, so that discovery may miss files, and then with many."""
    creates.forget()
    few = ("prlimit", "--nofile=40:40")
    results: Results = {"few": bench.create("all", before=few), "kept": sorted(os.listdir(RUN))}
    results["many"] = bench.create("all")
    creates.forget()
    bench.fault(FAILS)
    results["fails"] = bench.create(before=few)
    bench.fault()
    results["well again"] = bench.create()
    return results


def killed(bench: Creates) -> Results:
    """Create where each process that loads NVML is killed, as by the OOM killer."""
    creates.forget()
    library = (LIBRARIES / "libnvidia-ml.so.1").resolve()
    backup = library.with_suffix(".kept")
    library.rename(backup)
    source = WORK / "killed.c"
    source.write_text(
        "#include <signal.h>\n__attribute__((constructor)) void f(void) { raise(SIGKILL); }\n"
    )
    name = "-Wl,-soname,libnvidia-ml.so.1"
    run("gcc", "-shared", "-fPIC", name, "-o", library, source)
    results: Results = {"first": bench.create(), "kept": sorted(os.listdir(RUN))}
    # In place: no fingerprint of a directory changes.
    shutil.copy(backup, library)
    backup.unlink()
    results["well again"] = bench.create()
    return results


def poisoned(content: Results) -> str:
    """Return the text of a snapshot that gives GPU 2 to a container that requests GPU 1."""
    text = json.dumps(content).replace("/dev/nvidia1", "/dev/nvidia2")
    return json.dumps({**json.loads(text), "made": "poison"})


def trust(bench: Creates) -> Results:
    """Write snapshots that must not be trusted; the content of each is wrong."""
    creates.forget()
    bench.create()
    content = json.loads(SNAPSHOT.read_text())
    wrong_snapshot = poisoned(content)
    elsewhere = WORK / "elsewhere.json"
    elsewhere.write_text(wrong_snapshot)

    def put(text: str) -> None:
        SNAPSHOT.write_text(text)
        SNAPSHOT.chmod(0o644)

    def owned_by_another() -> None:
        put(wrong_snapshot)
        os.chown(SNAPSHOT, 1000, 1000)

    cases: dict[str, Callable[[], object]] = {
        "trusted": lambda: put(wrong_snapshot),
        "owner": owned_by_another,
        "link": lambda: SNAPSHOT.symlink_to(elsewhere),
        "directory": SNAPSHOT.mkdir,
        "garbage": lambda: put("\x00\xff{"),
    }
    results: Results = {}
    for name, prepare in cases.items():
        creates.forget()
        prepare()
        results[name] = {"first": bench.create(), "second": bench.create()}
    creates.forget()
    put(wrong_snapshot)
    RUN.chmod(0o775)
    results["directory of others"] = {"first": bench.create(), "second": bench.create()}
    RUN.chmod(0o755)
    failure = RUN / "inventory.failure"
    creates.forget()
    failure.write_text('{"format": 1, "driver root": "/", "at": "now"}')
    results["failure"] = {"first": bench.create(), "second": bench.create()}
    return results


def unwritable(bench: Creates) -> Results:
    """Create with a read-only directory, without a directory, and where it can be created."""
    creates.forget()
    run("mount", "-o", "remount,ro", RUN)
    results: Results = {"read-only": [bench.create(), bench.create()]}
    run("umount", RUN)
    RUN.rmdir()
    run("mount", "-o", "remount,ro", "/run")
    results["no directory"] = [bench.create(), bench.create()]
    run("mount", "-o", "remount,rw", "/run")
    results["new directory"] = [bench.create(), bench.create()]
    return results


def health(bench: Creates) -> Results:
    """Create with the configured health check, which queries the driver at each create."""
    bench.configure(health="nvml")
    results: Results = {"calls": [bench.create(), bench.create()], "no GPU": bench.create(None)}
    bench.fault(FAILS)
    results["fails"] = bench.create()
    bench.fault()
    bench.configure()
    return results


def unkillable(bench: Creates) -> Results:
    """Create with a driver that not even SIGKILL interrupts: NVML reads from a silent FUSE."""
    if not os.path.exists("/dev/fuse"):
        return {}
    creates.forget()
    bench.configure(**HASTE)
    silent = WORK / "silent"
    silent.mkdir()
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"silent", os.fsencode(silent), b"fuse", 0, options) != 0:
        raise FailedError(f"mount: {os.strerror(ctypes.get_errno())}")
    threading.Thread(target=silent_fuse.serve, args=(fd,), daemon=True).start()
    CONF.unlink()
    CONF.symlink_to(silent / "conf")
    results: Results = {"first": bench.create(), "at once after": bench.create()}
    results["left"] = [
        Path(f"/proc/{name}/wchan").read_text()
        for name in os.listdir("/proc")
        if name.isdigit() and Path(f"/proc/{name}/stat").read_text().split(") ")[1][0] == "D"
    ]
    return results


# The last case leaves a driver that hangs.
CASES = (
    *(warm, changes, at_once, hangs, fails, held, short, killed),
    *(trust, unwritable, health, unkillable),
)


def play() -> Results:
    """Run CASES."""
    bench = Creates()
    return {case.__name__: case(bench) for case in CASES}


def mig() -> Results:
    """Request MIG devices that are created again, with other UUIDs and the same ids."""
    bench = Creates()
    old = "MIG-3a7c0000-51d2-5e0b-9f14-0b2a3c4d5e00"
    results: Results = {name: bench.create(name) for name in ("1", old, "0:0")}
    results["full GPU"] = bench.create("1")
    new = old.replace("3a7c", "4b8d")
    bench.conf = bench.conf.replace("MIG-3a7c", "MIG-4b8d")
    bench.fault()
    results["old after"], results["new after"] = bench.create(old), bench.create(new)
    results["full GPU after"] = bench.create("1")
    bench.fault("initdelay_us 400000")
    count_before = creates.questions()
    results["at once"] = bench.create_at_once(4, new)
    results["asked at once"] = creates.questions() - count_before
    results["uuids"] = [old, new]
    return results


if __name__ == "__main__":
    main({"snapshot": play, "mig": mig})
