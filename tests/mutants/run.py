# SPDX-License-Identifier: Apache-2.0
"""Apply each patch of a folder to a copy of the tree, and tell which test catches it.

`make mutants PATCHES=DIR`. A patch is a unified diff, by whomever; it is a weakness that the
suite must see. The likeliest tests run first (likely.py). What fails is run again, with the patch
and without, so that neither a test that fails anyway nor one that fails at times counts. The last
line has the numbers; the exit status is 1 if a patch survived or did not apply.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import FrameType

from mutants import likely, tree
from mutants.tree import PatchError

from gpuruntime.system.syscalls import die_with_parent

AT_A_TIME = 2
SECONDS = 900
# How many files of the likeliest are a run of their own.
LIKELY = 6
# A test that says nothing for so long does not end.
SILENCE_S = 75
QUICK = ("unit", "property", "launcher", "startup", "fuzz", "conformance")
# Rules against what privileged code must not have; not those of style.
BANS = "S,TID"
# Test → whether it fails without any patch.
baseline: dict[str, bool] = {}
running: set[int] = set()


class Mutant:
    """One patch in a copy of the tree, until *end* on the monotonic clock."""

    def __init__(self, place: Path, pristine: Path, end: float) -> None:
        self.place = place
        self.pristine = pristine
        self.end = end
        self.hanging: set[str] = set()
        # What failed once, and not again.
        self.unsteady: set[str] = set()

    def caught_by(self, selection: list[str]) -> str | None:
        """Run the tests of *selection*; return the one that fails because of the patch, if any."""
        while selection:
            anyway = {test for test, fails in baseline.items() if fails} | self.unsteady
            failed = self._failed(self.place, [*selection, *(f"--deselect={t}" for t in anyway)])
            if not failed:
                return None
            for test in failed:
                if test not in self.hanging and not self._failed(self.place, [test]):
                    self.unsteady.add(test)
                elif not self._fails_anyway(test):
                    return f"{test} (which does not end)" if test in self.hanging else test
        return None

    def _fails_anyway(self, test: str) -> bool:
        if test not in baseline:
            baseline[test] = bool(self._failed(self.pristine, [test]))
        return baseline[test]

    def _failed(self, place: Path, arguments: list[str]) -> list[str]:
        """Run pytest in *place*; return the tests that failed, the files that do not load.

        A test that does not end has failed.
        """
        cache = place / ".pytest_cache" / f"{threading.get_ident()}"
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        output = cache / "output"
        # What this program needs to find its modules is not for tests.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        options = ["-v", "--no-header", "-x", "-o", f"cache_dir={cache}"]
        with output.open("wb") as stream, subprocess.Popen(
            [place / ".venv/bin/python", "-m", "pytest", *options, *arguments],
            cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            start_new_session=True, preexec_fn=die_with_parent,  # noqa: PLW1509 (it makes one system call)
        ) as child:  # fmt: skip
            running.add(child.pid)
            try:
                hangs = not self._wait(child, output)
            finally:
                running.discard(child.pid)
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        if hangs:
            test = output.read_text(errors="replace").rpartition("\n")[2].strip()
            self.hanging.add(test)
            return [test]
        try:
            failed: dict[str, bool] = json.loads((cache / "v/cache/lastfailed").read_text())
        except FileNotFoundError:
            return []
        return list(failed)

    def _wait(self, child: subprocess.Popen[bytes], output: Path) -> bool:
        """Wait for *child*; return False if its *output* does not grow any more."""
        size, since = 0, time.monotonic()
        while child.poll() is None:
            now = time.monotonic()
            if now > self.end:
                raise TimeoutError
            if output.stat().st_size > size:
                size, since = output.stat().st_size, now
            if now - since > SILENCE_S:
                return False
            time.sleep(0.05)
        return True

    def lint(self) -> str | None:
        """Return which rule against what is banned the patch breaks, if any."""
        found = []
        for place in (self.pristine, self.place):
            said = set()
            for command in (
                ["ruff", "check", "--no-cache", "--quiet", "--select", BANS, "."],
                ["lint-imports", "--config", "pyproject.toml", "--no-cache"],
            ):
                done = subprocess.run(
                    [place / ".venv/bin" / command[0], *command[1:]],
                    cwd=place, capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode:
                    rules = re.findall(r"\b(?:S|TID)\d{3}\b", done.stdout) or [command[0]]
                    said |= {f"make lint ({rule})" for rule in rules}
            found.append(said)
        return min(found[1] - found[0], default=None)


def stages(place: Path, changed: list[str], diff: str, *, whole: bool) -> list[list[str]]:
    """Return the tests to run for the patch *diff* of files *changed*, stage by stage."""
    quick = sorted(
        path.relative_to(place).as_posix()
        for tier in QUICK
        for path in (place / "tests" / tier).rglob("test_*.py")
    )
    stems = {Path(name).stem for name in changed}
    stems |= {Path(name).parent.name for name in changed} & {"launcher", "hooks"}
    imports = re.compile("|".join(_import_of(name) for name in changed))
    system = sorted(
        path.relative_to(place).as_posix() for path in (place / "tests/system").glob("test_*.py")
    )
    words = likely.words_of(diff, place)
    quick, system = likely.ranked(quick, words, place), likely.ranked(system, words, place)
    first = [name for name in quick if any(stem in Path(name).name for stem in stems)][:LIKELY]
    first += [name for name in quick[:LIKELY] if name not in first]
    hostile = [name for name in system if "hostile" in name]
    near = [name for name in system if any(stem in Path(name).name for stem in stems)]
    near += [*system[: LIKELY // 2], *hostile[: LIKELY // 2]]
    second = [
        name
        for name in quick
        if name not in first
        and (any(stem in name for stem in stems) or imports.search((place / name).read_text()))
    ]
    third = [name for name in quick if name not in first + second]
    near = list(dict.fromkeys(near))
    return [
        first,
        near,
        second,
        [name for name in hostile if name not in near],
        third,
        [name for name in system if name not in near + hostile],
        *([["tests"]] if whole else []),
    ]


def _import_of(name: str) -> str:
    """Return a pattern of what imports the file *name* of the tree."""
    package, _, stem = name.removesuffix(".py").replace("/", ".").rpartition(".")
    return rf"\b{re.escape(f'{package}.{stem}')}\b|from {re.escape(package)} import .*\b{stem}\b"


def try_patch(diff: Path, work: Path, pristine: Path, options: argparse.Namespace) -> str:
    """Return what came of the patch *diff*: the beginning of its line."""
    place = work / f"{diff.name}.tree"
    start = time.monotonic()
    try:
        tree.copy(work / "snapshot", place)
        changed = tree.patch(place, diff)
        tree.build(place)
        mutant = Mutant(place, pristine, start + options.seconds)
        found = None
        for selection in stages(
            place, changed, diff.read_text(errors="replace"), whole=options.whole
        ):
            found = found or mutant.caught_by(selection)
        found = found or mutant.lint()
    except PatchError as error:
        return f"NOT APPLICABLE: {error}"
    except TimeoutError:
        return f"SURVIVED: no test failed in {options.seconds} s"
    else:
        return f"caught by {found}" if found else "SURVIVED"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    """Try every patch of the folder on the command line, two at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--whole", action="store_true", help="then every test of the tree")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each patch")
    options = parser.parse_args()
    patches = sorted([*options.folder.glob("*.patch"), *options.folder.glob("*.diff")])
    if not patches:
        sys.exit(f'mutants: no "*.patch" and no "*.diff" in "{options.folder}"')
    work = Path(tempfile.mkdtemp(prefix="gpuruntime-mutants-"))
    # Hooks in user namespaces read the tree as others.
    work.chmod(0o755)
    results = []

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        for pid in tuple(running):
            os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(work, ignore_errors=True)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        # Of one moment: somebody may be at work in the tree meanwhile.
        tree.snapshot(work / "snapshot")
        pristine = work / "pristine"
        tree.copy(work / "snapshot", pristine)
        tree.build(pristine)
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            tried = {
                pool.submit(try_patch, diff.resolve(), work, pristine, options): diff.name
                for diff in patches
            }
            for future in as_completed(tried):
                results.append(future.result())
                print(f"{tried[future]}: {results[-1]}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    caught, survived, lost = (
        sum(result.startswith(word) for result in results)
        for word in ("caught", "SURVIVED", "NOT APPLICABLE")
    )
    print(
        f"mutants: {len(patches)} patches, {caught} caught, {survived} survived, "
        f"{lost} not applicable"
    )
    sys.exit(bool(survived or lost))


if __name__ == "__main__":
    main()
