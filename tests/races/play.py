# SPDX-License-Identifier: Apache-2.0
"""Races of the attack catalogue: each with a control that must lose, or it proves nothing.

As a program, `make races`, the long runs, with a line each and one of numbers at the end.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.canary import digest
from races import crashes, mounting
from races.attackers import delayed, exchanging

from cdi import store
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.formats import ldcache_merge
from gpuruntime.oci.bundle import Bundle
from gpuruntime.system import syscalls
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.ops import Link
from gpuruntime.system.paths import Root, read_of_image
from gpuruntime.system.replace import replace_file

HERE = Path(__file__).parent
TREE = HERE.parents[1]
WAYS = ("OPENAT2", "WALK")
# The attacker's step, and how long what it attacks is held: measured to beat the control.
STEP_US, HOLD_US = 4000, 8000


class Outcome:
    """How often something was tried, how often it went wrong, how often the control did."""

    def __init__(self, name: str, tries: int, escapes: int, control: int | None) -> None:
        self.name = name
        self.tries = tries
        self.escapes = escapes
        self.control = control

    def __str__(self) -> str:
        control = "" if self.control is None else f", control {self.control}"
        return f"race {self.name}: {self.tries} tries, {self.escapes} escapes{control}"


def root_at(path: Path, way: str) -> Root:
    """Return the root *path* that resolves by *way*."""
    root = Root(str(path))
    root._has_openat2 = way == "OPENAT2"
    return root


def scene(work: Path) -> tuple[Path, Path, tuple[Path, Path]]:
    """Make a root and what is outside; return both, and a directory and a link that climbs out.

    Inside of the root the link leads to a directory as well.
    """
    place, outside = work / "root", work / "outside"
    for directory in (outside, place / "real", place / "outside"):
        directory.mkdir(parents=True)
        (directory / "kept").write_text("outside" if directory == outside else "inside")
    (place / "link").symlink_to("../outside")
    return place, outside, (place / "real", place / "link")


def _read(root: Root, number: int) -> bool:
    del number
    fd = root.open_path("/real/kept")
    try:
        return read_of_image(fd, "/real/kept", 100) == b"outside"
    finally:
        os.close(fd)


def _naive_read(place: str, number: int) -> bool:
    del number
    if os.path.realpath(f"{place}/real").startswith(place):
        return Path(f"{place}/real/kept").read_text() == "outside"
    return False


def _make_directory(root: Root, number: int) -> bool:
    os.close(root.open_directory(f"/real/made-{number}", create=True))
    return False


def _naive_make_directory(place: str, number: int) -> bool:
    if not os.path.islink(f"{place}/real"):
        os.mkdir(f"{place}/real/made-{number}")
    return False


def _write(root: Root, number: int) -> bool:
    fd = root.open_directory("/real")
    try:
        replace_file(fd, f"file-{number}", b"x", 0o644)
    finally:
        os.close(fd)
    return False


def _naive_write(place: str, number: int) -> bool:
    if not os.path.islink(f"{place}/real"):
        Path(f"{place}/real/file-{number}").write_text("x")
    return False


def _link(root: Root, number: int) -> bool:
    Link(f"/real/link-{number}", "kept").execute(root, lambda _: None)
    return False


def _naive_link(place: str, number: int) -> bool:
    if not os.path.islink(f"{place}/real"):
        os.symlink("kept", f"{place}/real/link-{number}")
    return False


Operation = Callable[[Root, int], bool]
BELOW: dict[str, tuple[Operation, Callable[[str, int], bool]]] = {
    "RACE-01 read": (_read, _naive_read),
    "RACE-03 mkdir": (_make_directory, _naive_make_directory),
    "RACE-04 write": (_write, _naive_write),
    "RACE-05 link": (_link, _naive_link),
}


def below_root(name: str, way: str, tries: int, least: int, attackers: int = 1) -> Outcome:
    """Work below a root *tries* times, then its control until that lost *least* times."""
    operation, naive = BELOW[name]
    with tempfile.TemporaryDirectory(prefix="gpuruntime-race-") as folder:
        place, outside, pair = scene(Path(folder))
        before = digest(outside)
        root = root_at(place, way)
        with exchanging(*[pair] * attackers):
            escapes = _count(lambda number: operation(root, number), range(tries), pair[0].parent)
            escapes += digest(outside) != before
            control, number = 0, tries
            end = time.monotonic() + 60
            while control < least and time.monotonic() < end:
                number += 1
                lost = _count(lambda n: naive(str(place), n), range(number, number + 1), None)
                control += lost if name == "RACE-01 read" else 0
                if name != "RACE-01 read":
                    control = len(os.listdir(outside)) - 1
        root.close()
    return Outcome(f"{name} by {way}, {attackers} attackers", tries, escapes, control)


def _count(attempt: Callable[[int], bool], numbers: range, clean: Path | None) -> int:
    """Return how often *attempt* says that it was led out; empty *clean* at times."""
    lost = 0
    for number in numbers:
        try:
            lost += attempt(number)
        except (OSError, GpuRuntimeError):
            continue
        if clean is not None and number % 5000 == 4999:
            for name in ("real", "outside"):
                _empty(clean / name)
    return lost


def _empty(directory: Path) -> None:
    # A name for whichever it is: the files of the link's directory are inside as well.
    for name in ("made", "file", "link"):
        for path in directory.glob(f"{name}-*"):
            try:
                path.rmdir() if name == "made" else path.unlink()
            except OSError:
                continue


def mounts(way: str, tries: int, control_tries: int) -> Outcome:
    """RACE-02: mount below a root, each mount delayed; then the control."""

    def run(kind: str, call: str, count: int) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="gpuruntime-race-") as folder:
            work = Path(folder)
            _, _, pair = mounting.prepare(work)
            command = [
                *("unshare", "--mount", "--propagation", "private", "--"),
                *delayed(call, HOLD_US, work / "trace"),
                *(sys.executable, str(HERE / "mounting.py"), str(work), kind, str(count)),
            ]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(TREE / "tests"), str(TREE))),
            }
            with exchanging(pair, pause_us=STEP_US):
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True,
                    timeout=3600,
                )  # fmt: skip
            found: dict[str, int] = json.loads(done.stdout)
            return found

    ours = run(way, "move_mount", tries)
    weak = run("STRING", "mount", control_tries)
    assert ours["inside"], "no mount was made at all"
    return Outcome(f"RACE-02 mount by {way}", tries, ours["outside"], weak["outside"])


def config_crashes() -> Outcome:
    """RACE-06: a store of config.json that is killed before each of its calls."""
    old, new = {"ociVersion": "1"}, {"ociVersion": "2", "filler": "x" * 5000}
    escapes = tries = outcomes = 0
    with tempfile.TemporaryDirectory(prefix="gpuruntime-race-") as folder:
        path = Path(folder) / "config.json"
        while True:
            path.write_text(json.dumps(old))
            path.chmod(0o640)
            tries += 1
            was_killed = crashes.ended_before(tries, lambda: Bundle(folder).store(new))  # type: ignore[arg-type]
            found = json.loads(path.read_text())
            escapes += found not in (old, new) or path.stat().st_mode & 0o7777 != 0o640
            outcomes |= 1 if found == old else 2
            if not was_killed:
                break
    assert outcomes == 3, "it was never killed in time"
    control = 0
    with tempfile.TemporaryDirectory(prefix="gpuruntime-race-") as folder:
        path = Path(folder) / "config.json"
        for number in range(1, 200):
            path.write_text(json.dumps(old))

            def write() -> None:
                with path.open("w") as stream:
                    stream.write(json.dumps(new)[:100])
                    stream.flush()
                    stream.write(json.dumps(new)[100:])

            if not crashes.ended_before(number, write):
                break
            try:
                control += json.loads(path.read_text()) not in (old, new)
            except ValueError:
                control += 1
    return Outcome("RACE-06 crash of a store", tries, escapes, control)


def two_stores(tries: int) -> Outcome:
    """RACE-06: two shims on one bundle: the file is always one's or the other's, whole."""

    def write(path: Path, document: Any) -> None:
        Bundle(str(path.parent)).store(document)

    return _two_writers("RACE-06 two stores", "config.json", write, tries)


def spec_reads(tries: int) -> Outcome:
    """RACE-07: a CDI spec that is written again and again while it is read."""

    def save(path: Path, document: Any) -> None:
        store.save(str(path), json.dumps(document), may_trust=lambda _: True)

    return _two_writers("RACE-07 read of a spec", "spec.json", save, tries)


def _two_writers(name: str, file: str, write: Callable[[Path, Any], None], tries: int) -> Outcome:
    """Read *file* while two write it; the control writes in place."""
    documents = [{"ociVersion": str(i), "filler": str(i) * 20_000} for i in range(2)]

    def in_place(path: Path, document: Any) -> None:
        text = json.dumps(document)
        with path.open("w") as stream:
            stream.write(text[:100])
            stream.flush()
            # A reader gets its turn here, also on a machine where others have most of the time.
            time.sleep(0.001)
            stream.write(text[100:])

    counts = []
    for how in (write, in_place):
        wrong = 0
        with tempfile.TemporaryDirectory(prefix="gpuruntime-race-") as folder:
            path = Path(folder) / file
            in_place(path, documents[0])
            stop = threading.Event()

            def work(document: Any, how: Any = how, path: Path = path, stop: Any = stop) -> None:
                while not stop.is_set():
                    how(path, document)

            threads = [threading.Thread(target=work, args=(d,)) for d in documents]
            for thread in threads:
                thread.start()
            try:
                for _ in range(tries):
                    try:
                        wrong += json.loads(path.read_text()) not in documents
                    except ValueError:
                        wrong += 1
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            wrong += os.listdir(folder) != [file]
        counts.append(wrong)
    return Outcome(name, tries, *counts)


def hook_crashes(step: int) -> Outcome:
    """TIME-02: the loader's cache and a link, killed before each *step*-th call; then again."""
    entries = (ldcache_merge.CacheEntry("libcuda.so.1", "/usr/lib/gpu/libcuda.so.1", 0x303),)
    escapes = tries = 0
    for number in range(1, 100_000, step):
        with tempfile.TemporaryDirectory(prefix="gpuruntime-race-") as folder:
            top, outside = Path(folder) / "root", Path(folder) / "outside"
            (top / "etc/ld.so.conf.d").mkdir(parents=True)
            (top / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
            outside.mkdir()
            (outside / "victim").write_text("kept")
            (top / "etc/ld.so.cache").symlink_to(outside / "victim")
            before = digest(outside)
            root = Root(str(top))

            def work(root: Root = root) -> None:
                Link("/usr/lib/gpu/libcuda.so", "libcuda.so.1").execute(root, lambda _: None)
                LoaderCache(entries).execute(root, lambda _: None)

            tries += 1
            was_killed = crashes.ended_before(number, work)
            work()
            rows = ldcache_merge.parse((top / "etc/ld.so.cache").read_bytes())
            escapes += digest(outside) != before or not any(r[0] == "libcuda.so.1" for r in rows)
            root.close()
            if not was_killed:
                break
    return Outcome("TIME-02 crash of the hook's work", tries, escapes, None)


def eagain(tries: int) -> Outcome:
    """RACE-08: openat2(2) says EAGAIN some times: few are tried again, many are an error."""
    real, left = syscalls.openat2, 0
    rng = random.Random(1)
    escapes = 0

    def answer(*arguments: Any, **named: Any) -> int:
        nonlocal left
        if left:
            left -= 1
            raise syscalls.SyscallError(11, "openat2")
        return real(*arguments, **named)

    syscalls.openat2 = answer
    try:
        root = Root("/")
        for _ in range(tries):
            times = left = rng.choice((0, 1, 10, 100, 1000))
            try:
                os.close(root.open_path("/etc"))
                escapes += times > 128
            except OSError as error:
                escapes += error.errno != 11 or times < 128
            left = 0
        root.close()
    finally:
        syscalls.openat2 = real
    return Outcome("RACE-08 EAGAIN", tries, escapes, None)


def refresh_storm(times: int) -> Outcome:
    """RACE-10: many refreshes at once while a file of the driver comes and goes."""
    simhost = TREE / "tests/simhost/simhost.py"
    done = subprocess.run(
        [sys.executable, simhost, "run", "--", sys.executable, HERE / "storm.py", str(times)],
        capture_output=True, text=True, check=True, timeout=1800, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return Outcome("RACE-10 refresh storm", times, found["escapes"], None)


def main() -> None:
    """Run each for long, and exit with 1 if one escaped, or a control did not lose."""
    outcomes: list[tuple[Outcome, int]] = []

    def add(outcome: Outcome, least: int) -> None:
        print(outcome, flush=True)
        outcomes.append((outcome, least))

    factor = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    for name in BELOW:
        tries = 1_000_000 if name == "RACE-01 read" else 50_000
        for way in WAYS:
            for attackers in (1, 3):
                add(below_root(name, way, int(tries / 4 * factor), 10, attackers), 10)
    for way in WAYS:
        add(mounts(way, int(2000 * factor), 1500), 10)
    add(config_crashes(), 1)
    add(two_stores(int(20_000 * factor)), 1)
    add(spec_reads(int(20_000 * factor)), 1)
    add(hook_crashes(1), 0)
    add(eagain(int(2000 * factor)), 0)
    add(refresh_storm(int(100 * factor) or 1), 0)
    bad = sum(o.escapes > 0 or (o.control or 0) < least for o, least in outcomes)
    print(
        f"races: {len(outcomes)} races, {sum(o.tries for o, _ in outcomes)} tries, "
        f"{sum(o.escapes for o, _ in outcomes)} escapes, "
        f"controls lost {sum(o.control or 0 for o, _ in outcomes)} times, {bad} bad"
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
