# SPDX-License-Identifier: Apache-2.0
"""What is decided for a container, from edits as a spec has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cdi.edits import merge
from gpuruntime.config import Config
from gpuruntime.grant import Grant
from gpuruntime.plan import injection

CONFIG = Config({"nvidia-container-runtime.mode": "cdi"}, None)
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOOK = "/usr/bin/vendor-hook"


class Specs:
    """A host whose specs have one answer to everything."""

    def __init__(self, edits: Any) -> None:
        self.edits = edits

    def grant(self, _asked: object) -> Grant:
        """Return what the spec says."""
        return Grant(merge([self.edits]), notes=["of the spec"])


def decided(device: str = "vendor.com/x=0", **edits: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the hooks that a container gets where a spec has *edits*, and what is said of it."""
    document: Any = {
        "process": {"env": [f"NVIDIA_VISIBLE_DEVICES={device}", "LD_PRELOAD=./m.so"]},
        "hooks": {"createContainer": [{"path": "/engine"}]},
    }
    before = copy.deepcopy(edits)
    found = injection.decide(document, CONFIG, Specs(edits))  # type: ignore[arg-type]
    found.apply(document)
    # It may be what is kept for the next container.
    assert edits == before
    return document["hooks"], list(found.notes)


@pytest.mark.catalogue("ENV-12")
@pytest.mark.parametrize("kind", ["vendor.com/x", "nvidia.com/y"])
@pytest.mark.parametrize("path", [HOOK, "/usr/bin/python3", "/usr/bin/gpu-cdi-hook"])
@pytest.mark.parametrize("env", [{}, {"env": []}, {"env": None}])
@pytest.mark.parametrize("stage", ["createContainer", "startContainer"])
def test_a_hook_of_a_spec_never_gets_the_variables_of_the_image(
    stage: str, env: dict[str, Any], path: str, kind: str
) -> None:
    """As runc before 1.3 would give them, and any Go reader loses an empty list."""
    hook = {"hookName": stage, "path": path, "args": ["x"], **env}
    hooks, notes = decided(f"{kind}=0", hooks=[hook])
    assert hooks[stage][-1] == {"path": path, "args": ["x"], "env": [PATH]}
    assert notes[0] == "of the spec"
    assert [note for note in notes[1:] if f'"{path}"' in note and "has no env" in note]


def test_hooks_with_an_environment_or_the_engine_s_stay_as_they_are() -> None:
    """What they are given is what their spec says, or the engine has."""
    given = [
        {"hookName": "createContainer", "path": HOOK, "env": ["A=b"]},
        {"hookName": "createRuntime", "path": HOOK},
        {"hookName": "prestart", "path": HOOK},
        {"hookName": "poststop", "path": HOOK, "env": []},
    ]
    hooks, notes = decided(hooks=given)
    assert hooks == {
        "createContainer": [{"path": "/engine"}, {"path": HOOK, "env": ["A=b"]}],
        "createRuntime": [{"path": HOOK}],
        "prestart": [{"path": HOOK}],
        "poststop": [{"path": HOOK, "env": []}],
    }
    assert notes == ["of the spec"]


def test_order_and_number_of_hooks_are_the_spec_s() -> None:
    """One without env between two with."""
    own = ["A=b"]
    given = [
        {"hookName": "createContainer", "path": path, **env}
        for path, env in (("/1", {"env": own}), ("/2", {}), ("/3", {"env": own}), ("/2", {}))
    ]
    hooks, notes = decided(hooks=given)
    added = hooks["createContainer"][1:]
    assert [hook["path"] for hook in added] == ["/1", "/2", "/3", "/2"]
    assert [hook["env"] for hook in added] == [own, [PATH], own, [PATH]]
    # Said once.
    assert len(notes) == 2
