# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi generate` on a simulated host: the spec, the ways to save it, the faults."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shim_host import PROGRAM, Done, Host

from cdi import document, yamlio

TREE = Path(__file__).parents[2]
WORDS = ("cdi", "generate", "--hook-path", "/usr/bin/gpu-cdi-hook")
GENERATE = f"'{PROGRAM}' {' '.join(WORDS)}"
GOLDEN = TREE / "tests" / "data" / "oci" / "generated-550.yaml"
LIBRARIES = f"/usr/lib/{platform.machine()}-linux-gnu"
REAL_ROOTS = ("535", "550")

pytestmark = pytest.mark.system


def on_host(script: str, *options: str) -> Done:
    """Run *script*, in which $GENERATE generates, on a fresh simulated host with *options*."""
    with Host(*options) as host:
        return host.run("sh", "-uc", script, GENERATE=GENERATE)


class Hosts:
    """Simulated hosts by their options, for scripts that change nothing on them."""

    def __init__(self) -> None:
        self.running: dict[tuple[str, ...], Host] = {}
        self.stack = contextlib.ExitStack()

    def of(self, *options: str) -> Host:
        """Return the host with *options*."""
        if options not in self.running:
            self.running[options] = self.stack.enter_context(Host(*options))
        return self.running[options]

    def run(self, script: str, *options: str) -> Done:
        """Run *script*, in which $GENERATE generates, on the host with *options*."""
        return self.of(*options).run("sh", "-uc", script, GENERATE=GENERATE)


HOSTS = Hosts()


@pytest.fixture(scope="module", autouse=True)
def hosts() -> Iterator[None]:
    """Have HOSTS until the last test."""
    with HOSTS.stack:
        yield
    HOSTS.running.clear()


SUMMARY = r"[0-9]+ GPUs?, [0-9]+ MIG devices?, [0-9]+ files?; required and missing: "


def ran(arguments: str, prepare: str, *options: str) -> Done:
    """Generate with *arguments*: on a host of its own if *prepare* changes it."""
    if prepare == ":" and "$" not in arguments:
        return HOSTS.of(*options).run(PROGRAM, *WORDS, *shlex.split(arguments))
    script = f'{prepare}; eval "$GENERATE {arguments}"'
    return HOSTS.run(script, *options) if prepare == ":" else on_host(script, *options)


def generated(arguments: str = "", *options: str, prepare: str = ":") -> dict[str, Any]:
    """Return the spec that *arguments* generate; stderr may only sum up."""
    done = ran(f"{arguments} --format json", prepare, *options)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(f"{SUMMARY}none\n", done.stderr), done.stderr
    spec: dict[str, Any] = json.loads(done.stdout)
    return spec


# Values that are wrong whatever the host is.
WRONG_USAGE = (
    "configuration: invalid |is not a vendor name|is not a class name|"
    "is not there yet|CDI version .* is not known"
)


def refused(arguments: str = "", *options: str, prepare: str = ":") -> str:
    """Return what is said where nothing can be generated: a line and a hint, exit 1 or 2."""
    done = ran(arguments, prepare, *options)
    assert done.returncode == (2 if re.search(WRONG_USAGE, done.stderr) else 1), done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"error: [a-z]+: [ -~]+\nhint: [ -~]+\n", done.stderr), done.stderr
    return done.stderr


def names(spec: dict[str, Any]) -> list[str]:
    """Return the device names of a spec."""
    return [device["name"] for device in spec["devices"]]


def files(spec: dict[str, Any]) -> set[str]:
    """Return the file names of a spec's mounts."""
    return {os.path.basename(m["containerPath"]) for m in spec["containerEdits"]["mounts"]}


def golden(text: str) -> str:
    """Return the golden file with the stamp of *text*, which is of this boot."""
    stamp = re.search("^# Made for driver .*\n", text, re.MULTILINE)
    assert stamp is not None
    return GOLDEN.read_text().replace("---\n", f"---\n{stamp[0]}", 1)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the golden file is of x86-64")
def test_the_golden_spec() -> None:
    """Every byte: a change of the generator shows itself in review."""
    done = HOSTS.run('eval "$GENERATE"')
    assert done.stdout == golden(done.stdout), GOLDEN


def test_both_formats_are_the_same_document() -> None:
    """Whichever format an operator chooses, the containers are the same."""
    done = HOSTS.run('eval "$GENERATE --format json"; echo ,; eval "$GENERATE --format yaml"')
    as_json, _, as_yaml = done.stdout.partition("\n,\n")
    assert document.check(json.loads(as_json)) == document.check(yamlio.decode(as_yaml))
    assert list(json.loads(as_json)) == ["cdiVersion", "kind", "devices", "containerEdits"]


def test_devices_have_names_by_index_by_uuid_and_all() -> None:
    """What a user may ask for."""
    spec = generated("", "--gpus", "2")
    assert spec["cdiVersion"] == "0.5.0"
    assert spec["kind"] == "nvidia.com/gpu"
    assert re.fullmatch(r"0 1 GPU-[0-9a-f-]{36} GPU-[0-9a-f-]{36} all", " ".join(names(spec)))
    every = spec["devices"][-1]["containerEdits"]["deviceNodes"]
    paths = [node["path"] for node in every]
    assert paths[:2] == ["/dev/nvidia0", "/dev/nvidia1"]
    assert re.fullmatch(r"(/dev/dri/card\d+ ){2}(/dev/dri/renderD\d+ ?){2}", " ".join(paths[2:]))


def test_nodes_carry_a_path_and_permissions_only() -> None:
    """Majors move between boots: a number in the spec would be another device's tomorrow."""
    spec = generated()
    nodes = list(spec["containerEdits"]["deviceNodes"])
    for device in spec["devices"]:
        nodes += device["containerEdits"]["deviceNodes"]
    # Each GPU by two names and among all of them, with two nodes of DRM.
    assert len(nodes) == 4 + 3 * (8 + 8 + 8)
    # The group of a node that not everybody may use has to be told: consumers do not ask.
    assert all(set(node) - {"gid"} == {"path", "permissions"} for node in nodes)
    assert {node["path"][:13] for node in nodes if "gid" in node} == {"/dev/dri/card"}
    assert all(node["permissions"] == "rw" for node in nodes)


def test_every_hook_has_an_environment_a_path_and_its_name() -> None:
    """ENV-09: with an empty environment, some runtimes give the hook the image's."""
    hooks = generated()["containerEdits"]["hooks"]
    assert len(hooks) == 1
    for hook in hooks:
        assert len(hook["env"]) >= 1
        assert hook["path"].startswith("/")
        assert hook["args"][0] == os.path.basename(hook["path"]) == "gpu-cdi-hook"


def test_the_files_of_all_capabilities_or_of_those_that_are_named() -> None:
    """A container gets what its capabilities ask for; a spec cannot know them."""
    version = "550.163.01"
    everything = files(generated())
    some = files(generated("--driver-capabilities compute,utility"))
    both = {f"libcuda.so.{version}", f"libnvidia-ml.so.{version}", "nvidia-smi"}
    assert both <= some < everything
    for name in ("libnvidia-encode", "libnvcuvid", "libGLX_nvidia", "libnvidia-glcore"):
        assert f"{name}.so.{version}" in everything - some


def test_an_unknown_library_of_the_driver_is_included() -> None:
    """A driver newer than our table works on its first day."""
    copy = f"cp {LIBRARIES}/libnvidia-tls.so.550.163.01 {LIBRARIES}/libnvidia-new.so.550.163.01"
    found = files(generated("--driver-capabilities utility", prepare=copy))
    assert "libnvidia-new.so.550.163.01" in found
    assert "libnvidia-tls.so.550.163.01" not in found


def test_a_library_of_another_version_is_left_out() -> None:
    """Left-overs of an upgrade do not match the kernel module."""
    copy = f"cp {LIBRARIES}/libnvidia-cfg.so.550.163.01 {LIBRARIES}/libnvidia-cfg.so.535.1"
    found = files(generated(prepare=copy))
    assert "libnvidia-cfg.so.535.1" not in found
    assert "libnvidia-cfg.so.550.163.01" in found


def test_a_separate_driver_root_is_on_the_host_side_only() -> None:
    """With a driver container the files are elsewhere on the host; in the container they are not.

    Nodes of the machine's own /dev need no host path.
    """
    spec = generated('--driver-root "$SIMHOST_ROOT" --dev-root /', "--separate-root")
    for mount in spec["containerEdits"]["mounts"]:
        inside = mount["hostPath"].removeprefix("/run/simhost/root")
        assert inside.removeprefix("/usr") == mount["containerPath"].removeprefix("/usr") or (
            "/vulkan/" in inside
        )
        assert mount["containerPath"].startswith(("/usr/", "/etc/", "/lib/firmware/"))
    assert all("hostPath" not in node for node in spec["containerEdits"]["deviceNodes"])
    together = generated()
    for edits in (spec["containerEdits"], together["containerEdits"]):
        for mount in edits["mounts"]:
            del mount["hostPath"]
    assert spec == together


def test_a_separate_dev_root_is_the_host_path_of_the_nodes() -> None:
    """The path in the container stays the one that CUDA opens."""
    prepare = "mkdir -p /run/other/dev; mount --rbind /dev /run/other/dev"
    spec = generated("--dev-root /run/other", prepare=prepare)
    node = spec["devices"][0]["containerEdits"]["deviceNodes"][0]
    assert node == {
        "path": "/dev/nvidia0",
        "hostPath": "/run/other/dev/nvidia0",
        "permissions": "rw",
    }
    for mount in spec["containerEdits"]["mounts"]:
        assert "/vulkan/" in mount["hostPath"] or not mount["hostPath"].startswith("/run/other")


def test_a_driver_root_that_is_not_there_is_named() -> None:
    """The one thing to correct."""
    assert '"/no/such/root"' in refused("--driver-root /no/such/root")
    assert '"/no/such/dev"' in refused("--dev-root /no/such/dev")


def test_saving_is_atomic_idempotent_and_for_everybody_to_read() -> None:
    """A watcher of the directory must see a whole spec or none, and not twice the same."""
    done = on_host(
        """set -e
        mkdir -m 755 /run/specs; cd /run/specs
        echo old > other; ln -s other nvidia.json
        eval "$GENERATE --output /run/specs/nvidia.json"
        test ! -L nvidia.json; test "$(cat other)" = old
        stat -c '%a %F %h' nvidia.json; stat -c '%i %Y' nvidia.json > /run/first
        eval "$GENERATE --output /run/specs/nvidia.json"
        stat -c '%i %Y' nvidia.json | cmp - /run/first
        cp nvidia.json /run/first; rm nvidia.json
        (umask 077; eval "$GENERATE --output /run/specs/nvidia.json")
        cmp nvidia.json /run/first; stat -c '%a' nvidia.json
        ln nvidia.json hard; eval "$GENERATE --output nvidia.json"
        stat -c '%h' hard; rm hard
        cd /; GPURUNTIME_CDI_SPEC_DIRS=/run/specs/made/deep
        export GPURUNTIME_CDI_SPEC_DIRS
        eval "$GENERATE --output run/specs/made/deep/nvidia"
        cd /run/specs; stat -c '%a' made; ls -A . made/deep
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "644 regular file 1",
        "644",
        "1",
        "755",
        *(".:", "made", "nvidia.json", "other", "", "made/deep:", "nvidia.yaml"),
    ]
    told = [line.split('"')[0].strip() for line in done.stderr.splitlines()]
    assert told[::2] == ["wrote", "unchanged", "wrote", "wrote", "wrote"]
    assert all(line.startswith("8 GPUs, ") for line in told[1::2])


@pytest.mark.parametrize(
    ("prepare", "output"),
    [
        ("echo > /run/file", "/run/file/nvidia.yaml"),
        ("mkdir /run/ro && mount -t tmpfs -o ro none /run/ro", "/run/ro/nvidia.yaml"),
        ("mkdir /run/open && chmod 777 /run/open", "/run/open/nvidia.yaml"),
        ("mkdir /run/typo", "/run/typo/cdi/nvidia.yaml"),
        ("mkdir -p /run/x/nvidia.yaml/y", "/run/x/nvidia.yaml"),
        ("mkdir /run/full && mount -t tmpfs -o size=4k none /run/full", "/run/full/nvidia.yaml"),
    ],
    ids=[
        "below-a-file",
        "read-only",
        "others-may-write",
        "no-directory",
        "a-directory",
        "no-space",
    ],
)
def test_an_output_that_cannot_be_written_is_named(prepare: str, output: str) -> None:
    """And nothing is left behind beside it."""
    directory = os.path.dirname(output)
    told = on_host(f'{prepare}; eval "$GENERATE --output {output}"; echo $?; ls -A {directory}')
    assert told.stdout.splitlines()[0] == "1", told.stderr
    assert not any("tmp" in line for line in told.stdout.splitlines())
    assert f'error: spec: cannot write "{output}"' in told.stderr
    assert "hint: " in told.stderr
    assert "Traceback" not in told.stderr


def test_standard_output_that_cannot_be_written_is_an_error() -> None:
    """A pipeline must not take half a spec for a whole one."""
    done = HOSTS.run('eval "$GENERATE > /dev/full"')
    assert done.returncode == 1
    assert re.fullmatch(r"error: [ -~]+\nhint: [ -~]+\n", done.stderr), done.stderr


def test_init_that_fails_is_one_line() -> None:
    """The driver's own word, and what to look at."""
    told = refused("", "--fault", "init-fails")
    assert told.startswith("error: initialization: NVML of ")
    assert "Driver Not Loaded" in told


def test_one_lost_gpu_does_not_cost_the_others() -> None:
    """Seven GPUs go on working after the eighth fell off the bus."""
    done = on_host('eval "$GENERATE --format json"', "--fault", "lost 3")
    assert done.returncode == 0, done.stderr
    left_out = r"GPU 3 is left out: [ -~]+\n"
    assert re.fullmatch(rf"warning: {left_out}{SUMMARY}{left_out}", done.stderr), done.stderr
    spec = json.loads(done.stdout)
    assert [name for name in names(spec) if name.isdigit()] == ["0", "1", "2", "4", "5", "6", "7"]
    every = spec["devices"][-1]["containerEdits"]["deviceNodes"]
    assert "/dev/nvidia3" not in [node["path"] for node in every]


def test_a_gpu_of_another_kernel_driver_is_named() -> None:
    """It is no fault: the spec has the others, and a refresh keeps nothing back because of it."""
    done = on_host('eval "$GENERATE --format json"', "--fault", "bound 7 vfio-pci")
    assert "7" not in names(json.loads(done.stdout))
    assert done.stderr.splitlines()[0] == (
        'warning: GPU 0000:cb:00.0 is left out: the kernel driver "vfio-pci" has it'
    )
    assert done.stderr.splitlines()[-1].endswith("required and missing: none")


def test_a_gpu_without_its_node_is_left_out() -> None:
    """A container could not open it."""
    done = on_host('rm /dev/nvidia2; eval "$GENERATE --format json"', "--gpus", "3")
    assert 'GPU 2 is left out: no device node "/dev/nvidia2"' in done.stderr
    assert [name for name in names(json.loads(done.stdout)) if name.isdigit()] == ["0", "1"]


def test_a_driver_that_hangs_is_given_up_in_time() -> None:
    """A driver in trouble must not hang whoever asks; what was asked is left behind."""
    script = """
import sys, time
from gpuruntime.discover.inventory import discover
from gpuruntime.errors import DriverError
start = time.monotonic()
try:
    discover("/", "/", deadline_s=1.0)
except DriverError as error:
    print(error.lines())
    print(time.monotonic() - start < 15)
"""
    done = on_host(f"'{sys.executable}' -c '{script}'", "--fault", "init-hangs")
    assert done.returncode == 0, done.stderr
    message, hint, in_time = done.stdout.splitlines()
    assert re.fullmatch(r'initialization: the driver did not answer in 1 s: "[^"]+"', message)
    assert hint.startswith("hint: ")
    assert in_time == "True"


def test_libraries_of_another_version_are_named() -> None:
    """An upgrade before the reboot: both versions are in the message."""
    prepare = f'for f in {LIBRARIES}/*.so.550.163.01; do mv "$f" "${{f%550*}}535.1"; done; '
    prepare += f"ln -sf libnvidia-ml.so.535.1 {LIBRARIES}/libnvidia-ml.so.1; ldconfig"
    told = refused(prepare=prepare)
    assert "driver 550.163.01 is loaded" in told
    assert "535.1" in told
    assert "reboot" in told


def test_no_driver_at_all_is_one_line() -> None:
    """The most common mistake of all: the driver is not installed."""
    told = refused(prepare=f"rm {LIBRARIES}/libnvidia-ml.so*")
    assert told.startswith("error: initialization: ")
    assert "libnvidia-ml.so.1" in told


@pytest.mark.parametrize("node", ["nvidiactl", "nvidia-uvm"])
def test_a_missing_control_node_is_named(node: str) -> None:
    """Without it no CUDA program finds a device, whatever else the container has."""
    told = refused(prepare=f"rm /dev/{node}")
    assert f'"/dev/{node}"' in told
    assert "create-device-nodes --all" in told


def test_a_missing_mode_setting_node_is_no_error() -> None:
    """Headless drivers do not have it."""
    spec = generated(prepare="rm /dev/nvidia-modeset")
    paths = [node["path"] for node in spec["containerEdits"]["deviceNodes"]]
    assert paths == ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"]


def test_a_library_that_others_can_change_is_refused() -> None:
    """What anybody may replace would run in every container."""
    told = refused(prepare=f"chmod 666 {LIBRARIES}/libcuda.so.550.163.01")
    assert f"{LIBRARIES}/libcuda.so.550.163.01" in told
    assert "0666" in told


def test_a_broken_library_is_named() -> None:
    """A truncated download must not become a container without CUDA."""
    file = f"{LIBRARIES}/libcuda.so.550.163.01"
    assert file in refused(prepare=f"rm {file}; echo no elf > {file}")


@pytest.mark.parametrize("branch", REAL_ROOTS)
def test_the_real_user_space(branch: str) -> None:
    """NVIDIA's own packages have a layout of their own, with chains of links."""
    root = TREE / "build" / "driver-root" / branch
    if not root.is_dir():
        pytest.skip(f'build/driver-root/{branch} is not there: run "make driver-root"')
    spec = generated("", "--driver-root", str(root))
    found = files(spec)
    version = next(n for n in found if n.startswith("libcuda.so.")).removeprefix("libcuda.so.")
    assert version.startswith(f"{branch}.")
    wanted = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")
    assert {f"{name}.so.{version}" for name in wanted} <= found
    assert "nvidia-smi" in found
    some = files(generated("--driver-capabilities compute,utility", "--driver-root", str(root)))
    assert not any("encode" in name or "GL" in name for name in some)
    args = spec["containerEdits"]["hooks"][0]["args"]
    links = [args[i + 1] for i, word in enumerate(args) if word == "--link"]
    assert any(re.fullmatch(r"libcuda\.so\.1::/\S+/libcuda\.so", link) for link in links)
    assert len(names(spec)) == 17


def test_device_ids_and_names() -> None:
    """The incumbent's options, each also from its environment variable."""
    options = ("--gpus", "3")
    assert names(generated("--device-id 1 --device-name-strategy index", *options)) == ["1", "all"]
    assert names(generated("--device 2,0 --device-name-strategy type-index --no-all-device")) == [
        *("gpu0", "gpu2"),
    ]
    spec = generated("--vendor example.com --class device", *options)
    assert spec["kind"] == "example.com/device"
    twins = "NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS=0,1 NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE=true"
    prepare = f"export {twins} NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES=index"
    assert names(generated("", *options, prepare=prepare)) == ["0", "1"]


def test_the_device_none_is_the_driver_alone() -> None:
    """For containers that only ask NVML, or that have their nodes from elsewhere."""
    done = HOSTS.run('eval "$GENERATE --device-id none --format json"')
    assert 'with the device "none" there is no device "all"' in done.stderr
    spec = json.loads(done.stdout)
    assert names(spec) == ["none"]
    assert spec["devices"][0]["containerEdits"] == {"env": ["NVCT_EMPTY_DEVICE="]}
    assert "libcuda.so.550.163.01" in files(spec)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--mode csv", "no CSV file can be used"),
        ("--mode wsl", 'no device node "/dev/dxg"'),
        ("--mode nonsense", "invalid discovery mode"),
        ("--mode gds", '"/dev/nvidia-fs*"'),
        ("--mode mofed", '"/dev/infiniband/rdma_cm" or "/dev/infiniband/uverbs*"'),
        ("--mode gdrcopy", '"/dev/gdrdrv"'),
        ("--mode nvswitch", '"/dev/nvidia-nvswitch*"'),
        ("--mode imex", '"/dev/nvidia-caps-imex-channels/channel*"'),
        ("--mode cc", '"/dev/sev-guest" or "/dev/tdx_guest"'),
        ("--device-name-strategy name", "invalid device name strategy"),
        ("--device-id 99", 'no device "99"'),
        ("--device-id GPU-nonsense", "neither an index nor a UUID"),
        ("--vendor 0", "is not a vendor name"),
        ("--class a/b", "is not a class name"),
        ("--driver-capabilities compute,everything", "invalid driver capability"),
        ("--disable-hook nonsense", "invalid hook"),
        ("--enable-hook all", "invalid hook"),
        ("--hook-path no-such-hook", "neither beside this program nor on PATH"),
        ("--max-spec-version 0.3.0", "cannot be written for version 0.3.0"),
        ("--max-spec-version 9", "is not known"),
    ],
)
def test_an_option_that_cannot_be_is_refused(arguments: str, told: str) -> None:
    """Before anything is written."""
    assert told in refused(arguments)


def test_management_mode_has_every_node_and_no_graphics() -> None:
    """For containers that look after GPUs; of another kind, so that nobody gets it unasked."""
    spec = generated("--mode management", "--gpus", "2")
    assert spec["kind"] == "management.nvidia.com/gpu"
    (device,) = spec["devices"]
    assert device["name"] == "all"
    paths = {node["path"] for node in device["containerEdits"]["deviceNodes"]}
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= paths
    assert {"/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"} <= paths
    (hook,) = spec["containerEdits"]["hooks"]
    assert "--mask-params" not in hook["args"]


@pytest.mark.parametrize(
    ("mode", "nodes"),
    [
        ("gds", [f"nvidia-fs{number}" for number in (0, 1, 2, 10)]),
        ("mofed", ["infiniband/rdma_cm", "infiniband/uverbs0"]),
        ("gdrcopy", ["gdrdrv"]),
        ("nvswitch", ["nvidia-nvswitch0", "nvidia-nvswitchctl"]),
        ("cc", ["tdx_guest"]),
    ],
)
def test_features_have_modes_of_their_own(mode: str, nodes: list[str]) -> None:
    """One device has all the nodes and nothing of the driver, for which NVML is not asked."""
    options = ("--feature", mode, "--fault", "init-hangs")
    prepare = "mkdir -p /run/udev; echo '{}' > /etc/cufile.json"
    done = on_host(f'{prepare}; eval "$GENERATE --mode {mode} --format json"', *options)
    assert done.returncode == 0, done.stderr
    count = f"{len(nodes)} device node{'' if len(nodes) == 1 else 's'}"
    assert done.stderr == f"{count}; required and missing: none\n"
    spec = json.loads(done.stdout)
    assert spec["kind"] == f"nvidia.com/{mode}"
    assert spec["containerEdits"] == {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
    (device,) = spec["devices"]
    assert device["name"] == "all"
    edits = device["containerEdits"]
    assert [node["path"] for node in edits["deviceNodes"]] == [f"/dev/{name}" for name in nodes]
    mounts = [mount["containerPath"] for mount in edits.get("mounts", [])]
    assert mounts == (["/run/udev", "/etc/cufile.json"] if mode == "gds" else [])


@pytest.mark.parametrize(
    ("mode", "lack", "told"),
    [
        ("mofed", "infiniband/rdma_cm", 'no device node "/dev/infiniband/rdma_cm"'),
        ("mofed", "infiniband/uverbs*", 'no device node "/dev/infiniband/uverbs"'),
        ("nvswitch", "nvidia-nvswitchctl", 'no device node "/dev/nvidia-nvswitchctl"'),
        ("gds", "", 'no "/etc/cufile.json"'),
    ],
)
def test_an_optional_part_of_a_feature_that_is_missing_is_reported(
    mode: str, lack: str, told: str
) -> None:
    """B051: the device has what exists."""
    done = on_host(
        f'rm -f /etc/cufile.json; cd /dev; rm -f {lack or "none"}; eval "$GENERATE --mode {mode}"',
        *("--feature", mode),
    )
    assert done.returncode == 0, done.stderr
    assert told in done.stderr.splitlines()[-1]


def test_channels_of_imex_are_devices_by_number() -> None:
    """Each by itself, because each belongs to another domain, and all of them."""
    options = ("--feature", "imex")
    every = HOSTS.run('eval "$GENERATE --mode imex --format json"', *options)
    spec = json.loads(every.stdout)
    assert spec["kind"] == "nvidia.com/imex-channel"
    assert names(spec) == ["0", "10", "2", "all"]
    assert len(spec["devices"][3]["containerEdits"]["deviceNodes"]) == 3
    alone = HOSTS.run('eval "$GENERATE --mode imex --no-all-device --format json"', *options)
    assert names(json.loads(alone.stdout)) == ["0", "10", "2"]
    path = "/dev/nvidia-caps-imex-channels/channel10"
    assert spec["devices"][1]["containerEdits"] == {
        "deviceNodes": [{"path": path, "permissions": "rw"}]
    }
    some = HOSTS.run('eval "$GENERATE --mode imex --device-id channel2,2 --format json"', *options)
    assert names(json.loads(some.stdout)) == ["2", "all"]
    for name, told in (
        ("1", f'IMEX channel 1 not found at "{path[:-2]}1"'),
        ("1048576", "invalid channel ID 1048576: must be in the range [0, 1048575]"),
        ("9" * 5000, 'invalid channel ID "999'),
        ("GPU-0", 'invalid channel ID "GPU-0"'),
    ):
        assert told in refused(f"--mode imex --device-id {name}", *options)


def test_a_feature_is_refreshed_as_well() -> None:
    """A channel that was made later is a device after the next run."""
    refresh = GENERATE.replace("cdi generate", "cdi refresh") + " --mode imex"
    done = on_host(
        f"""REFRESH="{refresh} --output /run/cdi/imex.yaml"
        eval "$REFRESH" 2>&1; eval "$REFRESH" 2>&1
        mknod -m 666 /dev/nvidia-caps-imex-channels/channel7 c 235 7; eval "$REFRESH" 2>&1
        """,
        *("--feature", "imex"),
    )
    lines = done.stdout.splitlines()
    assert lines[2] == 'unchanged "/run/cdi/imex.yaml": the host is as it was'
    assert lines[3] == "changed since: device nodes"
    assert lines[-1] == "4 device nodes; required and missing: none"


def test_separate_hooks_for_the_incumbent_s_program() -> None:
    """It does not know ours; its own it has one a step, and one of them is off by default."""
    arguments = "--nvidia-cdi-hook-path /usr/bin/nvidia-cdi-hook --ldconfig-path /sbin/ldconfig"
    hooks = generated(arguments)["containerEdits"]["hooks"]
    assert [hook["args"][:2] for hook in hooks] == [
        ["nvidia-cdi-hook", name]
        for name in (
            *("create-symlinks", "enable-cuda-compat", "update-ldcache"),
            *("disable-device-node-modification", "update-application-profile"),
        )
    ]
    assert hooks[2]["args"][2:4] == ["--ldconfig-path", "/sbin/ldconfig"]
    assert generated(f"{arguments} --disable-hook all")["containerEdits"].get("hooks") is None
    one = generated(f"{arguments} --disable-hook all --enable-hook enable-cuda-compat")
    assert [h["args"][1] for h in one["containerEdits"]["hooks"]] == ["enable-cuda-compat"]


def test_what_newer_consumers_understand_is_opted_in() -> None:
    """Either member makes older engines refuse the whole spec."""
    spec = generated("--annotations --additional-gids")
    assert spec["cdiVersion"] == "0.7.0"
    assert spec["annotations"] == {"gpuruntime/driver-version": "550.163.01"}
    groups = spec["devices"][0]["containerEdits"]["additionalGids"]
    assert all(group > 0 for group in groups)
    done = on_host(
        'eval "$GENERATE --annotations --additional-gids --max-spec-version 0.5.0 --format json"'
    )
    assert json.loads(done.stdout) == generated()
    assert 'left out of the spec: annotation "gpuruntime/driver-version"' in done.stderr


def test_a_missing_nvidia_smi_is_in_the_last_line() -> None:
    """Nothing that was searched for and not found is silent; a program can be elsewhere."""
    done = on_host('rm /usr/bin/nvidia-smi; eval "$GENERATE"')
    assert (done.returncode, 'no "nvidia-smi" on PATH' in done.stderr.splitlines()[-1]) == (
        0,
        True,
    )
    for option in ("", "--program-search-path /srv/tools"):
        done = on_host(
            "mkdir -p /srv/tools; mv /usr/bin/nvidia-smi /srv/tools; "
            f'PATH=$PATH:/srv/tools eval "$GENERATE {option} --format json"'
        )
        assert done.stderr.splitlines()[-1].endswith("required and missing: none")
        mounts = json.loads(done.stdout)["containerEdits"]["mounts"]
        by_path = {mount["containerPath"]: mount["hostPath"] for mount in mounts}
        assert by_path["/usr/bin/nvidia-smi"] == "/srv/tools/nvidia-smi"


def test_coherent_memory_is_an_annotation_of_each_full_gpu() -> None:
    """The incumbent's, by each name of the GPU; and the NUMA node of its memory."""
    spec = generated(
        "--annotations",
        *("--gpus", "3", "--nvml", "addressing 0 2 4", "--mig", "2:1g.10gb"),
    )
    by_name = {device["name"]: device.get("annotations") for device in spec["devices"]}
    coherent = {"gpu.nvidia.com/coherent": "true", "gpuruntime/memory-numa-node": "4"}
    assert by_name["0"] == coherent
    assert [by_name[name] for name in by_name if name.startswith("GPU-")].count(coherent) == 1
    assert by_name["1"] == {"gpu.nvidia.com/coherent": "false"}
    assert (by_name["2:0"], by_name["all"]) == (None, None)


def test_refresh_writes_only_what_changed() -> None:
    """Run at every boot, by a timer, after each package: mostly there is nothing to do."""
    refresh = GENERATE.replace("cdi generate", "cdi refresh") + " --output /run/cdi/nvidia.yaml"
    done = on_host(
        f"""REFRESH="{refresh}"
        eval "$REFRESH" 2>&1 | grep -v "files;"; stat -c %i /run/cdi/nvidia.yaml > /run/first
        eval "$REFRESH" 2>&1; stat -c %i /run/cdi/nvidia.yaml | cmp - /run/first
        eval "$REFRESH --check" 2>&1; echo $?
        cp {LIBRARIES}/libnvidia-tls.so.550.163.01 {LIBRARIES}/libnvidia-new.so.550.163.01
        eval "$REFRESH --check" 2>&1; echo $?; stat -c %i /run/cdi/nvidia.yaml | cmp - /run/first
        eval "$REFRESH" 2>&1 | grep -v "files;"
        echo broken > /run/cdi/nvidia.yaml; eval "$REFRESH" 2>&1 | grep -v "files;"
        grep -c libnvidia-new /run/cdi/nvidia.yaml
        """
    )
    lines = done.stdout.splitlines()
    assert lines[0] == 'wrote "/run/cdi/nvidia.yaml"', done.stdout + done.stderr
    assert lines[1] == 'unchanged "/run/cdi/nvidia.yaml": the host is as it was'
    assert lines[2:6] == [lines[1], "0", "changed since: library directories", "1"]
    assert lines[6] == lines[4]
    added = [line for line in lines[7:-2] if line.startswith("+ common edits: mount ")]
    assert len(added) == 1
    assert "libnvidia-new.so.550.163.01" in added[0]
    assert lines[-2] == 'wrote "/run/cdi/nvidia.yaml"'
    assert int(lines[-1]) >= 1


def test_refresh_keeps_what_a_broken_driver_lacks() -> None:
    """A file that is truncated or gone is a driver half removed, not another driver."""
    refresh = GENERATE.replace("cdi generate", "cdi refresh") + " --output /run/cdi/nvidia.yaml"
    jit = f"{LIBRARIES}/libnvidia-ptxjitcompiler.so.550.163.01"
    done = on_host(
        f"""REFRESH="{refresh}"
        eval "$REFRESH" 2>/dev/null; cp /run/cdi/nvidia.yaml /run/good
        : > {jit}; eval "$REFRESH"; echo $?; rm {jit}; eval "$REFRESH"; echo $?
        cmp /run/cdi/nvidia.yaml /run/good; echo $?
        chown 7 /run/cdi/nvidia.yaml; touch {jit}; cp -p /run/good /run/x; rm {jit}
        eval "$GENERATE --output /run/cdi/nvidia.yaml" 2>&1 | tail -1
        stat -c %u /run/cdi/nvidia.yaml
        rm /run/cdi/nvidia.yaml; mkfifo /run/cdi/nvidia.yaml
        timeout 20 sh -c "eval '$REFRESH'" 2>/dev/null; echo $?; stat -c %F /run/cdi/nvidia.yaml
        """
    )
    *statuses, summary, owner, fifo, kind = done.stdout.splitlines()
    assert statuses == ["1", "1", "0"], done.stderr
    assert "stays as it is" in done.stderr
    assert "libnvidia-ptxjitcompiler.so.1" in summary
    assert (owner, fifo, kind) == ("0", "0", "regular file")


def test_two_documented_commands_leave_the_devices_there() -> None:
    """The second writer names the file of the first, writes nothing, and the names resolve."""
    refresh = GENERATE.replace("cdi generate", "cdi refresh")
    cli = f"'{TREE}/.venv/bin/gpuruntime'"
    done = on_host(
        f"""REFRESH="{refresh}"
        eval "$REFRESH --output /etc/cdi/nvidia.json" 2>/dev/null
        eval "$GENERATE --output /etc/cdi/nvidia.yaml"; echo $?
        {cli} cdi list 2>/dev/null | head -1; ls /etc/cdi
        # A program that looks at nothing, as the incumbent's.
        cp /etc/cdi/nvidia.json /etc/cdi/other.json
        eval "$REFRESH --check --output /etc/cdi/nvidia.json" 2>/dev/null; echo $?
        eval "$REFRESH --output /etc/cdi/nvidia.json"; echo $?
        eval "$REFRESH --force --output /etc/cdi/nvidia.json" 2>/dev/null; echo $?
        {cli} cdi list 2>/dev/null; {cli} doctor --check specs
        """
    )
    lines = done.stdout.splitlines()
    *others, specs = lines[:7]
    assert others == ["1", "nvidia.com/gpu=0", "nvidia.json", "1", "1", "0"], done.stderr
    assert specs.startswith('fail  specs           "/etc/cdi/'), lines
    assert specs.endswith('; remove "/etc/cdi/nvidia.json"'), lines
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    why = (
        'defines "nvidia.com/gpu=0" and 16 more too, and engines resolve no device that two files '
        "of one directory define"
    )
    assert errors == [
        f'error: spec: cannot write "/etc/cdi/nvidia.yaml": "/etc/cdi/nvidia.json" {why}',
        f'error: spec: cannot write "/etc/cdi/nvidia.json": "/etc/cdi/other.json" {why}',
    ]


def test_refresh_keeps_a_good_spec() -> None:
    """A GPU that fell off the bus, or a driver that is half gone, is no reason to write less."""
    refresh = GENERATE.replace("cdi generate", "cdi refresh") + " --output /run/cdi/nvidia.json"
    done = on_host(
        f"""REFRESH="{refresh}"
        eval "$REFRESH" 2>/dev/null; cp /run/cdi/nvidia.json /run/good
        rm /dev/nvidia2; eval "$REFRESH"; echo $?; cmp /run/cdi/nvidia.json /run/good
        rm {LIBRARIES}/libcuda.so.550.163.01; eval "$REFRESH"; echo $?
        cmp /run/cdi/nvidia.json /run/good; echo $?; ls /run/cdi
        """,
        "--gpus",
        "3",
    )
    assert done.stdout.splitlines() == ["1", "1", "0", "nvidia.json"], done.stderr
    assert 'error: spec: "/run/cdi/nvidia.json" stays as it is' in done.stderr
    assert "would lack 2, GPU-" in done.stderr
