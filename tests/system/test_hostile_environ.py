# SPDX-License-Identifier: Apache-2.0
"""No variable of a hostile image reaches the hook, each alone, and no descriptor of the runtime.

ENV-01 to ENV-08 and FD-01 of the attack catalogue, seen from inside the hook.
"""

from __future__ import annotations

from typing import Any

import pytest
from scenarios.machine import SCENARIOS, attack_names, run_on_host

pytestmark = pytest.mark.system("runc")
FIXED = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
NAMES = attack_names("env")
# Many variables at once: where the hook has an environment of its own, the image's is not there.
MANY = ("env_04_python_together", "env_05_character_set", "env_06_everything_else")
# What only has to be gone from the environment: no interpreter is beaten by it.
WEAK = ["env_04_pythonhome", "env_04_pythonuserbase", "env_04_home", "env_04_pythonplatlibdir"]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what environment the hook had under each attack."""
    return run_on_host(SCENARIOS / "environ.py")


def variables(seen: dict[str, Any]) -> list[str]:
    """Return the environment that the recorder wrote down."""
    text: str = seen["record"]["environ"]
    return text.rstrip("\0").split("\0")


def descriptors(seen: dict[str, Any]) -> list[str]:
    """Return the descriptors that the recorder wrote down."""
    return [line.split()[0] for line in seen["record"]["fds"].splitlines()]


@pytest.mark.parametrize(
    ("name", "variant"),
    [*((name, "absent") for name in NAMES), *((name, "set") for name in MANY)],
)
def test_hook_has_the_fixed_environment_and_three_descriptors(
    results: dict[str, Any], name: str, variant: str
) -> None:
    """Also where a Go program lost the hook's own environment on the way."""
    seen = results[name][variant]
    assert seen["status"] == 0, seen["output"]
    assert variables(seen) == FIXED
    assert sorted(descriptors(seen)) == ["0", "1", "2"]
    assert seen["record"]["cwd"] == "/"
    assert not seen["marked"]
    assert seen["changed"] == []


@pytest.mark.parametrize("name", NAMES)
def test_control_without_the_launcher_the_image_reaches_the_hook(
    results: dict[str, Any], name: str
) -> None:
    """Where runc does not hand the variable on, the test above proves nothing."""
    seen = results[name]["control"]
    found = variables(seen)
    assert {f"{k}={v}" for k, v in seen["environment"].items()} <= set(found)
    assert found != FIXED
    assert len(descriptors(seen)) > 3
    assert seen["record"]["cwd"] != "/"


@pytest.mark.parametrize("name", WEAK)
def test_control_a_python_hook_is_beaten_by_one_variable(
    results: dict[str, Any], name: str
) -> None:
    """Code of the image runs in it, or it never comes to its work."""
    seen = results[name]["weak"]
    assert seen["marked"] or not seen["control_ran"]
