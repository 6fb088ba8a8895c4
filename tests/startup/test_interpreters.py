# SPDX-License-Identifier: Apache-2.0
"""The start path and the hooks under every interpreter from 3.9 on that this machine has.

They do the same work as under the one that the launcher starts here, and say nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shim_host import LAUNCHER, TREE, ShimHost, asking
from startup.interpreters import ISOLATED, MINORS, found
from startup.test_python39 import start_path

from gpuruntime import bytecode

IMPORT = f"""
import importlib, sys
sys.path.append({str(TREE)!r})
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.modules) > len(sys.argv))
"""
SHIM = (
    f"import sys;sys.path.append({str(TREE)!r});from gpuruntime.shim.main import main;main(PYTHON)"
)
HOOK = f"import sys;sys.path.append({str(TREE)!r});from hooks.entry import main;main(PYTHON)"
LIBRARY = "usr/lib/x86_64-linux-gnu/libtiny.so.1"
HOOK_WORDS = (
    *("gpu-cdi-hook", "update-container", "--link", "libtiny.so.1::/usr/lib/libtiny.so"),
    *("--library", f"libtiny.so.1::/{LIBRARY}::x86-64", "--cuda-compat", "550.54"),
    "--application-profile",
)
NEWEST = max(found())


@pytest.fixture(params=MINORS)
def python(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the words that start Python 3 of that minor version."""
    words = found().get(request.param)
    if words is None:
        pytest.skip(f"this machine has no Python 3.{request.param}")
    return words


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShimHost]:
    """Give a simulated host."""
    with ShimHost(tmp_path_factory.mktemp("host")) as found_:
        yield found_


def code(text: str) -> tuple[str, ...]:
    """Return the words that have an interpreter run *text*, as the launcher has it."""
    return (*ISOLATED, "-c", text.replace("PYTHON", repr(sys.executable)))


def modules() -> list[str]:
    """Return the names of the modules of the start path and the hooks."""
    # The loader is no module: it runs as the first code of a file of bytecode.
    paths = [path for path in start_path() if path != bytecode.LOADER]
    names = [path.removesuffix(".py").replace("/", ".") for path in paths]
    return [name.removesuffix(".__init__") for name in names]


def test_the_oldest_and_a_new_one_are_among_them() -> None:
    """A test that finds no interpreter shows nothing."""
    found_here = sorted(found())
    assert found_here, "not even the one of the launcher"
    assert sys.version_info.minor <= NEWEST


def test_every_module_loads(python: tuple[str, ...]) -> None:
    """Without a warning: what a later version takes away is announced so."""
    command = [*python, "-W", "error", *code(IMPORT), *modules()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("statement", ["match 1:\n    case 1: pass", "1 if int | str else 0"])
def test_an_older_interpreter_is_no_newer_one(statement: str) -> None:
    """The control: what is found as 3.9 fails on what came later."""
    if 9 not in found():
        pytest.skip("this machine has no Python 3.9")
    for minor, fails in ((9, True), (NEWEST, False)):
        done = subprocess.run([*found()[minor], *ISOLATED, "-c", statement],
                              capture_output=True, check=False)  # fmt: skip
        assert (done.returncode != 0) is fails


def created(host: ShimHost, words: tuple[str, ...]) -> dict[str, Any]:
    """Return the OCI config that the runtime behind *words* makes."""
    bundle = Path(tempfile.mkdtemp(dir=host.place))
    (bundle / "config.json").write_text(json.dumps(asking("NVIDIA_VISIBLE_DEVICES=1,3")))
    arguments = ("create", "--bundle", str(bundle), "one")
    config = str(host.write_config({}))
    done = host.run(*words, *arguments, GPURUNTIME_CONFIG=config, RECORD=f"{bundle}/record")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (bundle / "record").read_text().splitlines() == list(arguments)
    made: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    return made


@pytest.mark.system("gcc")
def test_a_container_gets_the_same(host: ShimHost, python: tuple[str, ...]) -> None:
    """With the machine looked at and the config compiled, and again with what was kept of it."""
    wanted = host.place / "wanted.json"
    if not wanted.exists():
        wanted.write_text(json.dumps(created(host, (LAUNCHER,))))
    expected = json.loads(wanted.read_text())
    assert {"/dev/nvidia1", "/dev/nvidia3"} <= {d["path"] for d in expected["linux"]["devices"]}
    shim = (*python, *code(SHIM), "0", "", LAUNCHER)
    host.shell("find /run/gpuruntime -mindepth 1 -delete")
    assert created(host, shim) == expected
    assert host.shell("ls /run/gpuruntime")
    assert created(host, shim) == expected


def hooked(place: Path, words: tuple[str, ...]) -> dict[str, str]:
    """Return path → target or bytes of what the hook behind *words* makes of a root."""
    rootfs = place / "rootfs"
    (rootfs / LIBRARY).parent.mkdir(parents=True)
    (rootfs / LIBRARY).touch()
    (place / "config.json").write_text('{"root": {"path": "rootfs"}}')
    done = subprocess.run(
        [*words, *HOOK_WORDS], input=json.dumps({"ociVersion": "1.0.2", "bundle": str(place)}),
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return {
        str(path.relative_to(rootfs)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes().hex()
        for path in sorted(rootfs.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


@pytest.mark.system
def test_the_hook_makes_the_same(tmp_path: Path, python: tuple[str, ...]) -> None:
    """Links, loader cache and all, in its confined child."""
    (tmp_path / "wanted").mkdir()
    expected = hooked(tmp_path / "wanted", ("/usr/bin/python3", *code(HOOK)))
    assert expected["usr/lib/libtiny.so"] == "libtiny.so.1"
    assert b"libtiny.so.1" in bytes.fromhex(expected["etc/ld.so.cache"])
    (tmp_path / "made").mkdir()
    assert hooked(tmp_path / "made", (*python, *code(HOOK))) == expected
