# SPDX-License-Identifier: Apache-2.0
"""A node goes from the incumbent to us and back, with its real engines; `make test-switch`.

The incumbent's own programs cannot be had here: stand-ins that add nothing are in their place, so
its two steps show that containers start, and ours what they get.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from containers import seen

STORY = Path(__file__).with_name("story.py")
GPUS = {1, 3}
INCUMBENT = ("incumbent", "switched back")
OURS = ("switched", "by our names")
# The engine reads the spec itself, and of us there is only the hook.
BY_ENGINE = ("podman run --device", "podman run --device, an old spec")
# What comes from the incumbent's spec, or by its oldest mode, has no nodes of DRM.
WITHOUT_DRM = (
    *BY_ENGINE,
    *("docker run --runtime nvidia, an old spec", "docker run --runtime nvidia-cdi"),
    "docker run --runtime nvidia-legacy",
)
WAYS = (
    *("docker run --runtime nvidia", "docker run --runtime nvidia --gpus"),
    *("docker run --runtime nvidia, an old spec", "docker run --runtime nvidia-cdi"),
    *("docker run --runtime nvidia-legacy", "a pod of RuntimeClass nvidia"),
    *("ctr run --runc-binary", "a pod of CRI-O", *BY_ENGINE, "podman run --runtime nvidia"),
)
OUR_WAYS = (
    *("docker run --runtime gpuruntime", "docker run --gpus", "a pod of CRI-O, gpuruntime"),
    *("a pod of RuntimeClass gpuruntime", "podman run --runtime gpuruntime"),
)
PROGRAMS = ("dockerd", "docker", "containerd", "ctr", "podman", "conmon", "runc", "crun")
pytestmark = pytest.mark.engine(*PROGRAMS, "make", "gcc")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what was seen of the node, step by step."""
    return seen.play("story", program=STORY)


def looked(found: dict[str, Any], step: str, way: str) -> seen.Seen:
    """Return what a container saw; asserts that it has started."""
    answer = found["steps"][step][way]
    assert "error" not in answer, answer["error"]
    return seen.Seen.parse(answer["output"])


@pytest.mark.parametrize("step", INCUMBENT)
@pytest.mark.parametrize("way", WAYS)
def test_containers_start_with_the_incumbent(found: dict[str, Any], step: str, way: str) -> None:
    """Before us, and after us by the same files: a file of ours left over would be in the way."""
    container = looked(found, step, way)
    calls = found["steps"][step][way]["stand-ins"]
    if way in BY_ENGINE:
        seen.assert_no_driver(container)
        assert calls == 0
    else:
        seen.assert_no_gpu(container)
        assert calls > 0


@pytest.mark.parametrize("step", OURS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_engines_give_gpus_through_us(found: dict[str, Any], step: str, way: str) -> None:
    """No engine was told anything: the first time, the daemons have not even been restarted."""
    container = looked(found, step, way)
    seen.assert_granted(container, GPUS, found["host"], drm=way not in WITHOUT_DRM)
    seen.assert_driver(container)
    assert found["steps"][step][way]["stand-ins"] == 0


@pytest.mark.parametrize("way", OUR_WAYS)
def test_engines_give_gpus_by_our_own_names(found: dict[str, Any], way: str) -> None:
    """Beside the incumbent's names, which pods and scripts still have."""
    container = looked(found, "by our names", way)
    seen.assert_granted(container, GPUS, found["host"])
    seen.assert_driver(container)


@pytest.mark.parametrize(
    ("runtime", "devices"), [("nvidia", "void"), ("nvidia-cdi", "void"), ("nvidia-legacy", "1,3")]
)
def test_the_name_of_the_program_says_the_mode(
    found: dict[str, Any], runtime: str, devices: str
) -> None:
    """Its config says auto. In the legacy mode it is a prestart hook that reads the variable."""
    container = looked(found, "switched", f"docker run --runtime {runtime}")
    asked = [entry for entry in container.environment if entry.startswith(seen.REQUEST)]
    assert asked == [f"{seen.REQUEST}{devices}"]
    # With the incumbent's spec there is no node of DRM, with the machine's devices there is.
    has_drm = any(path.startswith("/dev/dri/") for path in container.nodes)
    assert has_drm == (runtime == "nvidia")


def test_a_container_of_the_incumbents_runs_on(found: dict[str, Any]) -> None:
    """Further processes in it, its stop, its next start and its removal come through us."""
    seen.assert_no_gpu(seen.Seen.parse(found["runs on"]))


def test_engine_files_are_the_same_to_the_byte(
    found: dict[str, Any], record_property: Any
) -> None:
    """At each step but the one at which engines are told of us; there, one file of theirs."""
    before = found["digests"]["before"]
    assert len(before) == 11
    assert all(before.values())
    changed = {
        step: [path for path, digest in digests.items() if digest != before[path]]
        for step, digests in found["digests"].items()
    }
    told = changed.pop("by our names")
    assert told == ["/etc/docker/daemon.json"]
    assert set(changed) == {"before", "incumbent", "switched", "switched back"}
    assert not any(changed.values())
    for path, digest in found["digests"]["switched back"].items():
        record_property("summary", f"{digest}  {path}")


def test_nothing_of_ours_is_left(found: dict[str, Any], record_property: Any) -> None:
    """Neither programs nor records, nor another mode or size of what was there."""
    assert found["left"] == []
    assert not found["records left"]
    # The control: there was something.
    names = ("zz-gpuruntime.toml", "99-gpuruntime.toml", "99-gpuruntime.conf")
    said = "".join(line["said"] for line in found["page"]["Switch back"])
    assert all(re.search(f'removed ".*/{name}"', said) for name in names)
    containers = {step: len(ways) for step, ways in found["steps"].items()}
    record_property(
        "summary",
        f"switch: {len(containers)} steps, {sum(containers.values())} containers "
        f"({containers['incumbent'] + containers['switched back']} by stand-ins), "
        f"{len(found['digests']['before'])} files the same to the byte, nothing left",
    )


@pytest.mark.parametrize("section", ["Switch", "Our own names", "Switch back"])
def test_commands_of_the_page_say_what_it_shows(found: dict[str, Any], section: str) -> None:
    """Among them the refusal to replace the incumbent, whose package would still own the names."""
    lines = found["page"][section]
    assert lines
    for line in lines:
        assert line["expected"] in line["said"], line["command"]
        # What shows nothing says nothing.
        assert bool(line["expected"]) == bool(line["said"]), line["command"]


def test_docker_s_own_option_by_runc_gives_the_gpus(found: dict[str, Any]) -> None:
    """Docker's runtime need not be ours: the hook brings the devices and allows them."""
    container = seen.Seen.parse(found["by runc"])
    seen.assert_granted(container, GPUS, found["host"], drm=False)
    seen.assert_driver(container)


def test_hooks_of_an_old_spec_do_their_work_and_heed_no_environment(
    found: dict[str, Any],
) -> None:
    """They name the incumbent's tool, and runc starts it with the variables of the image."""
    ours, weak = found["old hooks"], found["weak hooks"]
    assert (ours["status"], ours["link"]) == (0, "libcuda.so.1"), ours["error"]
    assert not ours["marked"]
    # The control: the command line in its place is turned against its user.
    assert weak["marked"]


def test_versions_name_the_incumbent_first(found: dict[str, Any]) -> None:
    """Programs that ask for the version look for its words; people must see that it is us."""
    said = found["told"]["runtime version"]["stdout"]
    first = r"NVIDIA Container Runtime version (\S+)\ngpu-container-runtime version \1\n\n"
    assert re.match(f"{first}runc version ", said)
    said = found["told"]["hook version"]["stdout"]
    assert re.match(
        r"NVIDIA Container Runtime Hook version (\S+)\nnvidia-container-runtime-hook version \1\n",
        said,
    )


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio"])
def test_what_the_incumbent_has_configured_is_configured(
    found: dict[str, Any], engine: str
) -> None:
    """By its tool's name: automation that calls it restarts no engine."""
    said = found["told"][f"check {engine}"]
    assert (said["status"], said["stdout"]) == (0, "")
    assert "differs" not in said["stderr"]


def test_the_incumbents_tool_does_as_it_did(found: dict[str, Any]) -> None:
    """As its package calls it after an installation; and its specs survive us."""
    told = found["told"]
    assert 'mode = "auto"' in told["quiet"]["stdout"]
    assert told["quiet"]["stderr"] == ""
    assert told["list"]["stdout"].splitlines()[-1] == "old.nvidia.com/gpu=all"
    spec = json.loads(told["generate"]["stdout"])
    hooks = spec["containerEdits"]["hooks"]
    assert {hook["path"] for hook in hooks} == {"/usr/bin/nvidia-cdi-hook"}
    assert "create-symlinks" in {hook["args"][1] for hook in hooks}
    assert [device["name"] for device in spec["devices"]][::2] == ["0"]
    spec = json.loads(told["generate as of old"]["stdout"])
    hooks = spec["containerEdits"]["hooks"]
    assert {hook["path"] for hook in hooks} == {"/usr/bin/nvidia-ctk"}
    assert {tuple(hook["args"][:2]) for hook in hooks} == {("nvidia-ctk", "hook")}


def test_containerd_2_finds_the_runtimes_of_each_step(found: dict[str, Any]) -> None:
    """In a config of version 3, which this distribution's containerd does not read."""
    steps = found["containerd 2"]
    if steps["incumbent"] is None:
        pytest.skip("containerd 2 is not here: make test-newer-engines brings it")
    theirs = {"runc": "", "nvidia": "/usr/bin/nvidia-container-runtime"}
    ours = {**theirs, "gpuruntime": "/usr/bin/gpu-container-runtime"}
    assert steps == {
        **dict.fromkeys(("incumbent", "switched", "switched back"), theirs),
        "by our names": ours,
    }
