# SPDX-License-Identifier: Apache-2.0
"""ENV-12: a spec on disk that an older version wrote, whose hooks have no environment.

On a simulated host, with the shim's own reading of specs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shim_host import PROGRAM, ShimHost, asking

pytestmark = [pytest.mark.system("unshare"), pytest.mark.catalogue("ENV-12")]
SPEC = "/var/run/cdi/nvidia.json"
ASKS = asking("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0")
HINT = f'hint: run "gpuruntime cdi refresh --output {SPEC}"'
# Under these names the incumbent's programs are in specs.
OLD = ("/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ShimHost]:
    """Return a host with a spec of ours."""
    with ShimHost(tmp_path, "--gpus", "1") as started:
        started.shell(f"{PROGRAM} cdi refresh --output {SPEC}")
        yield started


def hooks(host: ShimHost) -> list[dict[str, Any]]:
    """Return the hooks of the spec."""
    found: list[dict[str, Any]] = json.loads(host.shell(f"cat {SPEC}"))["containerEdits"]["hooks"]
    return found


def spoil(host: ShimHost, **members: Any) -> None:
    """Have the spec's hook be one with *members*; None takes one away."""
    spec = json.loads(host.shell(f"cat {SPEC}"))
    (hook,) = spec["containerEdits"]["hooks"]
    hook.update(members)
    for name in [name for name, value in hook.items() if value is None]:
        del hook[name]
    spec["containerEdits"]["hooks"] = [hook]
    path = host.place / "spoiled.json"
    path.write_text(json.dumps(spec))
    host.shell(f"cat {path} > {SPEC}")


@pytest.mark.parametrize("stage", ["createContainer", "startContainer"])
@pytest.mark.parametrize("env", [None, []])
@pytest.mark.parametrize("program", OLD)
def test_the_shim_refuses_it(host: ShimHost, program: str, env: object, stage: str) -> None:
    """The variables of the image would be those of a process of root on the host."""
    spoil(host, path=program, hookName=stage, env=env)
    error = host.create(ASKS).error
    assert f'spec: the CDI spec is stale: its hook "{program}" has no env' in error
    assert HINT in error


@pytest.mark.parametrize(
    "members",
    [
        {"path": OLD[0], "env": ["NVIDIA_CTK_DEBUG=false"]},
        # On the host's side, with the environment of the engine.
        {"path": OLD[0], "hookName": "createRuntime", "env": None},
    ],
)
def test_control_the_same_spec_without_that_weakness(
    host: ShimHost, members: dict[str, Any]
) -> None:
    """What is refused is what it says, and nothing else."""
    spoil(host, **members)
    (hook,) = host.create(ASKS).config["hooks"][members.get("hookName", "createContainer")]
    assert hook.get("env") == members["env"]


@pytest.mark.parametrize("env", [None, []])
@pytest.mark.parametrize("path", [None, "/usr/bin/python3", "/usr/bin/vendor-hook"])
def test_a_hook_of_others_is_given_an_environment(
    host: ShimHost, path: str | None, env: object
) -> None:
    """And one of ours, whose launcher would drop the variables all the same."""
    spoil(host, env=env, **({"path": path, "args": [path]} if path else {}))
    (hook,) = host.create(ASKS).config["hooks"]["createContainer"]
    assert [entry.partition("=")[0] for entry in hook["env"]] == ["PATH"]
    assert path in (None, hook["path"])


def test_the_refresh_writes_it_anew(host: ShimHost) -> None:
    """For the same driver and the same GPUs, too: what it is compared with is its content."""
    spoil(host, path=OLD[0], env=None)
    host.shell(f"{PROGRAM} cdi refresh --output {SPEC}")
    assert all(hook["env"] for hook in hooks(host))
    assert host.create(ASKS).gpus == [0]


def test_the_doctor_names_it(host: ShimHost) -> None:
    """Whatever program it is: other runtimes read the spec as well."""
    spoil(host, path=OLD[0], env=None)
    said = host.run(PROGRAM, "doctor")
    assert f'the hook "{OLD[0]}" of "{SPEC}" has no env' in said.stdout
    # Control: it does not say so of a spec that is right.
    host.shell(f"{PROGRAM} cdi refresh --output {SPEC}")
    assert "has no env" not in host.run(PROGRAM, "doctor").stdout
