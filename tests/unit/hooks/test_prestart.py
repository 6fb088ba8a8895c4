# SPDX-License-Identifier: Apache-2.0
"""The prestart hook: its command line, and what counts as granted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuruntime import __version__
from hooks import prestart

if TYPE_CHECKING:
    from cdi.wire import DeviceNode

BIN = Path(__file__).parents[3] / ".venv" / "bin"
HOOK = "gpu-container-runtime-hook"
GPU: DeviceNode = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}
DEVICE = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}
RULE = {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rw"}
NOBODY = {"allow": False, "access": "rwm"}


def call(*words: str, state: str = "", name: str = HOOK) -> tuple[int, str, str]:
    """Return status, output and error of the hook that reads *state*."""
    done = subprocess.run(
        [name, *words],
        executable=BIN / HOOK,
        input=state,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["no-such"],
        ["-debug"],
        ["-config"],
        ["-config", "prestart"],
        ["--config=prestart"],
        ["-no-such", "prestart"],
        ["--", "prestart"],
        ["-debug=perhaps", "prestart"],
        ["", "prestart"],
    ],
)
def test_other_command_lines_get_the_usage(words: list[str]) -> None:
    """Status 2, as scripts know it from the incumbent's."""
    status, output, error = call(*words)
    assert (status, output) == (2, "")
    assert error == f"usage: {HOOK} [-debug] [-config FILE] prestart|poststart|poststop\n"


@pytest.mark.parametrize("name", [HOOK, "nvidia-container-runtime-hook"])
@pytest.mark.parametrize("words", [["-version"], ["--version"], ["-debug", "-version", "x"]])
def test_the_version_is_printed(words: list[str], name: str) -> None:
    """Tools read it from standard output."""
    lines = f"{name} version {__version__}\n"
    if name != HOOK:
        lines = f"NVIDIA Container Runtime Hook version {__version__}\n{lines}"
    assert call(*words, name=name) == (0, lines, "")


@pytest.mark.parametrize("command", ["poststart", "poststop"])
def test_other_hooks_do_nothing(command: str) -> None:
    """Without a look at the state."""
    assert call(command, state="no JSON") == (0, "", "")
    assert call("-debug", command, "more") == (0, "", "")


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ([NOBODY, RULE], True),
        ([RULE], True),
        # As `--privileged`.
        ([{"allow": True, "access": "rwm"}], True),
        ([{"allow": True, "type": "a", "access": "rwm"}], True),
        ([{"allow": True, "type": "c", "access": "rw"}], True),
        ([{**RULE, "major": -1, "minor": -1}], True),
        ([{**RULE, "minor": None}], True),
        ([{**RULE, "access": "r"}, {**RULE, "access": "w"}], True),
        ([], False),
        (None, False),
        ([RULE, NOBODY], False),
        ([RULE, {**RULE, "allow": False, "access": "w"}], False),
        ([RULE, {"allow": False, "type": "a", "access": "m"}], False),
        ([{**RULE, "access": "rm"}], False),
        ([{**RULE, "minor": 0}], False),
        ([{**RULE, "type": "b"}], False),
        ([{**RULE, "access": 7}], False),
    ],
)
def test_which_rules_let_a_node_be_used(
    rules: list[dict[str, Any]] | None, *, allowed: bool
) -> None:
    """Read and written; without such a rule the hook has to allow it."""
    document = {"linux": {"resources": {"devices": rules}}}
    assert prestart.may_use(GPU, document) is allowed


@pytest.mark.parametrize(
    ("device", "there"),
    [
        (DEVICE, True),
        ({**DEVICE, "type": "u"}, True),
        ({**DEVICE, "path": "/dev/nvidia0"}, False),
        # Another GPU by the name of this one.
        ({**DEVICE, "minor": 0}, False),
        ({**DEVICE, "type": "b"}, False),
        ({"path": "/dev/nvidia1"}, False),
    ],
)
def test_which_devices_are_the_node(device: dict[str, Any], *, there: bool) -> None:
    """By path and numbers; the hook binds a node that is not there."""
    assert prestart.has_node(GPU, {"linux": {"devices": [device]}}) is there
    assert not prestart.has_node(GPU, {"linux": {}})


@pytest.mark.parametrize(
    ("mount", "granted"),
    [
        ({"destination": "/dev/nvidia1", "source": "/dev/nvidia1"}, True),
        ({"destination": "/dev", "source": "/dev"}, True),
        ({"destination": "/dev/nvidia1", "source": "/dev/nvidia0"}, False),
        ({"destination": "/dev/nvidia1"}, False),
        ({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}, False),
        ({"destination": "/dev", "source": "/srv/dev"}, False),
        ({}, False),
    ],
)
def test_which_mounts_bring_the_node(mount: dict[str, str], granted: bool) -> None:
    """An engine without root binds the node in place of making one."""
    assert prestart.has_node(GPU, {"mounts": [mount]}) is granted


def test_a_mount_of_a_node_below_another_root() -> None:
    """The host's path is what is mounted."""
    node: DeviceNode = {**GPU, "hostPath": "/run/driver/dev/nvidia1"}
    for source, there in (("/run/driver/dev/nvidia1", True), ("/dev/nvidia1", False)):
        document = {"mounts": [{"destination": "/dev/nvidia1", "source": source}]}
        assert prestart.has_node(node, document) is there
