# SPDX-License-Identifier: Apache-2.0
"""Hostile images against our hook on real runc; each attack must beat a weak hook.

The names begin with the ids of the attack catalogue. ENV: the image's environment reaches the
hook. LINK: links and hard links in the image lead to the host. FD: descriptors of the runtime.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from scenarios.machine import SCENARIOS, TREE, run_on_host, variants_by_attack

pytestmark = pytest.mark.system
START_PYTHON = "/usr/bin/python3"
HOOK_ENVIRONMENT = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
# The cache cannot be written, but this image's loader searches the library directory without it.
WITHOUT_CACHE = {
    "link_03_etc_is_a_link",
    "special_cache_is_a_fifo",
    "special_cache_is_a_directory",
    "special_cache_is_sparse",
}
# The library directory is elsewhere in the image: the work is done there, inside.
ELSEWHERE = {"link_01_usr_lib_absolute", "link_02_library_directory_climbs"}
RECORDED = {"fd_01_what_the_hook_has"}
PLAYED = [(name, variant) for name, played in variants_by_attack().items() for variant in played]
HELD = [(name, variant) for name, variant in PLAYED if variant != "control"]


def programs() -> dict[str, str]:
    """Return what runs as root in front of the images, each file with what is in it."""
    paths = (START_PYTHON, "/sbin/ldconfig", str(TREE / "build/launcher"))
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    """Return the programs before any attack."""
    return programs()


@pytest.fixture(scope="module")
def results(before: dict[str, str]) -> dict[str, Any]:
    """Return what every attack came to, on one simulated host."""
    assert before
    return run_on_host(SCENARIOS / "hostile.py")


@pytest.mark.usefixtures("results")
def test_exe_02_the_programs_of_the_host_are_as_before(before: dict[str, str]) -> None:
    """Interpreter, launcher, ldconfig: none has been written to."""
    assert programs() == before


@pytest.mark.parametrize(("name", "variant"), HELD)
def test_hostile_image_is_held(results: dict[str, Any], name: str, variant: str) -> None:
    """No code of the image runs, nothing outside the root changes, and the work is done."""
    seen = results[name][variant]
    assert not seen["marked"]
    assert seen["changed"] == []
    assert not seen["mounts_changed"]
    assert seen["seconds"] < 9
    assert seen["status"] == 0, seen["output"]
    if name not in RECORDED:
        assert "ModifyDeviceFiles: 0" in seen["output"]
        assert seen["work_done"] or name in ELSEWHERE | WITHOUT_CACHE
        assert seen["linked"] or name in ELSEWHERE


def is_beaten(name: str, seen: dict[str, Any]) -> bool:
    """Return whether the attack beat the weak hook: code ran, the host changed, or no hook ran."""
    if name.startswith("link"):
        return bool(seen["changed"])
    if name == "env_02_debug_output":
        return bool(seen["changed"])
    if name in {"env_02_library_path", "env_03_trace", "env_04_python_together"}:
        # The loader or the interpreter died, or only listed libraries: the hook never ran.
        return seen["marked"] or not seen["control_ran"]
    return bool(seen["marked"])


@pytest.mark.parametrize(
    "name", [name for name, variant in PLAYED if variant == "control" and name not in RECORDED]
)
def test_weak_hook_is_beaten(results: dict[str, Any], name: str) -> None:
    """An attack that a weak hook survives as well proves nothing."""
    if "control" not in results[name]:
        assert name.startswith("special")
        return
    assert is_beaten(name, results[name]["control"])


@pytest.mark.parametrize("variant", ["set", "absent"])
def test_fd_01_env_06_the_hook_has_three_descriptors_and_two_variables(
    results: dict[str, Any], variant: str
) -> None:
    """A socket, a pipe and the exec fifo are runc's; the environment is the image's."""
    record = results["fd_01_what_the_hook_has"][variant]["record"]
    assert record["environ"].rstrip("\0").split("\0") == HOOK_ENVIRONMENT
    assert {line.split()[0] for line in record["fds"].splitlines()} == {"0", "1", "2"}
    assert record["cwd"] == "/"


def test_fd_01_env_06_control(results: dict[str, Any]) -> None:
    """Without the launcher the hook has the image's variables and the runtime's descriptors."""
    record = results["fd_01_what_the_hook_has"]["control"]["record"]
    assert "LD_PRELOAD=./m.so" in record["environ"]
    assert len(record["fds"].splitlines()) > 3
    assert record["cwd"] != "/"
