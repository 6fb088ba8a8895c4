# SPDX-License-Identifier: Apache-2.0
"""Links of hostile images where the kernel has no openat2, and every path that the hook looks up.

LINK-01 to LINK-09, ENV-08 and PROC-01 of the attack catalogue, on real runc with the hook under
strace.
"""

from __future__ import annotations

from typing import Any

import pytest
from scenarios.machine import SCENARIOS, attack_names, run_on_host

pytestmark = pytest.mark.system("runc", "strace")
# As in traced.py; test_hostile.py shows that each of them beats a weak hook.
OF_EVERY_ERROR = ("link_01_usr_lib_absolute", "link_04_cache_climbs", "link_06_to_proc")
PLAYED = [
    *((name, "ENOSYS") for name in attack_names("link")),
    *((name, "EPERM") for name in OF_EVERY_ERROR),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what every attack came to."""
    return run_on_host(SCENARIOS / "traced.py")


@pytest.mark.parametrize(("name", "error"), PLAYED)
def test_links_are_held_without_openat2(results: dict[str, Any], name: str, error: str) -> None:
    """Old kernels and old seccomp profiles have the walk; nobody else ever tests it."""
    seen = results[name][error]
    # Three looks at /proc, and the first one below the root.
    assert seen["injected"] == 4
    assert seen["answered"] == 0
    assert seen["changed"] == []
    assert not seen["mounts_changed"]
    assert seen["seconds"] < 9
    assert seen["relative"] == seen["below_root"] == seen["by_pid"] == []
    assert seen["status"] == 0, seen["output"]
    assert "ModifyDeviceFiles: 0" in seen["output"]
    assert "libcuda.so.550.163.01" in seen["links_inside"]


def test_env_08_proc_01_the_hook_looks_up_no_path_of_the_container(
    results: dict[str, Any],
) -> None:
    """No relative path, none below the root, none by the process number in the state."""
    seen = results["env_08"]["traced"]
    assert seen["status"] == 0, seen["output"]
    assert seen["work_done"]
    assert not seen["marked"]
    assert seen["traced"] > 50
    # It works below the root all the same, from descriptors.
    assert seen["answered"] > 0
    assert seen["relative"] == seen["below_root"] == seen["by_pid"] == []


@pytest.mark.parametrize(
    ("control", "shown"),
    [
        ("control_module", "below_root"),
        ("control_strings", "below_root"),
        ("control_relative", "relative"),
        ("control_pid", "by_pid"),
    ],
)
def test_env_08_proc_01_control_the_trace_shows_it(
    results: dict[str, Any], control: str, shown: str
) -> None:
    """A trace in which a bad hook looks good shows nothing."""
    assert results["env_08"][control][shown]
    assert results["env_08"]["control_module"]["marked"]
