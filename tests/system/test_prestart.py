# SPDX-License-Identifier: Apache-2.0
"""The prestart hook in real containers: what it brings, what it refuses, and what it leaves alone.

Its hook is the one that brings the driver's files in the legacy mode.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from containers import seen

PROGRAM = seen.HERE / "prestart.py"
HINT = 'hint: run "gpuruntime config --set nvidia-container-cli.no-cgroups=false --in-place"'
CUDA = f"{seen.LIBRARIES}/libcuda.so.550.163.01"
NVIDIA_SMI = "/usr/bin/nvidia-smi"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.system("runc", name)) for name in ("runc", "crun")
    ],
)
def lowlevel(request: pytest.FixtureRequest) -> str:
    """Return the low-level runtime that starts the hook."""
    return str(request.param)


@pytest.fixture(scope="module")
def found(lowlevel: str) -> dict[str, Any]:
    """Return what every container came to."""
    return seen.play(lowlevel, program=PROGRAM)


def container(case: dict[str, Any]) -> seen.Seen:
    """Return what the container of *case*, which has started, saw."""
    assert case["status"] == 0, case["error"]
    assert case["mounted"] == []
    return seen.Seen.parse(case["output"])


def assert_refused(case: dict[str, Any], *texts: str) -> None:
    """Assert that the container has not started, and why; nothing is left on the host."""
    assert case["status"] != 0
    assert case["output"] == ""
    for text in texts:
        # runc quotes it once more.
        assert text in case["error"].replace("\\", "")
    assert "Traceback" not in case["error"]
    assert "this is a bug" not in case["error"]
    assert case["mounted"] == []


def assert_served(look: seen.Seen, host: dict[str, list[str]]) -> None:
    """Assert that the container has two GPUs, no other, and the driver as in all modes."""
    seen.assert_granted(look, {1, 3}, host, drm=False)
    seen.assert_driver(look)
    assert look.params == ["ModifyDeviceFiles: 0"]


def test_a_legacy_container_has_its_gpus_and_its_driver(found: dict[str, Any]) -> None:
    """Libraries, links, loader cache, programs, params: all that the other modes give as well."""
    plain = seen.Seen.parse(found["plain"])
    seen.assert_no_driver(plain)
    look = container(found["usual"])
    assert_served(look, found["host"])
    assert seen.files_for(look) == {"compute", "utility"}
    added = set(look.mounts) - set(plain.mounts)
    assert {CUDA, NVIDIA_SMI} <= added
    for point in added:
        assert {"ro", "nosuid", "nodev"} <= set(look.mounts[point]), point


def test_none_is_the_driver_alone(found: dict[str, Any]) -> None:
    """As in the other modes, for programs that ask the driver and use no GPU."""
    look = container(found["none"])
    seen.assert_granted(look, set(), found["host"], drm=False)
    seen.assert_driver(look)


def test_every_capability_brings_every_file(found: dict[str, Any]) -> None:
    """Graphics have nodes of DRM as well, which the runtime grants."""
    look = container(found["all"])
    seen.assert_granted(look, {1, 3}, found["host"])
    assert seen.files_for(look) == set(seen.LIBRARY_OF)


def test_who_asks_for_nothing_gets_nothing(found: dict[str, Any]) -> None:
    """In the legacy mode there is no hook then."""
    seen.assert_no_gpu(container(found["unasked"]))


def test_a_requirement_counts(found: dict[str, Any]) -> None:
    """The runtime says so before the hook would."""
    assert_refused(found["requirement"], "requirement: requirements not met: ")


def test_a_second_start_on_the_same_root_finds_its_own_work(found: dict[str, Any]) -> None:
    """As of a container that is restarted; there our runtime has no part in it."""
    assert_served(container(found["again"]), found["host"])


def test_a_second_hook_has_nothing_left_to_do(found: dict[str, Any]) -> None:
    """Two of them are what an engine and a hook directory add up to."""
    once, twice = (container(found[name]) for name in ("usual", "twice"))
    assert_served(twice, found["host"])
    assert twice.mounts == once.mounts

    def count(name: str) -> int:
        return sum(f" {CUDA} " in line for line in found[name]["output"].splitlines())

    assert (count("usual"), count("twice")) == (1, 1)


def test_a_mode_of_specs_is_refused_unless_the_mode_is_not_looked_at(
    found: dict[str, Any],
) -> None:
    """There devices come from a spec, which this hook does not read."""
    assert_refused(found["mode"], 'is not supported in the mode "cdi"', "docker run --runtime")
    assert_served(container(found["skip"]), found["host"])


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_without_our_runtime_the_hook_brings_the_devices_as_well(
    found: dict[str, Any], mode: str
) -> None:
    """As `docker run --gpus` with runc, before docker 29.2; test_device_grants.py has the rest."""
    assert_served(container(found["alone"][f"not granted, {mode}"]), found["host"])


def test_b015_a_gpu_that_is_not_there(found: dict[str, Any]) -> None:
    """Without our runtime the hook is who honours `missing-gpu = "warn"`."""
    assert_refused(found["alone"]["no such GPU"], "device: ", "hint: ")
    case = found["alone"]["no such GPU, warn"]
    seen.assert_no_gpu(container(case))


def test_b015_a_gpu_that_is_there_is_not_missing(found: dict[str, Any]) -> None:
    """What the hook may not grant, or the image requires, is not what that option is for."""
    assert_refused(found["alone"]["not granted, warn"], "device: the container may not use", HINT)
    assert_refused(found["alone"]["requirement, warn"], "requirement: requirements not met: ")


@pytest.mark.parametrize("mode", ["cdi", "jit-cdi"])
def test_without_our_runtime_other_modes_say_so_first(found: dict[str, Any], mode: str) -> None:
    """As the incumbent's hook does."""
    case = found["alone"][f"not granted, {mode}"]
    assert_refused(case, f'is not supported in the mode "{mode}"', "docker run --runtime")


@pytest.mark.parametrize("mode", ["auto", "legacy", "cdi", "jit-cdi"])
def test_the_hook_is_silent_for_who_asks_for_nothing(found: dict[str, Any], mode: str) -> None:
    """Whatever the mode: an engine may have it in front of every container."""
    case = found["alone"][f"unasked, {mode}"]
    seen.assert_no_gpu(container(case))
    assert "container-runtime-hook" not in case["error"]


@pytest.mark.parametrize("name", ["fifo_at_a_library", "libraries_lead_out", "read_only"])
def test_roots_that_are_served(found: dict[str, Any], name: str) -> None:
    """Nothing of the root is opened but what is mounted on, and links stay inside."""
    look = container(found["roots"][name])
    seen.assert_granted(look, {1, 3}, found["host"], drm=False)
    assert look.params == ["ModifyDeviceFiles: 0"]
    assert look.cached[:3] == ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"]


def test_a_link_at_a_library_stays_inside(found: dict[str, Any]) -> None:
    """It names a file of the host that is none of the container's business."""
    seen.assert_driver(container(found["roots"]["link_at_a_library"]))
    assert found["roots"]["outside"] == {"secret": "not for containers", "left": []}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dangling_link", "No such file or directory"),
        ("link_to_a_new_file", "No such file or directory"),
        ("looping_link", "Too many levels of symbolic links"),
        ("directory_at_a_library", "Is a directory"),
    ],
)
def test_what_is_in_the_way_is_named(found: dict[str, Any], name: str, why: str) -> None:
    """The half that was done goes with the container's mounts: the host has none of it."""
    case = found["roots"][name]
    assert_refused(case, f'mount: cannot mount "{CUDA}" on "{CUDA}" in the container: {why}')
    assert_refused(case, f'hint: take "{CUDA}" out of the image')


def test_a_volume_that_is_read_only(found: dict[str, Any], lowlevel: str) -> None:
    """With runc it is so by then. With crun it is so later, and a hook can write."""
    case = found["roots"]["read_only_libraries"]
    if lowlevel == "runc":
        assert_refused(case, "mount: cannot link", "Read-only file system", "hint: ")
    else:
        assert_served(container(case), found["host"])


def test_a_user_namespace(found: dict[str, Any], lowlevel: str) -> None:
    """By runc, the hook is started as root of the host; crun 1.8 tells it no bundle there."""
    case = found["roots"]["in_user_namespace"]
    if lowlevel == "runc":
        seen.assert_driver(container(case))
    else:
        assert_refused(case, "bundle: the state on standard input names no bundle", "hint: ")


def test_cuda_of_the_image_comes_first_where_it_is_right(found: dict[str, Any]) -> None:
    """Forward compatibility, as the incumbent's library does it by a directory of ldconfig's."""
    look = container(found["roots"]["with_cuda_of_its_own"])
    assert look.loaded["libcuda.so.1"] == "/usr/local/cuda/compat/libcuda.so.1"


@pytest.mark.parametrize(
    ("mode", "first"),
    [("mount", True), ("hook", True), ("disabled", False), ("", False), ("of old", True)],
)
def test_the_mode_of_cuda_compat(found: dict[str, Any], mode: str, first: bool) -> None:
    """Of the incumbent's modes some name another way to the same end."""
    look = container(found["compat"][mode])
    assert (look.loaded["libcuda.so.1"] == "/usr/local/cuda/compat/libcuda.so.1") is first


@pytest.mark.system("runc")
def test_a_mig_device() -> None:
    """Its nodes are granted by the runtime; the hook finds that they are, and brings the rest."""
    found = seen.play("mig", program=PROGRAM, host=["--mig", "0:2"])
    look = container(found["device"])
    seen.assert_driver(look)
    gpus = {path for path in look.nodes if path.startswith("/dev/nvidia") and path[-1].isdigit()}
    assert {path for path in gpus if "caps" not in path} == {"/dev/nvidia0"}
    assert len([path for path in gpus if "caps" in path]) == 2
    # An image may not ask for it; who asks has to be root with rights over the system.
    assert_refused(found["configures"], "hint: ")


def test_nothing_is_loaded_in_the_namespace_of_the_container(found: dict[str, Any]) -> None:
    """Its files could be there under the names of our modules."""
    container(found["audited"])
    loaded = [line.split(" ", 1) for line in found["loaded"]]
    # The control: it is on its way, and looks into the image's CUDA.
    assert loaded[0][1].endswith("/ns/mnt")
    assert ["open", "libcuda.so.575.57.08"] in loaded
    assert {event for event, _ in loaded} == {"open"}
    # The second is where our log of hooks would be.
    below = ("/proc/", "/run/gpuruntime/", "/run/gpuruntime-test/bundle-")
    names = [name for _, name in loaded]
    assert [n for n in names if n.startswith("/") and not f"{n}/".startswith(below)] == []
    assert [n for n in names if n.endswith((".py", ".pyc", ".zip"))] == []


def test_the_debug_log_has_each_step(found: dict[str, Any]) -> None:
    """`nvidia-container-cli.debug`; the file is opened before the container's mounts count."""
    container(found["audited"])
    assert found["log"]["mode"] == 0o600
    lines = found["log"]["text"].splitlines()
    pattern = r'time="[0-9TZ:-]{20}" level=debug msg="(.*)" bundle="/[a-z0-9/-]+"'
    steps = [match[1] for line in lines if (match := re.fullmatch(pattern, line))]
    assert len(steps) == len(lines)
    assert steps[0].startswith("enter the mount namespace of process ")
    assert f"mount {CUDA} on {CUDA}" in " ".join(steps).replace('\\"', "")
    assert any("ld.so.cache" in step for step in steps)
    assert steps[-1] == "done"


def test_the_debug_log_has_why_a_container_fails(found: dict[str, Any]) -> None:
    """Also what failed before the container was entered."""
    assert 'msg="failed: device: ' in found["alone"]["log"]


def test_a_debug_log_that_is_a_link_is_a_warning(found: dict[str, Any]) -> None:
    """The container starts, and nothing is written where the link leads."""
    case = found["log is a link"]
    assert_served(container(case), found["host"])
    assert found["elsewhere"] is False


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ended", ": No such process"),
        ("4194304", ": No such process"),
        ("of the host", " is in the mount namespace of this hook"),
        ("init", " is in the mount namespace of this hook"),
        ("in another namespace", " does not have its root mounted"),
        ("of another container", " has entered a root already"),
        *((pid, "has no pid: ") for pid in ("0", "-1", "1.0", '"1"', "true", "null", "[1]")),
    ],
)
def test_race_09_a_pid_that_is_not_the_container_s(
    found: dict[str, Any], name: str, why: str
) -> None:
    """Its number may be another's by now, who would get the mounts."""
    case = found["states"][name]
    assert_refused(case, "bundle: the container cannot be worked on: ", why, "\nhint: ")
    assert case["error"].count("\n") == 2
    assert case["mounts there"] == []


@pytest.mark.system("runc")
@pytest.mark.parametrize("how", ["shared", "rshared", "slave"])
def test_ns_01_no_mount_of_the_hook_reaches_the_host(how: str, shared: dict[str, Any]) -> None:
    """The container's mounts and the host's are peers, and ours would stay there."""
    assert_served(container(shared[how]), shared["host"])


@pytest.mark.system("runc")
def test_ns_01_a_link_into_a_volume_that_is_shared(shared: dict[str, Any]) -> None:
    """It is not the mount that the path is in that counts, but the one that is mounted on."""
    case = shared["volumes"]
    # Those that the test has made.
    assert len(case["mounted"]) == 2
    assert all(line.split()[1].endswith(("/volume", "/other")) for line in case["mounted"])
    look = seen.Seen.parse(case["output"])
    assert "/other/cuda" in look.mounts
    assert look.params == ["ModifyDeviceFiles: 0"]


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    """Return what containers came to whose mounts are the host's peers."""
    found = seen.play("shared", program=PROGRAM)
    return {**found["shared"], "host": found["host"]}
