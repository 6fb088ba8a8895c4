# SPDX-License-Identifier: Apache-2.0
"""A node is switched from the incumbent to us and back, with real engines; `make test-switch`.

Stand-ins that add nothing replace the programs of the incumbent: the two steps of the incumbent
show that containers start, and our steps show their GPUs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from containers import seen
from effort import IS_FULL

STORY = Path(__file__).with_name("story.py")
GPUS = {1, 3}
# The engine reads the spec itself; only the hook is ours.
BY_ENGINE = ("podman run --device", "podman run --device, an old spec")
# Containers by the spec of the incumbent or in the legacy mode have no DRM nodes.
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
# One of each engine. In the other steps than the first two, engines start anew, on files that are
# the same to the byte but for one.
AGAIN = (
    WAYS
    if IS_FULL
    else (
        *("docker run --runtime nvidia", "a pod of RuntimeClass nvidia", "a pod of CRI-O"),
        "podman run --device",
    )
)
OUR_WAYS = (
    *("docker run --runtime gpuruntime", "docker run --gpus", "a pod of CRI-O, gpuruntime"),
    *("a pod of RuntimeClass gpuruntime", "podman run --runtime gpuruntime"),
)
INCUMBENTS_STEPS = [("incumbent", way) for way in WAYS] + [("switched back", way) for way in AGAIN]
OUR_STEPS = [("switched", way) for way in WAYS] + [("by our names", way) for way in AGAIN]
PROGRAMS = ("dockerd", "docker", "containerd", "ctr", "podman", "conmon", "runc", "crun")
pytestmark = pytest.mark.engine(*PROGRAMS, "make", "gcc")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the results of each step of the node."""
    return seen.play("story", *AGAIN, program=STORY)


def looked(results: dict[str, Any], step: str, way: str) -> seen.Seen:
    """Return the output of a container; assert that it has started."""
    result = results["steps"][step][way]
    assert "error" not in result, result["error"]
    return seen.Seen.parse(result["output"])


@pytest.mark.parametrize(("step", "way"), INCUMBENTS_STEPS)
def test_containers_start_with_the_incumbent(results: dict[str, Any], step: str, way: str) -> None:
    """Before the switch, and after the switch back with the same files."""
    container = looked(results, step, way)
    calls = results["steps"][step][way]["stand-ins"]
    if way in BY_ENGINE:
        seen.assert_no_driver(container)
        assert calls == 0
    else:
        seen.assert_no_gpu(container)
        assert calls > 0


@pytest.mark.parametrize(("step", "way"), OUR_STEPS)
def test_the_same_engines_give_gpus_through_us(
    results: dict[str, Any], step: str, way: str
) -> None:
    """Without a change to an engine: in the first step, the daemons are not restarted."""
    container = looked(results, step, way)
    seen.assert_granted(container, GPUS, results["host"], drm=way not in WITHOUT_DRM)
    seen.assert_driver(container)
    assert results["steps"][step][way]["stand-ins"] == 0


@pytest.mark.parametrize("way", OUR_WAYS)
def test_engines_give_gpus_by_our_own_names(results: dict[str, Any], way: str) -> None:
    """Beside the names of the incumbent, which pods and scripts still use."""
    container = looked(results, "by our names", way)
    seen.assert_granted(container, GPUS, results["host"])
    seen.assert_driver(container)


@pytest.mark.parametrize(
    ("runtime", "devices"), [("nvidia", "void"), ("nvidia-cdi", "void"), ("nvidia-legacy", "1,3")]
)
def test_the_name_of_the_program_says_the_mode(
    results: dict[str, Any], runtime: str, devices: str
) -> None:
    """The config sets auto. In the legacy mode a prestart hook reads the variable."""
    container = looked(results, "switched", f"docker run --runtime {runtime}")
    variables = [entry for entry in container.environment if entry.startswith(seen.REQUEST)]
    assert variables == [f"{seen.REQUEST}{devices}"]
    # The spec of the incumbent has no DRM nodes; the discovery of our runtime adds them.
    has_drm = any(path.startswith("/dev/dri/") for path in container.nodes)
    assert has_drm == (runtime == "nvidia")


def test_a_container_of_the_incumbents_runs_on(results: dict[str, Any]) -> None:
    """Our runtime starts further processes in it, and stops, starts and removes it."""
    seen.assert_no_gpu(seen.Seen.parse(results["runs on"]))


def test_engine_files_are_the_same_to_the_byte(
    results: dict[str, Any], record_property: Any
) -> None:
    """In each step except "by our names", which changes one file of an engine."""
    before = results["digests"]["before"]
    assert len(before) == 11
    assert all(before.values())
    changed = {
        step: [path for path, digest in digests.items() if digest != before[path]]
        for step, digests in results["digests"].items()
    }
    configured_files = changed.pop("by our names")
    assert configured_files == ["/etc/docker/daemon.json"]
    assert set(changed) == {"before", "incumbent", "switched", "switched back"}
    assert not any(changed.values())
    for path, digest in results["digests"]["switched back"].items():
        record_property("summary", f"{digest}  {path}")


def test_nothing_of_ours_is_left(results: dict[str, Any], record_property: Any) -> None:
    """No program or record is left, and no file has another mode or size."""
    assert results["left"] == []
    assert not results["records left"]
    # The control: these files existed.
    names = ("zz-gpuruntime.toml", "99-gpuruntime.toml", "99-gpuruntime.conf")
    output = "".join(line["said"] for line in results["page"]["Switch back"])
    assert all(re.search(f'removed ".*/{name}"', output) for name in names)
    containers = {step: len(ways) for step, ways in results["steps"].items()}
    record_property(
        "summary",
        f"switch: {len(containers)} steps, {sum(containers.values())} containers "
        f"({containers['incumbent'] + containers['switched back']} by stand-ins), "
        f"{len(results['digests']['before'])} files the same to the byte, nothing left",
    )


@pytest.mark.parametrize("section", ["Switch", "Our own names", "Switch back"])
def test_commands_of_the_page_say_what_it_shows(results: dict[str, Any], section: str) -> None:
    """Among them the refusal to replace programs that the package of the incumbent owns."""
    lines = results["page"][section]
    assert lines
    for line in lines:
        assert line["expected"] in line["said"], line["command"]
        # Without output on the page, the command prints nothing.
        assert bool(line["expected"]) == bool(line["said"]), line["command"]


def test_docker_s_own_option_by_runc_gives_the_gpus(results: dict[str, Any]) -> None:
    """With another runtime in docker, the hook adds the devices and allows them."""
    container = seen.Seen.parse(results["by runc"])
    seen.assert_granted(container, GPUS, results["host"], drm=False)
    seen.assert_driver(container)


def test_hooks_of_an_old_spec_do_their_work_and_heed_no_environment(
    results: dict[str, Any],
) -> None:
    """The hooks name the tool of the incumbent; runc starts it with the variables of the image."""
    ours, weak = results["old hooks"], results["weak hooks"]
    assert (ours["status"], ours["link"]) == (0, "libcuda.so.1"), ours["error"]
    assert not ours["marked"]
    # The control: with the command line instead, the image runs its own code.
    assert weak["marked"]


def test_versions_name_the_incumbent_first(results: dict[str, Any]) -> None:
    """Programs parse the line of the incumbent; users must see that the program is ours."""
    output = results["told"]["runtime version"]["stdout"]
    first = r"NVIDIA Container Runtime version (\S+)\ngpu-container-runtime version \1\n\n"
    assert re.match(f"{first}runc version ", output)
    output = results["told"]["hook version"]["stdout"]
    assert re.match(
        r"NVIDIA Container Runtime Hook version (\S+)\nnvidia-container-runtime-hook version \1\n",
        output,
    )


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio"])
def test_what_the_incumbent_has_configured_is_configured(
    results: dict[str, Any], engine: str
) -> None:
    """By the name of its tool: automation that calls the tool restarts no engine."""
    check = results["told"][f"check {engine}"]
    assert (check["status"], check["stdout"]) == (0, "")
    assert "differs" not in check["stderr"]


def test_the_incumbents_tool_does_as_it_did(results: dict[str, Any]) -> None:
    """As its package calls the tool after an installation; its specs remain."""
    tool_results = results["told"]
    assert 'mode = "auto"' in tool_results["quiet"]["stdout"]
    assert tool_results["quiet"]["stderr"] == ""
    assert tool_results["list"]["stdout"].splitlines()[-1] == "old.nvidia.com/gpu=all"
    spec = json.loads(tool_results["generate"]["stdout"])
    hooks = spec["containerEdits"]["hooks"]
    assert {hook["path"] for hook in hooks} == {"/usr/bin/nvidia-cdi-hook"}
    assert "create-symlinks" in {hook["args"][1] for hook in hooks}
    assert [device["name"] for device in spec["devices"]][::2] == ["0"]
    spec = json.loads(tool_results["generate as of old"]["stdout"])
    hooks = spec["containerEdits"]["hooks"]
    assert {hook["path"] for hook in hooks} == {"/usr/bin/nvidia-ctk"}
    assert {tuple(hook["args"][:2]) for hook in hooks} == {("nvidia-ctk", "hook")}


def test_containerd_2_finds_the_runtimes_of_each_step(results: dict[str, Any]) -> None:
    """In a config of version 3, which the containerd of this distribution does not read."""
    steps = results["containerd 2"]
    if steps["incumbent"] is None:
        pytest.skip("containerd 2 is not installed: run `make test-newer-engines`")
    incumbent_runtimes = {"runc": "", "nvidia": "/usr/bin/nvidia-container-runtime"}
    all_runtimes = {**incumbent_runtimes, "gpuruntime": "/usr/bin/gpu-container-runtime"}
    assert steps == {
        **dict.fromkeys(("incumbent", "switched", "switched back"), incumbent_runtimes),
        "by our names": all_runtimes,
    }
