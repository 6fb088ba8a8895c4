# SPDX-License-Identifier: Apache-2.0
"""LINT-02: the wrappers of system calls check errors, try again after a signal, close on exec."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.catalogue("LINT-02")
TREE = Path(__file__).parents[4]
PROGRAM = TREE / "tests" / "hostile" / "calls.py"
WRAPPERS = sorted((TREE / "gpuruntime" / "system").glob("*.py"))
LIBRARY = "_libc"
# What has to be around a call of the C library, so that its error is seen.
CHECKED_BY = "_check"


def unchecked(source: str) -> list[str]:
    """Return what is wrong with the calls of the C library in *source*."""
    tree = ast.parse(source)
    declared = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            if target.attr == "argtypes":
                declared.add(ast.unparse(target.value))
    checked = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == CHECKED_BY
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.startswith(f"{LIBRARY}."):
            if name not in declared:
                found.append(f"{name} has no argtypes")
            if node not in checked:
                found.append(f"{name} is not checked")
        elif name.endswith("CDLL") and "use_errno=True" not in ast.unparse(node):
            found.append(f"{ast.unparse(node)} does not keep errno")
    for node in ast.walk(tree):
        source = ast.unparse(node) if isinstance(node, ast.ClassDef) else ""
        if "(_ctypes.CFuncPtr)" in source and "FUNCFLAG_USE_ERRNO" not in source:
            found.append(f"{source.split('(')[0]} does not keep errno")
    return found


@pytest.mark.parametrize("path", WRAPPERS, ids=lambda path: path.stem)
def test_calls_of_the_c_library_are_declared_and_checked(path: Path) -> None:
    """An argument without a type is cut to 32 bits; an error that is not seen is none."""
    assert unchecked(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("_libc.sync()", ["_libc.sync has no argtypes", "_libc.sync is not checked"]),
        ("_libc.a.argtypes = []\nif _libc.a() != 0: pass", ["_libc.a is not checked"]),
        ("_check(lambda: _libc.a(), '')", ["_libc.a has no argtypes"]),
        ("_libc.a.argtypes = []\n_check(lambda: _libc.a(), '')", []),
        ("x = ctypes.CDLL(None)", ["ctypes.CDLL(None) does not keep errno"]),
        ("class X(_ctypes.CFuncPtr):\n _flags_ = 1", ["class X does not keep errno"]),
    ],
)
def test_control_what_is_not_so_is_found(source: str, wrong: list[str]) -> None:
    """A check that finds nothing proves nothing."""
    assert unchecked(source) == wrong


def run(work: Path, kind: str, *tracer: object) -> dict[str, Any]:
    """Make the calls, with *tracer* in front."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", *map(str, tracer),
         sys.executable, str(PROGRAM), str(work), kind],
        capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def injected(work: Path, kind: str, calls: str, error: str, when: str) -> dict[str, str]:
    """Return how the calls ended, of which *calls* fail by *error*."""
    place = work / "place"
    place.mkdir(exist_ok=True)
    inject = f"inject={calls}:error={error}:when={when}"
    trace = work / "trace"
    found = run(place, kind, "strace", "-f", "-o", trace, "-e", inject, "--")
    assert "(INJECTED)" in trace.read_text()
    ended: dict[str, str] = found["ended"]
    return ended


@pytest.mark.system("unshare", "mount")
def test_every_call_is_made_and_what_it_returns_is_closed_on_exec(tmp_path: Path) -> None:
    """Also where whoever calls forgets the flag."""
    found = run(tmp_path, "ours")
    assert set(found["ended"].values()) == {"done"}
    assert found["inherited"] == []


CALLS = (
    *("openat2", "fsopen", "fsconfig", "fsmount", "open_tree", "mount_setattr", "move_mount"),
    *("mount", "umount2", "fstatfs", "close_range", "unshare", "setns", "bpf", "prctl", "capset"),
)


@pytest.mark.slow
@pytest.mark.system("unshare", "strace")
def test_a_signal_makes_nothing_fail(tmp_path: Path) -> None:
    """Each call is interrupted once, and made again."""
    for name in CALLS:
        ended = injected(tmp_path, "ours", name, "EINTR", "1")
        assert set(ended.values()) == {"done"}, name


@pytest.mark.slow
@pytest.mark.system("unshare", "strace")
def test_control_calls_that_are_not_made_again(tmp_path: Path) -> None:
    """They have the same error, and fail by it."""
    for name in ("open_tree", "unshare", "prctl"):
        ended = injected(tmp_path, "naive", name, "EINTR", "1")
        assert ended[name] == "[Errno 4] Interrupted system call", name


@pytest.mark.slow
@pytest.mark.system("unshare", "strace")
def test_an_error_is_one_with_the_call(tmp_path: Path) -> None:
    """Whichever call it is: none goes on as if it had been done."""
    for name in CALLS:
        ended = injected(tmp_path, "ours", name, "EPERM", "1+")
        if name == "close_range":
            # There is another way.
            assert set(ended.values()) == {"done"}
            continue
        maker = {"fsconfig": "fsopen", "fsmount": "fsopen"}.get(name, name)
        assert ended[maker].startswith(f"{name}("), (name, ended)
        assert ended[maker].endswith(": Operation not permitted")
