# SPDX-License-Identifier: Apache-2.0
"""An inventory becomes edits: what each container gets, and what each device adds."""

from __future__ import annotations

from typing import Any

import pytest

from cdi import advice, generate
from cdi.errors import CdiError
from gpuruntime.errors import RequestError, UnresolvedDeviceError
from gpuruntime.model import Driver, File, Gpu, GpuNodes, Library, MigDevice, Node
from gpuruntime.plan import devices, gpu_edits
from gpuruntime.system.compat import CudaCompat
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.ops import ApplicationProfile
from hooks import update_container

DIRECTORY = "/usr/lib64"
STYLE = gpu_edits.Style("/bin/gpu-cdi-hook")
SEPARATE = gpu_edits.Style("/bin/nvidia-ctk", enabled=(gpu_edits.CHMOD,))
UUID = "GPU-01234567-89ab-cdef-0123-456789abcde{}"
MIG_UUID = "MIG-01234567-89ab-cdef-0123-456789abc{}{}f"
BOTH = (devices.INDEX, devices.UUID)


def library(name: str, soname: str, **members: Any) -> Library:
    """Return a library below a driver root of its own."""
    path = f"{DIRECTORY}/{name}"
    return Library(
        host_path=f"/driver{path}", container_path=path, soname=soname, abi="x86-64", **members
    )


def file(kind: str, path: str, **members: Any) -> File:
    """Return another file of the driver."""
    return File(kind=kind, host_path=f"/driver{path}", container_path=path, **members)


DRIVER = Driver(
    version="1.2",
    libraries=(
        library("libcuda.so.1.2", "libcuda.so.1", dev_link="libcuda.so"),
        library("libplain.so.1.2", "libplain.so.1.2"),
        library("libGLX_nvidia.so.1.2", "libGLX_nvidia.so.0", links=("a::/usr/lib64/b",)),
    ),
    files=(
        file("binary", "/usr/bin/nvidia-smi"),
        file("ipc", "/run/nvidia-persistenced/socket"),
        file("xorg", "/usr/lib/xorg/x.so.1.2", links=("x.so.1.2::/usr/lib/xorg/x.so",)),
    ),
)
CONTROL = (Node(host_path="/host/dev/nvidiactl", container_path="/dev/nvidiactl"),)


def node(path: str, group: int = 0) -> Node:
    """Return a node that has the same path on the host."""
    return Node(host_path=path, container_path=path, group=group)


def gpu(index: int, minor: int, instances: int | None = None) -> GpuNodes:
    """Return a GPU with its DRM node and, in MIG mode, that many instances."""
    migs = [
        (
            MigDevice(
                index=i,
                uuid=MIG_UUID.format(index, i),
                gpu_instance=i + 7,
                compute_instance=0,
            ),
            node(f"/dev/nvidia-caps/nvidia-cap{10 * i + 3}"),
            node(f"/dev/nvidia-caps/nvidia-cap{10 * i + 4}"),
        )
        for i in range(instances or 0)
    ]
    return GpuNodes(
        gpu=Gpu(
            index=index,
            uuid=UUID.format(index),
            minor=minor,
            name="x",
            bus_id=f"0000:0{index}:00.0",
            mig_enabled=instances is not None,
            mig_devices=tuple(mig[0] for mig in migs),
        ),
        node=node(f"/dev/nvidia{minor}"),
        drm=(node(f"/dev/dri/card{index}", 44),),
        links=(f"../card{index}::/dev/dri/by-path/pci-0000:0{index}:00.0-card",),
        mig=tuple(migs),
    )


def paths(edits: Any) -> list[str]:
    """Return the paths of the device nodes of *edits*."""
    return [item["path"] for item in edits["deviceNodes"]]


def named(*gpus: GpuNodes, ids: tuple[str, ...] = ("all",), **options: Any) -> dict[str, Any]:
    """Return name → edits."""
    found = devices.devices(ids, gpus)
    strategies = options.pop("strategies", BOTH)
    return dict(gpu_edits.named_devices(found, strategies, STYLE, **options))


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [
        ((("libcuda.so.1.2", "x86-64"),), ["/usr/lib64"]),
        ((("libcuda.so.1.2", "x86-64"), ("nvidia/libx.so.1.2", "x86-64")),
         ["/usr/lib64:/usr/lib64/nvidia"]),
        # Neither plug-ins, nor libraries of 32 bits or of a version of their own.
        ((("libcuda.so.1.2", "x86-64"), ("vdpau/libvdpau_nvidia.so.1.2", "x86-64"),
          ("i386/libcuda.so.1.2", "i386"), ("egl/libnvidia-egl-gbm.so.1.1", "x86-64")),
         ["/usr/lib64"]),
        ((), []),
    ],
)  # fmt: skip
def test_a_container_is_told_where_the_driver_s_libraries_are(
    libraries: tuple[tuple[str, str], ...], expected: list[str]
) -> None:
    """By the incumbent's variable, which programs of images read."""
    found = tuple(
        Library(host_path=f"/driver/{name}", container_path=f"{DIRECTORY}/{name}", soname=name,
                abi=abi)
        for name, abi in libraries
    )  # fmt: skip
    driver = Driver(version="1.2", libraries=found, files=())
    assert gpu_edits.common_edits(driver, (), (), STYLE)["env"] == [
        *(f"NVIDIA_CTK_LIBCUDA_DIR={directories}" for directories in expected),
        "NVIDIA_VISIBLE_DEVICES=void",
    ]


def test_names_follow_the_index_and_nodes_the_minor() -> None:
    """The two differ on real machines: index 0 may be /dev/nvidia3."""
    found = named(gpu(0, 3), gpu(1, 0))
    assert list(found) == ["0", UUID.format(0), "1", UUID.format(1), "all"]
    assert paths(found["0"]) == paths(found[UUID.format(0)]) == ["/dev/nvidia3", "/dev/dri/card0"]
    assert paths(found["all"]) == [
        *("/dev/nvidia0", "/dev/nvidia3", "/dev/dri/card0", "/dev/dri/card1")
    ]


def test_mig_devices_take_the_place_of_their_gpu() -> None:
    """A GPU in MIG mode computes through its instances only; both nodes grant one."""
    found = named(gpu(0, 0), gpu(1, 1, instances=2), strategies=devices.STRATEGIES)
    assert list(found) == [
        *("0", UUID.format(0), "gpu0", "1:0", MIG_UUID.format(1, 0), "mig1:0"),
        *("1:1", MIG_UUID.format(1, 1), "mig1:1", "all"),
    ]
    assert paths(found["1:1"]) == [
        *("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap13", "/dev/nvidia-caps/nvidia-cap14")
    ]
    assert "/dev/nvidia-caps/nvidia-cap3" in paths(found["all"])


def test_mig_mode_without_instances_is_no_device() -> None:
    """There is nothing to compute on; the full GPU can be asked for all the same."""
    assert named(gpu(0, 0, instances=0)) == {}
    assert list(named(gpu(0, 0, instances=0), ids=("0",), with_all=False)) == ["0", UUID.format(0)]


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (("1",), ["1"]),
        (("01", "1"), ["1"]),
        (("0", "2:1"), ["0", "2:1"]),
        ((UUID.format(1).upper().replace("GPU", "gpu"),), ["1"]),
        ((MIG_UUID.format(2, 0),), ["2:0"]),
        ((f"MIG-{UUID.format(2)}/8/0",), ["2:1"]),
        (("1", "all"), ["0", "1", "2:0", "2:1"]),
        (("none", "all"), []),
        # As schedulers and people write them.
        (("2/1",), ["2:1"]),
        ((MIG_UUID.format(2, 1)[:-1],), ["2:1"]),
        (("0000:01:00.0",), ["1"]),
        (("00000000:02:00.0",), ["2"]),
        (("01:00.0",), ["1"]),
        (("all", "none"), ["0", "1", "2:0", "2:1"]),
    ],
)
def test_device_ids(ids: tuple[str, ...], names: list[str]) -> None:
    """Each form that an id can have; the first special one decides alone."""
    machine = (gpu(0, 0), gpu(1, 1), gpu(2, 2, instances=2))
    found = devices.devices(ids, machine)
    assert [device.name(devices.INDEX) for device in found] == names


def test_the_start_of_several_uuids_means_none() -> None:
    """A guess would give a container somebody else's GPU."""
    machine = (gpu(0, 0), gpu(1, 1))
    with pytest.raises(RequestError, match="prefix of several UUIDs"):
        devices.devices([UUID.format(1)[:-1]], machine)


@pytest.mark.parametrize(
    "name", ["x", "", "0:1:2", "GPU-", "-1", "0x1", "MIG-x", "٣", "0:1/2", "../0"]
)
def test_what_is_no_device_id(name: str) -> None:
    """An error, before anything is written."""
    with pytest.raises(RequestError):
        devices.devices((name,), [gpu(0, 0)])


@pytest.mark.parametrize("name", ["9", "0:0", UUID.format(7), f"MIG-{UUID.format(0)}/1/0"])
def test_a_device_that_is_not_there(name: str) -> None:
    """The error says which there are."""
    with pytest.raises(UnresolvedDeviceError, match="available devices: 0, 1, 1:0"):
        devices.devices((name,), [gpu(0, 0), gpu(1, 1, instances=1)])


def test_a_display_only_gpu_is_not_among_all() -> None:
    """It drives the monitors of a workstation."""
    shown = gpu(0, 0)
    shown.gpu.name = "NVIDIA DGX Display"
    assert [d.name(devices.INDEX) for d in devices.devices(("all",), [shown, gpu(1, 1)])] == ["1"]


def test_no_gpu_is_no_device() -> None:
    """An `all` of nothing would start containers without a GPU."""
    assert named() == {}
    with pytest.raises(CdiError) as error:
        generate.spec("a.b/cc", [], {})
    assert error.value.category == "no-devices"


def test_host_paths_are_there_where_they_differ() -> None:
    """Mounts always need a source; nodes only one that is elsewhere."""
    edits = gpu_edits.common_edits(DRIVER, CONTROL, (), STYLE)
    assert edits["deviceNodes"] == [
        {"path": "/dev/nvidiactl", "hostPath": "/host/dev/nvidiactl", "permissions": "rw"}
    ]
    assert [(m["hostPath"], m["containerPath"]) for m in edits["mounts"]][:2] == [
        ("/driver/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket"),
        ("/driver/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"),
    ]
    for mount in edits["mounts"]:
        is_socket = mount["containerPath"].endswith("socket")
        assert ("ro" in mount["options"]) is not is_socket
        assert ("noexec" in mount["options"]) is is_socket
        assert {"nosuid", "nodev", "rbind", "rprivate"} <= set(mount["options"])


def test_the_hook_understands_what_the_plan_writes() -> None:
    """Producer and consumer of the hook's arguments are two modules."""
    links = gpu(0, 0).links
    (hook,) = gpu_edits.common_edits(DRIVER, CONTROL, links, STYLE)["hooks"]
    assert hook["args"][:2] == ["gpu-cdi-hook", update_container.NAME]
    operations = update_container.plan(update_container.read(hook["args"][2:]))
    lines = [operation.describe() for operation in operations]
    assert lines == [
        "link /usr/lib64/libcuda.so.1 -> libcuda.so.1.2",
        "link /usr/lib64/libcuda.so -> libcuda.so.1",
        "link /usr/lib64/libGLX_nvidia.so.0 -> libGLX_nvidia.so.1.2",
        "link /usr/lib64/b -> a",
        "link /usr/lib/xorg/x.so -> x.so.1.2",
        "link /dev/dri/by-path/pci-0000:00:00.0-card -> ../card0",
        f"add 4 libraries to /etc/ld.so.cache; first, {CudaCompat('1.2').describe()}",
        "mount over /proc/driver/nvidia/params with ModifyDeviceFiles: 0",
        ApplicationProfile().describe(),
    ]


def test_every_step_can_be_asked_for_and_left_out() -> None:
    """In the order in which they run."""
    style = gpu_edits.Style("/h", enabled=(gpu_edits.CHMOD,), ldconfig="/l", ldconfig_mode="host")
    (hook,) = gpu_edits.common_edits(DRIVER, CONTROL, (), style)["hooks"]
    options = [word for word in hook["args"] if word.startswith("--")]
    assert list(dict.fromkeys(options)) == [
        *("--link", "--cuda-compat", "--library", "--ldconfig-mode", "--ldconfig-path"),
        *("--mask-params", "--application-profile", "--chmod"),
    ]
    assert hook["args"][-4:] == ["--chmod", "755::/dev/dri", "--chmod", "755::/dev/nvidia-caps"]
    operations = update_container.plan(update_container.read(hook["args"][2:]))
    assert [op.ldconfig for op in operations if isinstance(op, LoaderCache)] == ["/l"]
    for name, option in (
        (gpu_edits.COMPAT, "--cuda-compat"),
        (gpu_edits.LDCACHE, "--ldconfig-mode"),
        (gpu_edits.PROFILE, "--application-profile"),
    ):
        style = gpu_edits.Style("/h", disabled=(name,), ldconfig_mode="host")
        (hook,) = gpu_edits.common_edits(DRIVER, CONTROL, (), style)["hooks"]
        assert option not in hook["args"]


def test_separate_hooks_are_the_incumbent_s() -> None:
    """For tools that look for them in a spec, and for its own hook."""
    hooks = gpu_edits.common_edits(DRIVER, CONTROL, (), SEPARATE)["hooks"]
    assert [hook["args"][:3] for hook in hooks] == [
        ["nvidia-ctk", "hook", name]
        for name in (
            gpu_edits.LINKS,
            gpu_edits.COMPAT,
            gpu_edits.LDCACHE,
            gpu_edits.PARAMS,
            gpu_edits.PROFILE,
        )
    ]
    assert hooks[1]["args"][3:] == ["--host-driver-version=1.2"]
    assert hooks[2]["args"][3:] == ["--folder", "/usr/lib64"]
    edits = gpu_edits.device_edits(devices.GpuDevice(gpu(0, 0)), SEPARATE)
    assert [hook["args"][2:] for hook in edits["hooks"]] == [
        [gpu_edits.LINKS, "--link", "../card0::/dev/dri/by-path/pci-0000:00:00.0-card"],
        [gpu_edits.CHMOD, "--mode", "755", "--path", "/dev/dri"],
    ]


@pytest.mark.parametrize("separate", [False, True])
def test_every_hook_has_an_environment_and_a_deadline(separate: bool) -> None:
    """Without env, some runtimes give it the variables of the image."""
    style = gpu_edits.Style("/bin/gpu-cdi-hook", separate=separate)
    hooks = gpu_edits.common_edits(DRIVER, CONTROL, (), style)["hooks"]
    assert (len(hooks) > 1) is separate
    for hook in hooks:
        assert hook["env"]
        assert hook["timeout"] > 0


def test_hooks_can_be_disabled() -> None:
    """One by one, or all: then there is none."""
    words = gpu_edits.common_edits(
        DRIVER,
        (),
        (),
        gpu_edits.Style("/bin/gpu-cdi-hook", disabled=(gpu_edits.LINKS, gpu_edits.PARAMS)),
    )["hooks"][0]["args"]
    assert "--library" in words
    assert not {"--link", "--mask-params"} & set(words)
    none = gpu_edits.common_edits(DRIVER, (), (), gpu_edits.Style("/h", disabled=gpu_edits.HOOKS))
    assert none["hooks"] == []


def test_groups_of_nodes_only_when_asked_for() -> None:
    """Docker loses them, and older consumers refuse the whole spec."""
    device = devices.GpuDevice(gpu(0, 0))
    assert "additionalGids" not in gpu_edits.device_edits(device, STYLE)
    edits = gpu_edits.device_edits(device, gpu_edits.Style("/h", groups=True))
    assert edits["additionalGids"] == [44]


def test_the_spec_is_in_canonical_order_and_of_the_lowest_version() -> None:
    """Same machine, same bytes, and nothing that the strict check warns of."""
    common = gpu_edits.common_edits(DRIVER, CONTROL, (), STYLE)
    one = generate.spec("a.b/cc", list(named(gpu(0, 0), gpu(1, 1)).items()), common)
    other = generate.spec("a.b/cc", list(named(gpu(1, 1), gpu(0, 0)).items()), common)
    assert generate.encode(one, "json") == generate.encode(other, "json")
    assert one["cdiVersion"] == "0.5.0"
    assert [d["name"] for d in one["devices"]] == ["0", "1", UUID.format(0), UUID.format(1), "all"]
    warnings = [problem.category for problem in advice.check(one)]
    assert set(warnings) <= {"mount-writable"}
    plain = generate.spec("a.b/cc", [("x", {"env": ["A=b"]})], {})
    assert (plain["cdiVersion"], "containerEdits" in plain) == ("0.3.0", False)
