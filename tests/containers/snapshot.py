# SPDX-License-Identifier: Apache-2.0
"""`snapshot.py`: creates on a host that changes, hangs or lies about its inventory.

Prints one JSON object: case → what the creates came to (creates.py). For the simulated host.
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

Found = dict[str, Any]
ROOT = "nvidia-container-cli.root"
# GPU 0 of the simulated host.
GPU_ENTRY = Path("/proc/driver/nvidia/gpus/0000:1a:00.0")
OTHER_ROOT = WORK / "root"
HASTE = {"discovery-timeout": creates.DEADLINE_S}
HANGS, FAILS = "fault init-hangs", "fault init-fails"


def warm(bench: Creates) -> Found:
    """Create again and again on a host that does not change, but for a driver that dies."""
    creates.forget()
    found = {"cold": bench.create(), "warm": bench.create("0,2")}
    for fault in (FAILS, HANGS):
        bench.fault(fault)
        found[fault] = bench.create("all")
    bench.fault()
    found["no GPU"] = bench.create(None)
    found["modes"] = [oct(os.stat(path).st_mode) for path in (RUN, SNAPSHOT)]
    return found


def rewrite_loader_cache() -> None:
    """Have the loader's cache written again, with the same content."""
    shutil.copy("/etc/ld.so.cache", "/etc/ld.so.cache~")
    os.rename("/etc/ld.so.cache~", "/etc/ld.so.cache")


def touch_libraries() -> None:
    """Have had another library for a moment."""
    path = LIBRARIES / "libnvidia-other.so.1"
    path.touch()
    path.unlink()


CHANGES: dict[str, Callable[[], object]] = {
    "mode of a node": lambda: os.chmod("/dev/nvidia3", 0o660),
    "loader cache": rewrite_loader_cache,
    "GPU gone": lambda: shutil.rmtree(GPU_ENTRY),
}


def changes(bench: Creates) -> Found:
    """Change the host between two creates, in several ways one after the other."""
    found: Found = {}
    for name, change in CHANGES.items():
        before = bench.create()
        change()
        found[name] = {"before": before, "after": bench.create(), "again": bench.create()}
    OTHER_ROOT.mkdir()
    run("mount", "--rbind", "/", OTHER_ROOT)
    before = bench.create()
    bench.configure(**{ROOT: str(OTHER_ROOT)})
    found["driver root"] = {
        "before": before,
        "after": bench.create(),
        "again": bench.create(),
    }
    bench.configure()
    # Lazily: of what is mounted twice on one place, the lower one has no path.
    run("umount", "--lazy", OTHER_ROOT)
    found["back"] = bench.create()
    bench.configure(**{"swarm-resource": "SOMETHING"})
    found["config"] = {"before": found["back"], "after": bench.create()}
    bench.configure()
    return found


def at_once(bench: Creates) -> Found:
    """Start several creates together, on a host without a snapshot and a slow driver."""
    bench.fault("initdelay_us 400000")
    creates.forget()
    asked = creates.questions()
    calls = bench.create_at_once(6)
    bench.fault()
    return {"calls": calls, "asked": creates.questions() - asked}


def hangs(bench: Creates) -> Found:
    """Have a driver that never answers."""
    creates.forget()
    bench.configure(**HASTE)
    bench.fault(HANGS)
    found: Found = {"first": bench.create(), "at once after": bench.create()}
    touch_libraries()
    asked = creates.questions()
    first = bench.start("1")
    # One that comes when the other has waited for the most part.
    time.sleep(0.75 * creates.DEADLINE_S)
    late = bench.start("1")
    found["of another host"], found["late"] = first.finish(), late.finish()
    found["asked for both"] = creates.questions() - asked
    touch_libraries()
    asked = creates.questions()
    found["four"] = bench.create_at_once(4)
    found["asked for four"] = creates.questions() - asked
    found["no GPU"] = [bench.create(None), bench.create("void")]
    bench.fault()
    touch_libraries()
    found["well again"] = bench.create()
    bench.configure()
    return found


def fails(bench: Creates) -> Found:
    """Have a driver that is not loaded."""
    creates.forget()
    bench.fault(FAILS)
    found: Found = {"first": bench.create(), "at once after": bench.create()}
    bench.fault()
    found["still"] = bench.create()
    touch_libraries()
    found["of another host"] = bench.create()
    return found


def held(bench: Creates) -> Found:
    """Hold the lock, as somebody does who asks the driver, while others create."""
    creates.forget()
    bench.create()
    lock = os.open(RUN / "inventory.lock", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found: Found = {"warm": bench.create()}
    SNAPSHOT.unlink()
    READY.unlink()
    before = sorted(os.listdir(RUN))
    found["no GPU"] = [bench.create(None), bench.create("void")]
    found["same"] = before == sorted(os.listdir(RUN))
    found["cold"] = bench.create()
    found["next"] = bench.create("2")
    os.close(lock)
    return found


def short(bench: Creates) -> Found:
    """Create with few descriptors, where discovery may not see each file, and then with many."""
    creates.forget()
    few = ("prlimit", "--nofile=40:40")
    found: Found = {"few": bench.create("all", before=few), "kept": sorted(os.listdir(RUN))}
    found["many"] = bench.create("all")
    creates.forget()
    bench.fault(FAILS)
    found["fails"] = bench.create(before=few)
    bench.fault()
    found["well again"] = bench.create()
    return found


def killed(bench: Creates) -> Found:
    """Create where each process that asks the driver is ended, as the kernel does for memory."""
    creates.forget()
    library = (LIBRARIES / "libnvidia-ml.so.1").resolve()
    kept = library.with_suffix(".kept")
    library.rename(kept)
    source = WORK / "killed.c"
    source.write_text(
        "#include <signal.h>\n__attribute__((constructor)) void f(void) { raise(SIGKILL); }\n"
    )
    name = "-Wl,-soname,libnvidia-ml.so.1"
    run("gcc", "-shared", "-fPIC", name, "-o", library, source)
    found: Found = {"first": bench.create(), "kept": sorted(os.listdir(RUN))}
    # In place: the host stays the same to every fingerprint of directories.
    shutil.copy(kept, library)
    kept.unlink()
    found["well again"] = bench.create()
    return found


def poisoned(content: Found) -> str:
    """Return a snapshot that gives GPU 2 to who asks for GPU 1, as text."""
    text = json.dumps(content).replace("/dev/nvidia1", "/dev/nvidia2")
    return json.dumps({**json.loads(text), "made": "poison"})


def trust(bench: Creates) -> Found:
    """Put snapshots there that are not to be believed; each a lie, if it is read."""
    creates.forget()
    bench.create()
    content = json.loads(SNAPSHOT.read_text())
    lie = poisoned(content)
    elsewhere = WORK / "elsewhere.json"
    elsewhere.write_text(lie)

    def put(text: str) -> None:
        SNAPSHOT.write_text(text)
        SNAPSHOT.chmod(0o644)

    def owned_by_another() -> None:
        put(lie)
        os.chown(SNAPSHOT, 1000, 1000)

    cases: dict[str, Callable[[], object]] = {
        "trusted": lambda: put(lie),
        "owner": owned_by_another,
        "link": lambda: SNAPSHOT.symlink_to(elsewhere),
        "directory": SNAPSHOT.mkdir,
        "garbage": lambda: put("\x00\xff{"),
    }
    found: Found = {}
    for name, prepare in cases.items():
        creates.forget()
        prepare()
        found[name] = {"first": bench.create(), "second": bench.create()}
    creates.forget()
    put(lie)
    RUN.chmod(0o775)
    found["directory of others"] = {"first": bench.create(), "second": bench.create()}
    RUN.chmod(0o755)
    failure = RUN / "inventory.failure"
    creates.forget()
    failure.write_text('{"format": 1, "driver root": "/", "at": "now"}')
    found["failure"] = {"first": bench.create(), "second": bench.create()}
    return found


def unwritable(bench: Creates) -> Found:
    """Have nowhere to keep anything, and then no directory, which can be made."""
    creates.forget()
    run("mount", "-o", "remount,ro", RUN)
    found: Found = {"read-only": [bench.create(), bench.create()]}
    run("umount", RUN)
    RUN.rmdir()
    run("mount", "-o", "remount,ro", "/run")
    found["no directory"] = [bench.create(), bench.create()]
    run("mount", "-o", "remount,rw", "/run")
    found["new directory"] = [bench.create(), bench.create()]
    return found


def health(bench: Creates) -> Found:
    """Have the operator ask for an answer of the driver at each create."""
    bench.configure(health="nvml")
    found: Found = {"calls": [bench.create(), bench.create()], "no GPU": bench.create(None)}
    bench.fault(FAILS)
    found["fails"] = bench.create()
    bench.fault()
    bench.configure()
    return found


def unkillable(bench: Creates) -> Found:
    """Have a driver in which not even SIGKILL ends who asks: NVML reads what never comes."""
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
    found: Found = {"first": bench.create(), "at once after": bench.create()}
    found["left"] = [
        Path(f"/proc/{name}/wchan").read_text()
        for name in os.listdir("/proc")
        if name.isdigit() and Path(f"/proc/{name}/stat").read_text().split(") ")[1][0] == "D"
    ]
    return found


# The last leaves a driver that answers nobody.
CASES = (
    *(warm, changes, at_once, hangs, fails, held, short, killed),
    *(trust, unwritable, health, unkillable),
)


def play() -> Found:
    """Go through CASES."""
    bench = Creates()
    return {case.__name__: case(bench) for case in CASES}


def mig() -> Found:
    """Ask for MIG devices, which are made again with other UUIDs and the same ids."""
    bench = Creates()
    old = "MIG-3a7c0000-51d2-5e0b-9f14-0b2a3c4d5e00"
    found: Found = {name: bench.create(name) for name in ("1", old, "0:0")}
    found["full GPU"] = bench.create("1")
    new = old.replace("3a7c", "4b8d")
    bench.conf = bench.conf.replace("MIG-3a7c", "MIG-4b8d")
    bench.fault()
    found["old after"], found["new after"] = bench.create(old), bench.create(new)
    found["full GPU after"] = bench.create("1")
    bench.fault("initdelay_us 400000")
    asked = creates.questions()
    found["at once"] = bench.create_at_once(4, new)
    found["asked at once"] = creates.questions() - asked
    found["uuids"] = [old, new]
    return found


if __name__ == "__main__":
    main({"snapshot": play, "mig": mig})
