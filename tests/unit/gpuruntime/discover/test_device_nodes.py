# SPDX-License-Identifier: Apache-2.0
"""Which device nodes are found below a dev root, and what is said of those that are missing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import descriptors
import pytest

from gpuruntime.discover import device_nodes
from gpuruntime.discover.device_nodes import DevRoot
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import Gpu, GpuNodes, MigDevice, Node

BUS_ID = "0000:1a:00.0"
MIG = MigDevice(index=3, uuid="MIG-x", gpu_instance=7, compute_instance=1)
# B114's own numbers, which are those of the driver for GPU 0, GPU instance 7.
MINORS = (
    "config 1\nmonitor 2\ngpu0/gi7/access 66\ngpu0/gi7/ci0/access 67\ngpu0/gi7/ci1/access 68\n"
)


def gpu(index: int = 0, minor: int | None = None, *migs: MigDevice, bus_id: str = BUS_ID) -> Gpu:
    """Return a GPU, in MIG mode where it has MIG devices."""
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        minor=index if minor is None else minor,
        name="NVIDIA H100",
        bus_id=bus_id,
        mig_enabled=bool(migs),
        mig_devices=migs,
    )


class Machine:
    """A dev root, a /proc and a /sys in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.proc = directory / "proc"
        self.sys = directory / "sys"
        self.opened: list[DevRoot] = []
        (directory / "root" / "dev").mkdir(parents=True)
        self.root = str((directory / "root").resolve())

    def make(self, *names: str, mode: int = 0o666, group: int = 0) -> None:
        """Make nodes; none has a driver behind it."""
        for name in names:
            path = Path(self.root) / "dev" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mknod(path, stat.S_IFCHR, os.makedev(195, 99))
            os.chown(path, 0, group)
            path.chmod(mode)

    def link(self, name: str, target: str) -> None:
        """Make a link in /dev."""
        path = Path(self.root) / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def drm(self, *names: str, bus_id: str = BUS_ID) -> None:
        """Make what sysfs says about the DRM nodes of a GPU."""
        for name in names:
            (self.sys / "bus/pci/devices" / bus_id / "drm" / name).mkdir(parents=True)

    def write(self, name: str, text: str) -> None:
        """Write a file of the driver in /proc."""
        path = self.proc / "driver" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def node(self, name: str, group: int = 0) -> Node:
        """Return the node of that name, as it is to be found."""
        return Node(
            host_path=f"{self.root}/dev/{name}", container_path=f"/dev/{name}", group=group
        )

    def dev(self) -> DevRoot:
        """Open the dev root, to be closed after the test."""
        self.opened.append(DevRoot(self.root))
        return self.opened[-1]

    def gpu_nodes(self, *gpus: Gpu) -> tuple[tuple[GpuNodes, ...], tuple[str, ...]]:
        """Find the nodes of GPUs."""
        found, left_out = device_nodes.gpu_nodes(
            gpus, self.dev(), proc=str(self.proc), sys=str(self.sys)
        )
        return found, tuple(map(str, left_out))

    def one(self, wanted: Gpu) -> GpuNodes:
        """Find the nodes of a GPU about which there is nothing to say."""
        (found,), problems = self.gpu_nodes(wanted)
        assert problems == ()
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Give a machine without nodes; where none can be made, the test is skipped."""
    try:
        os.mknod(tmp_path / "try", stat.S_IFCHR | 0o600, os.makedev(195, 99))
    except PermissionError:
        pytest.skip("device nodes cannot be made here: needs root with CAP_MKNOD")
    before = descriptors.opened()
    made = Machine(tmp_path)
    yield made
    for dev in made.opened:
        dev.close()
    assert descriptors.opened() == before


def test_control_nodes_are_those_that_exist(machine: Machine) -> None:
    """Without the module nvidia-modeset a container has all that it needs."""
    machine.make("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia-nvswitchctl")
    names = ("nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
    assert device_nodes.control_nodes(machine.dev()) == tuple(machine.node(name) for name in names)


@pytest.mark.parametrize("missing", ["nvidia-uvm", "nvidiactl"])
def test_a_missing_control_node_is_an_error(machine: Machine, missing: str) -> None:
    """B046: CUDA would fail in the container, and nothing would say why."""
    machine.make(*{"nvidia-uvm", "nvidiactl"} - {missing})
    with pytest.raises(DiscoveryError) as caught:
        device_nodes.control_nodes(machine.dev())
    assert f'no device node "/dev/{missing}" below the dev root "{machine.root}"' in str(
        caught.value
    )
    assert "create-device-nodes --all" in str(caught.value.hint)
    assert f"--driver-root {machine.root}" in str(caught.value.hint)


def test_an_empty_dev_root_is_an_error(machine: Machine) -> None:
    """B046, second input: an empty directory where the nodes should be."""
    for find in (device_nodes.control_nodes, device_nodes.management_nodes):
        with pytest.raises(DiscoveryError):
            find(machine.dev())
    found, problems = machine.gpu_nodes(gpu())
    assert found == ()
    assert problems == (
        f'GPU 0 is left out: no device node "/dev/nvidia0" below the dev root "{machine.root}"',
    )


@pytest.mark.parametrize("path", ["nowhere", "root/dev/file"])
def test_a_dev_root_that_is_none_is_an_error(machine: Machine, path: str) -> None:
    """A wrong option is told as such."""
    (Path(machine.root) / "dev" / "file").touch()
    with pytest.raises(DiscoveryError, match="cannot open the dev root") as caught:
        DevRoot(str(machine.directory / path))
    assert "--dev-root" in str(caught.value.hint)


def test_only_character_devices_count(machine: Machine) -> None:
    """Neither a file, a directory, a FIFO nor a link to a device grants access to a GPU."""
    machine.make("nvidia0", "other/nvidia1")
    machine.link("nvidia1", "other/nvidia1")
    (Path(machine.root) / "dev/nvidia2").touch()
    (Path(machine.root) / "dev/nvidia3").mkdir()
    os.mkfifo(Path(machine.root) / "dev/nvidia4")
    found, problems = machine.gpu_nodes(*(gpu(index) for index in range(5)))
    assert [one.gpu.index for one in found] == [0]
    assert len(problems) == 4


def test_nodes_are_named_after_the_minor(machine: Machine) -> None:
    """Which is not the index where the bus order differs from the probe order."""
    machine.make("nvidia0", "nvidia5")
    assert machine.one(gpu(0, 5)).node == machine.node("nvidia5")


def test_a_gpu_without_its_node_does_not_cost_the_others(machine: Machine) -> None:
    """It is left out, with a sentence."""
    machine.make("nvidia0", "nvidia2")
    found, problems = machine.gpu_nodes(gpu(0), gpu(1), gpu(2))
    assert [one.gpu.index for one in found] == [0, 2]
    assert len(problems) == 1
    assert problems[0].startswith('GPU 1 is left out: no device node "/dev/nvidia1"')


@pytest.mark.parametrize(
    ("mode", "group", "needed"),
    [
        (0o666, 44, 0),
        (0o660, 44, 44),
        (0o440, 44, 44),
        (0o664, 44, 44),
        (0o662, 44, 44),
        (0o660, 0, 0),
        (0o600, 0, 0),
    ],
)
def test_the_group_of_a_node_is_told_where_it_matters(
    machine: Machine, mode: int, group: int, needed: int
) -> None:
    """B136: a user in the container needs the group that the node is for."""
    machine.make("nvidia0", mode=mode, group=group)
    assert machine.one(gpu()).node == machine.node("nvidia0", needed)


def test_drm_nodes_are_those_of_the_bus_id(machine: Machine) -> None:
    """What sysfs names and does not exist as a node is left out, and so are others' nodes."""
    machine.make("nvidia0", "dri/card1", "dri/card2", "dri/renderD129")
    machine.drm("card1", "renderD129", "controlD65")
    machine.drm("card2", bus_id="0000:1b:00.0")
    machine.link("dri/by-path/pci-0000:1a:00.0-card", "../card1")
    machine.link("dri/by-path/pci-0000:1a:00.0-render", "../renderD129")
    machine.link("dri/by-path/pci-0000:1b:00.0-card", "../card2")
    found = machine.one(gpu())
    assert found.drm == (machine.node("dri/card1"), machine.node("dri/renderD129"))
    assert found.links == (
        "../card1::/dev/dri/by-path/pci-0000:1a:00.0-card",
        "../renderD129::/dev/dri/by-path/pci-0000:1a:00.0-render",
    )


@pytest.mark.parametrize("target", ["../card2", "card1", "/dev/card1", "../../dri/card9", "/"])
def test_links_that_lead_elsewhere_are_left_out(machine: Machine, target: str) -> None:
    """In the container they would dangle, or lead to another GPU's node."""
    machine.make("nvidia0", "dri/card1", "dri/card2")
    machine.drm("card1")
    machine.link("dri/by-path/pci-0000:1a:00.0-card", target)
    found = machine.one(gpu())
    assert found.drm == (machine.node("dri/card1"),)
    assert found.links == ()


def test_links_are_kept_as_they_are(machine: Machine) -> None:
    """Whoever made it absolute had a reason."""
    machine.make("nvidia0", "dri/card1")
    machine.drm("card1")
    machine.link("dri/by-path/pci-0000:1a:00.0-card", "/dev/dri/card1")
    assert machine.one(gpu()).links == ("/dev/dri/card1::/dev/dri/by-path/pci-0000:1a:00.0-card",)


def test_without_a_bus_id_there_are_no_drm_nodes(machine: Machine) -> None:
    """B134: no /dev/dri/by-path/pci--card."""
    machine.make("nvidia0", "dri/card1")
    machine.drm("card1")
    machine.link("dri/by-path/pci--card", "../card1")
    # What a path with an empty name would lead to.
    (machine.sys / "bus/pci/devices/drm/card1").mkdir(parents=True)
    found = machine.one(gpu(bus_id=""))
    assert (found.drm, found.links) == ((), ())


@pytest.mark.parametrize("source", ["mig-minors", "capabilities"])
def test_mig_devices_have_a_node_for_each_instance(machine: Machine, source: str) -> None:
    """That of the GPU instance and that of the compute instance, from either file."""
    if source == "mig-minors":
        machine.write("nvidia-caps/mig-minors", MINORS)
    else:
        tree = "nvidia/capabilities/gpu0/mig/gi7"
        machine.write(f"{tree}/access", "DeviceFileMinor: 66\nDeviceFileMode: 292\n")
        machine.write(f"{tree}/ci1/access", "DeviceFileMode: 292\nDeviceFileMinor: 68\n")
    machine.make("nvidia0")
    machine.make("nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap68", mode=0o444)
    found = machine.one(gpu(0, 0, MIG))
    nodes_of_mig = (
        machine.node("nvidia-caps/nvidia-cap66"),
        machine.node("nvidia-caps/nvidia-cap68"),
    )
    assert found.mig == ((MIG, *nodes_of_mig),)


def test_capabilities_go_by_the_minor_of_the_gpu(machine: Machine) -> None:
    """The kernel driver counts GPUs by minor, NVML by bus."""
    machine.write("nvidia-caps/mig-minors", "gpu0/gi7/access 5\ngpu9/gi7/access 6\n")
    machine.write("nvidia/capabilities/gpu9/mig/gi7/ci1/access", "DeviceFileMinor: 7\n")
    machine.make("nvidia9", "nvidia-caps/nvidia-cap6", "nvidia-caps/nvidia-cap7")
    assert [node.container_path[-1] for node in machine.one(gpu(0, 9, MIG)).mig[0][1:]] == [
        "6",
        "7",
    ]


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ((), "nvidia-cap66"),
        (("nvidia-caps/nvidia-cap66",), "nvidia-cap68"),
    ],
)
def test_a_mig_device_without_a_capability_node_is_left_out(
    machine: Machine, there: tuple[str, ...], missing: str
) -> None:
    """B114: the container would see the GPU only, which it cannot use, and no error."""
    machine.write("nvidia-caps/mig-minors", MINORS)
    machine.make("nvidia0", *there)
    (found,), (problem,) = machine.gpu_nodes(gpu(0, 0, MIG))
    assert found.mig == ()
    assert problem == (
        f'MIG device 0:3 is left out: no device node "/dev/nvidia-caps/{missing}" below the dev '
        f'root "{machine.root}"; run "gpuruntime system create-device-nodes --all '
        f'--load-kernel-modules --driver-root {machine.root}" as root'
    )


@pytest.mark.parametrize(
    "minors",
    [
        None,
        "",
        "gpu0/gi7/ci1/access 68\n",
        "gpu0/gi7/access\n",
        "gpu0/gi7/access  66\n",
        "gpu0/gi7/access x\n",
        "gpu0/gi7/access -1\n",
        "gpu0/gi7/access 66 67\n",
        "gpu00/gi7/access 66\n",
        f"gpu0/gi7/access {'9' * 5000}\n",
        "\xff\0gpu0/gi7/access 66\n",
    ],
)
def test_a_mig_device_without_a_capability_is_left_out(
    machine: Machine, minors: str | None
) -> None:
    """Lines that are none are skipped, and a kernel without MIG grants no MIG device."""
    if minors is not None:
        machine.write("nvidia-caps/mig-minors", minors)
    machine.write("nvidia/capabilities/gpu0/mig/gi7/access", "DeviceFileMinor: x\n")
    machine.make("nvidia0", "nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap68")
    (found,), (problem,) = machine.gpu_nodes(gpu(0, 0, MIG))
    assert found.mig == ()
    assert problem.startswith("MIG device 0:3 is left out: neither ")
    assert "tells the minor of gpu0/gi7/" in problem


def test_a_mig_device_without_nodes_does_not_cost_its_neighbour(machine: Machine) -> None:
    """Nor the GPU: who asks for it by name gets it."""
    machine.write(
        "nvidia-caps/mig-minors", MINORS + "gpu0/gi8/access 75\ngpu0/gi8/ci0/access 76\n"
    )
    machine.make("nvidia0", "nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap68")
    other = MigDevice(index=4, uuid="MIG-y", gpu_instance=8, compute_instance=0)
    (found,), problems = machine.gpu_nodes(gpu(0, 0, MIG, other))
    assert [mig[0] for mig in found.mig] == [MIG]
    assert len(problems) == 1
    assert problems[0].startswith('MIG device 0:4 is left out: no device node "/dev/nvidia-caps/')


def test_without_mig_devices_capabilities_do_not_matter(machine: Machine) -> None:
    """B064: MIG on and nothing made yet is no error, nor are missing files of MIG."""
    machine.make("nvidia0", "nvidia1")
    in_mig_mode = Gpu(index=0, uuid="", minor=0, name="", mig_enabled=True)
    found, problems = machine.gpu_nodes(in_mig_mode, gpu(1))
    assert problems == ()
    assert [one.mig for one in found] == [(), ()]
    assert found[0].gpu.mig_enabled


def test_control_nodes_may_be_missing_for_who_says_so(machine: Machine) -> None:
    """A container that asks for no GPU needs none; and who makes them later finds the others."""
    assert device_nodes.control_nodes(machine.dev(), strict=False) == ()
    machine.make("nvidiactl")
    assert device_nodes.control_nodes(machine.dev(), strict=False) == (machine.node("nvidiactl"),)


FEATURE_NODES = {
    "gds": ("nvidia-fs", "nvidia-fs0", "nvidia-fs2", "nvidia-fs10"),
    "mofed": ("infiniband/rdma_cm", "infiniband/uverbs0", "infiniband/uverbs9"),
    "gdrcopy": ("gdrdrv",),
    "nvswitch": ("nvidia-nvswitch0", "nvidia-nvswitch1", "nvidia-nvswitchctl"),
    "imex": tuple(f"nvidia-caps-imex-channels/channel{number}" for number in (0, 9, 10, 2047)),
    "cc": ("sev-guest", "tdx_guest"),
    "mig-config": ("nvidia-caps/nvidia-cap1",),
    "mig-monitor": ("nvidia-caps/nvidia-cap2",),
}


def features(machine: Machine, host: Machine | None = None) -> dict[str, tuple[Node, ...]]:
    """Find the nodes of features."""
    host = host or machine
    return device_nodes.feature_nodes(machine.dev(), host.dev(), proc=str(machine.proc))


@pytest.mark.parametrize("feature", FEATURE_NODES)
def test_features_have_nodes_of_their_own(machine: Machine, feature: str) -> None:
    """In the order of their numbers; the others have none."""
    machine.write("nvidia-caps/mig-minors", "config 1\nmonitor 2\ngpu0/gi0/access 3\n")
    machine.make("nvidia0", "nvidia-caps/nvidia-cap3", *reversed(FEATURE_NODES[feature]))
    (Path(machine.root) / "dev/nvidia-fs-file").touch()
    # Names that the driver gives to no channel.
    machine.make(
        *(f"nvidia-caps-imex-channels/channel{text}" for text in ("", "x", "01", 1 << 20))
    )
    found = features(machine)
    assert found.pop(feature) == tuple(map(machine.node, FEATURE_NODES[feature]))
    assert set(found.values()) == {()}
    assert {feature, *found} == {*FEATURE_NODES}


def test_rights_over_mig_devices_are_told_by_either_file(machine: Machine) -> None:
    """The file of a capability, where the driver does not list them."""
    machine.make("nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2", mode=0o400)
    assert features(machine)["mig-config"] == ()
    tree = "nvidia/capabilities/mig"
    machine.write(f"{tree}/config", "DeviceFileMinor: 1\nDeviceFileMode: 256\n")
    machine.write(f"{tree}/monitor", "DeviceFileMinor: 7\n")
    found = features(machine)
    assert found["mig-config"] == (machine.node("nvidia-caps/nvidia-cap1"),)
    assert found["mig-monitor"] == ()


def test_modules_of_others_have_their_nodes_on_the_host(machine: Machine, tmp_path: Path) -> None:
    """B051: a driver container has its own /dev, and not what other modules make."""
    (tmp_path / "host").mkdir()
    host = Machine(tmp_path / "host")
    host.make(*(name for names in FEATURE_NODES.values() for name in names))
    machine.write("nvidia-caps/mig-minors", "config 1\n")
    machine.make("gdrdrv")
    found = features(machine, host)
    host.opened[0].close()
    assert found["gds"] == tuple(map(host.node, FEATURE_NODES["gds"]))
    assert found["mofed"] == tuple(map(host.node, FEATURE_NODES["mofed"]))
    # Its own come first; and what the driver makes is where the driver is.
    assert found["gdrcopy"] == (machine.node("gdrdrv"),)
    assert (found["nvswitch"], found["imex"], found["mig-config"]) == ((), (), ())


def test_management_nodes_are_all_of_the_driver(machine: Machine) -> None:
    """But those of storage and of the fabric, which have modes of their own."""
    expected = [
        *("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia10"),
        *("nvidia2", "nvidiactl"),
        *(f"nvidia-caps-imex-channels/channel{number}" for number in (0, 1, 2047)),
        *("nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap66"),
    ]
    machine.make(*expected)
    machine.make("nvidia-fs0", "nvidia-nvswitchctl", "nvidia-nvswitch0", "nvidia-nvlink")
    machine.make("null", "dri/card0", "nvidia-caps/other", "nvidia-caps-imex-channels/x")
    machine.link("nvidia1", "nvidia0")
    (Path(machine.root) / "dev/nvidia-file").touch()
    assert device_nodes.management_nodes(machine.dev()) == tuple(map(machine.node, expected))


def test_no_management_nodes_is_an_error(machine: Machine) -> None:
    """A management container without nodes looks after nothing."""
    machine.make("nvidia-fs0", "null")
    with pytest.raises(DiscoveryError, match="no NVIDIA device nodes found") as caught:
        device_nodes.management_nodes(machine.dev())
    assert caught.value.hint


def test_links_do_not_lead_out_of_the_dev_root(machine: Machine, tmp_path: Path) -> None:
    """A root is another machine's /: its absolute links mean its own files."""
    (tmp_path / "outside").mkdir()
    os.mknod(tmp_path / "outside" / "card1", stat.S_IFCHR | 0o666, os.makedev(195, 99))
    machine.make("nvidia0", "elsewhere/renderD129")
    machine.link("dri", "/dev/elsewhere")
    machine.link("elsewhere/card1", str(tmp_path / "outside" / "card1"))
    machine.drm("card1", "renderD129")
    # The host path is where the node is: below a link the host would look in its own /dev.
    assert machine.one(gpu()).drm == (
        Node(
            host_path=f"{machine.root}/dev/elsewhere/renderD129",
            container_path="/dev/dri/renderD129",
        ),
    )


def test_a_dev_root_may_be_given_by_a_link(machine: Machine, tmp_path: Path) -> None:
    """/run/nvidia/driver is one where the driver is in a container; what it names is kept."""
    machine.make("nvidia0")
    (tmp_path / "link").symlink_to("root")
    dev = DevRoot(str(tmp_path / "link"))
    assert dev.node("/dev/nvidia0") == machine.node("nvidia0")
    dev.close()


def test_each_directory_is_opened_once(machine: Machine) -> None:
    """A machine of 64 GPUs in MIG mode has a thousand nodes."""
    machine.make("nvidia0", "dri/card0")
    dev = machine.dev()
    before = len(descriptors.opened())
    for _ in range(3):
        assert dev.node("/dev/nvidia0")
        assert dev.node("/dev/dri/card0")
        assert dev.node("/dev/nothing/here") is None
    assert len(descriptors.opened()) == before + 2
