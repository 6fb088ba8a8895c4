# SPDX-License-Identifier: Apache-2.0
"""Tiers: one that cannot run here is skipped by name, or fails where it was promised.

Root's tests run apart from the machine (simhost/isolated.py): each worker of `-n`, or all.

`GPURUNTIME_TEST_REQUIRE=system,engine` promises those two. The summary counts each tier's tests,
and shows what tests have measured: their properties of the name "summary".
A tier's marker may name the programs that the test needs: `@pytest.mark.engine("podman")`.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import effort
import prepare
import pytest
from hypothesis import settings
from kubernetes import cluster, images

REQUIRE = "GPURUNTIME_TEST_REQUIRE"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# The tiers that a machine may be unable to run, and what a test without arguments needs.
PRIVILEGED = {
    "system": ("runc", "crun"),
    "newer_engines": (),
    "engine": ("dockerd", "docker", "containerd", "ctr", "podman"),
    "kubernetes": cluster.PROGRAMS,
    "image": ("chroot",),
}
TIERS = ("unit", "property", "conformance", *PRIVILEGED)
OUTCOMES = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}

# Tests of the node start gRPC's threads, and its handlers of fork, which wait for them, would run
# in the forks of all later tests of the same worker. Nor may a fork collect garbage of its parent:
# gRPC's destructors wait, without end, for threads that the fork does not have.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.register_at_fork(after_in_child=gc.freeze)
pytest.register_assert_rewrite("containers.seen", "containers.labspec")
pytest_plugins = ("catalogue", "deadline", "release_tests")
# No deadline: what an example takes depends on what else the machine does. Continuous integration,
# which judges a change, has the same examples each time; `make test` looks for new ones.
settings.register_profile(
    "usual",
    max_examples=effort.tries(100),
    deadline=None,
    derandomize=effort.IS_SHORT,
)
settings.load_profile("usual")
KEPT = Path("/run/gpuruntime")
ISOLATED = Path(__file__).parent / "simhost" / "isolated.py"
# In the environment of what is started by that.
MARK = "GPURUNTIME_TEST_ISOLATED"
# Set: what tests write below `tmp_path` is there after the run.
KEEP = "GPURUNTIME_TEST_KEEP"
CAP_SYS_ADMIN = 21
# The files of such a directory share a fixture of the session, so one worker has all of them.
TOGETHER = ("tests/kubernetes/",)
EXISTING = pytest.StashKey[list[str]]()
LEFTOVERS = pytest.StashKey[list[str]]()


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Start each worker of `-n` in namespaces of its own, where xdist is installed."""
    if pluginmanager.hasplugin("xdist"):
        pluginmanager.register(Workers())


class Workers:
    """How xdist starts its workers, and what they report."""

    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Have *specs* start their interpreter in namespaces of its own."""
        if may_isolate():
            for spec in specs:
                spec.python = shlex.join([sys.executable, str(ISOLATED), sys.executable])

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Return what hands out files, and each directory of TOGETHER as one."""
        return scheduler(config, log) if config.getoption("dist") == "loadfile" else None

    def pytest_testnodedown(self, node: Any) -> None:
        """Keep the leftovers that a worker reports."""
        node.config.stash[LEFTOVERS] += getattr(node, "workeroutput", {}).get("left", [])


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of `--dist loadfile` with the directories of TOGETHER."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 (where it is installed)

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            """Return the name of what one worker gets at once."""
            directories = [name for name in TOGETHER if nodeid.startswith(name)]
            return directories[0] if directories else super()._split_scope(nodeid)

    return Scheduling(config, log)


def may_isolate() -> bool:
    """Return whether tests can run, and do not yet run, in namespaces of their own."""
    if os.geteuid() != 0 or MARK in os.environ:
        return False
    lines = Path("/proc/self/status").read_text().splitlines()
    (effective,) = (line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start pytest again in namespaces of its own, unless its workers do that."""
    option = config.option
    if option.collectonly or hasattr(config, "workerinput") or not may_isolate():
        return
    make_shared()
    if getattr(option, "tx", None) or getattr(option, "numprocesses", None):
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture(in_=True)
    again = [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
    os.execv(sys.executable, [sys.executable, str(ISOLATED), *again])


def make_shared() -> None:
    """Build what several tests need; a failure is printed, and again by the tests that need it."""
    for make in (prepare.launcher, prepare.driver, prepare.wheels):
        try:
            make()
        except (prepare.PrepareError, FileNotFoundError) as error:
            print(f"prepare: {error}", file=sys.stderr)


def pytest_configure() -> None:
    """Raise UsageError for a tier in GPURUNTIME_TEST_REQUIRE that does not exist."""
    unknown = required() - set(PRIVILEGED)
    if unknown:
        raise pytest.UsageError(f"{REQUIRE}: no tier {', '.join(sorted(unknown))}")


def keep_in_memory(config: pytest.Config) -> None:
    """Have the files of tests in a tmpfs of this namespace: a disk costs a fifth more."""
    place = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "tests", place], check=True)


def kept_by_us() -> list[str]:
    """Return the files of our programs in the machine's own /run/gpuruntime."""
    return [str(path) for path in (KEPT, *sorted(KEPT.glob("*")))] if KEPT.exists() else []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Record the files that exist before the tests, and have those of the tests in memory."""
    if MARK in os.environ and KEEP not in os.environ:
        keep_in_memory(session.config)
    session.config.stash[EXISTING] = kept_by_us()
    session.config.stash[LEFTOVERS] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that has left files where only an installed program may keep some."""
    stash = session.config.stash
    stash[LEFTOVERS] += [path for path in kept_by_us() if path not in stash[EXISTING]]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = stash[LEFTOVERS]
    elif stash[LEFTOVERS]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def required() -> set[str]:
    """Return the tiers that must run on this machine."""
    return {word.strip() for word in os.environ.get(REQUIRE, "").split(",") if word.strip()}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests of a worker, long files first: short ones fill the gaps at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -TIERS.index(tier_of(item)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave the modules and items of all tests out of garbage collections from here on.

    Some tests collect garbage to count descriptors, and forks copy what a collection touches.
    What tests leave is little: rarer collections save a twentieth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test."""
    tiers = [tier for tier in TIERS if item.get_closest_marker(tier)]
    return tiers[-1] if tiers else "unit"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the test's tier to each report, since workers pass on nothing but reports."""
    report = yield
    report.tier = tier_of(item)
    return report


def why_not(item: pytest.Item) -> str | None:
    """Return why *item* cannot run on this machine, or None."""
    for tier, usual in PRIVILEGED.items():
        marker = item.get_closest_marker(tier)
        if marker is None:
            continue
        if os.geteuid() != 0:
            return f"tier {tier}: needs root"
        needed = marker.args or usual
        missing = [name for name in needed if shutil.which(name, path=PATH) is None]
        if missing:
            return f"tier {tier}: not installed: {', '.join(missing)}"
        if tier == "kubernetes" and cluster.script() is None:
            return f"tier {tier}: {cluster.SCRIPT} is not in the directory KUBERNETES or on PATH"
        if tier == "image" and images.current() is None:
            return f"tier {tier}: no current image in build/image: run make image"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that cannot run on this machine, or fail it if its tier is required."""
    reason = why_not(item)
    if reason is None:
        return
    if tier_of(item) in required():
        pytest.fail(f"{reason}, and {REQUIRE} promises it", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of tests of each tier, which shows a tier that did not run."""
    counts: Counter[tuple[str, str]] = Counter()
    for category, outcome in OUTCOMES.items():
        for report in terminalreporter.stats.get(category, []):
            tier = getattr(report, "tier", None)
            if tier is not None:
                counts[tier, outcome] += 1
    for path in terminalreporter.config.stash[LEFTOVERS]:
        terminalreporter.write_line(f"left on this machine by a test: {path}", red=True)
    terminalreporter.section("tiers")
    for tier in TIERS:
        shown = ", ".join(f"{counts[tier, o]} {o}" for o in ("passed", "failed", "skipped"))
        terminalreporter.write_line(f"{tier:13} {shown}")
    for category in OUTCOMES:
        for report in terminalreporter.stats.get(category, []):
            for name, line in getattr(report, "user_properties", ()):
                if name == "summary":
                    terminalreporter.write_line(line)
