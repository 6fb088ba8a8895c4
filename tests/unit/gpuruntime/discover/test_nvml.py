# SPDX-License-Identifier: Apache-2.0
"""What nvml.query makes of whole, old, partial, broken and hostile NVML libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from simhost import artefacts, symbols

from gpuruntime.discover import nvml, nvml_fabric
from gpuruntime.errors import DriverError
from gpuruntime.model import Gpu, MigDevice

UUIDS = [f"GPU-{index}f1e0000-9a3c-4d27-8b60-0c1d2e3f4a0b" for index in range(3)]
MIG_UUIDS = [f"MIG-{index}a7c0000-51d2-5e0b-9f14-0b2a3c4d5e0f" for index in range(2)]
# GPU 1 is in MIG mode, and the minors are not the indices.
HOST = (
    "driver 550.163.01",
    f"gpu {UUIDS[0]} 2 0000:1a:00.0 81559 0 NVIDIA H100 80GB HBM3",
    f"gpu {UUIDS[1]} 0 0000:1b:00.0 81559 1 NVIDIA H100 80GB HBM3",
    f"gpu {UUIDS[2]} 1 10000:CA:00.0 81559 0 NVIDIA DGX Display",
    f"mig 1 0 {MIG_UUIDS[0]} 1 0 3 3 40448",
    f"mig 1 2 {MIG_UUIDS[1]} 9 1 1 1 9856",
)
H100 = "NVIDIA H100 80GB HBM3"
MIGS = (
    MigDevice(index=0, uuid=MIG_UUIDS[0], gpu_instance=1, compute_instance=0),
    MigDevice(index=2, uuid=MIG_UUIDS[1], gpu_instance=9, compute_instance=1),
)

Install = Callable[..., str]


def gpus(**changes: object) -> list[Gpu]:
    """Return the GPUs of HOST, each with *changes*."""
    values: list[dict[str, object]] = [
        {"minor": 2, "name": H100, "bus_id": "0000:1a:00.0"},
        {"minor": 0, "name": H100, "bus_id": "0000:1b:00.0"},
        {"minor": 1, "name": "NVIDIA DGX Display", "bus_id": "10000:ca:00.0"},
    ]
    values[1] |= {"mig_enabled": True, "mig_devices": MIGS}
    usual = {"architecture": "9.0", "brand": "nvidia"}
    return [
        Gpu(**{"index": index, "uuid": UUIDS[index], **usual, **value, **changes})  # type: ignore[arg-type]
        for index, value in enumerate(values)
    ]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Return a function that gives the path of an NVML that tells of HOST, with faults."""

    def install(*faults: str, missing: tuple[str, ...] = (), host: tuple[str, ...] = HOST) -> str:
        library = tmp_path / "libnvidia-ml.so.550.163.01"
        library.write_bytes(symbols.without(artefacts.fake_nvml().read_bytes(), missing))
        (tmp_path / "fakenvml.conf").write_text("\n".join([*host, *faults]) + "\n")
        return str(library)

    return install


def kernel(directory: Path, minors: dict[str, str], version: str = "") -> str:
    """Return a /proc that tells these minors by bus id and this version of the module."""
    nvidia = directory / "proc" / "driver" / "nvidia"
    for bus_id, text in minors.items():
        (nvidia / "gpus" / bus_id).mkdir(parents=True)
        (nvidia / "gpus" / bus_id / "information").write_text(text)
    if version:
        nvidia.mkdir(parents=True, exist_ok=True)
        (nvidia / "version").write_text(version)
    return str(directory / "proc")


def children() -> set[str]:
    """Return the processes that this one has started and that live."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_everything_that_discovery_needs_is_told(install: Install) -> None:
    """Bus ids are spelled as sysfs does, whose domains have the digits that they need."""
    answer = nvml.query(install())
    assert answer.driver_version == "550.163.01"
    assert list(answer.gpus) == gpus()
    assert answer.problems == ()


def test_mig_mode_without_instances_is_no_fault(install: Install) -> None:
    """B064: what is bad about it is for others to say."""
    answer = nvml.query(install(host=HOST[:-2]))
    assert answer.problems == ()
    assert [(gpu.mig_enabled, gpu.mig_devices) for gpu in answer.gpus] == [
        (False, ()),
        (True, ()),
        (False, ()),
    ]


@pytest.mark.parametrize(
    ("missing", "changes"),
    [
        (("nvmlInit_v2",), {}),
        (("nvmlDeviceGetCount_v2",), {}),
        (("nvmlDeviceGetHandleByIndex_v2",), {}),
        (("nvmlDeviceGetMaxMigDeviceCount",), {}),
        (("nvmlErrorString",), {}),
        (("nvmlShutdown", "nvmlDeviceGetIndex"), {}),
        (("nvmlDeviceGetBrand",), {"brand": ""}),
        (("nvmlDeviceGetCudaComputeCapability",), {"architecture": ""}),
        (("nvmlDeviceGetName",), {"name": ""}),
        (("nvmlDeviceGetUUID",), {"uuid": ""}),
        (
            ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"),
            {"bus_id": ""},
        ),
        (("nvmlDeviceGetMigMode",), {"mig_enabled": False, "mig_devices": ()}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_old_nvml_costs_what_needs_the_function(
    install: Install, missing: tuple[str, ...], changes: dict[str, object]
) -> None:
    """B134: an NVML of before MIG has none of its functions, and its GPUs work all the same."""
    answer = nvml.query(install(missing=missing))
    found = [
        Gpu(
            **{
                **{name: getattr(gpu, name) for name in Gpu.__slots__},
                # Their UUIDs are told by the same function as those of GPUs.
                "mig_devices": tuple(
                    MigDevice(
                        index=mig.index,
                        uuid=mig.uuid or MIG_UUIDS[mig.index // 2],
                        gpu_instance=mig.gpu_instance,
                        compute_instance=mig.compute_instance,
                    )
                    for mig in gpu.mig_devices
                ),
            }
        )
        for gpu in answer.gpus
    ]
    assert found == gpus(**changes)
    assert answer.problems == ()
    assert answer.driver_version == "550.163.01"


def test_older_bus_ids_are_read_from_their_place(install: Install) -> None:
    """The first versions of nvmlPciInfo_t end where the newest has its bus id."""
    missing: tuple[str, ...] = ()
    for version in ("_v3", "_v2"):
        missing += (f"nvmlDeviceGetPciInfo{version}",)
        answer = nvml.query(install(missing=missing, host=HOST[:3]))
        assert [gpu.bus_id for gpu in answer.gpus] == ["0000:1a:00.0", "0000:1b:00.0"]


def test_an_unknown_driver_version_is_none(install: Install) -> None:
    """The names of the libraries tell it, too."""
    answer = nvml.query(install(missing=("nvmlSystemGetDriverVersion",)))
    assert answer.driver_version is None
    assert list(answer.gpus) == gpus()


@pytest.mark.parametrize(
    "missing", ["nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId"]
)
def test_mig_devices_that_cannot_be_granted_are_left_out(install: Install, missing: str) -> None:
    """Without the numbers of its instances nobody knows which nodes grant a MIG device."""
    answer = nvml.query(install(missing=(missing,)))
    assert [gpu.mig_enabled for gpu in answer.gpus] == [False, True, False]
    assert [gpu.mig_devices for gpu in answer.gpus] == [(), (), ()]
    assert answer.problems
    assert all(f"left out: this NVML has no {missing}" in line for line in answer.problems)


@pytest.mark.parametrize(
    "missing",
    [("nvmlInit_v2", "nvmlInit"), ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")],
)
def test_without_the_first_functions_there_is_an_error(
    install: Install, missing: tuple[str, ...]
) -> None:
    """What cannot be asked at all is no NVML."""
    with pytest.raises(DriverError, match=f"this NVML has no {missing[1]}") as caught:
        nvml.query(install(missing=missing))
    assert caught.value.hint


def test_a_missing_minor_comes_from_the_kernel(install: Install, tmp_path: Path) -> None:
    """The node of a GPU whose minor nobody tells is not guessed from its index."""
    proc = kernel(
        tmp_path,
        {
            "0000:1a:00.0": "Model: \t\t H100\nDevice Minor: \t 2\nGPU Excluded:\t No\n",
            "0000:1b:00.0": "Model: \t\t Device Minor: 7\n",
            "10000:ca:00.0": "Device Minor: \t 1",
        },
    )
    answer = nvml.query(install(missing=("nvmlDeviceGetMinorNumber",)), proc=proc)
    assert [(gpu.index, gpu.minor) for gpu in answer.gpus] == [(0, 2), (2, 1)]
    problem = "GPU 1 is left out: this NVML has no nvmlDeviceGetMinorNumber"
    assert answer.problems == (problem,)


def test_functions_that_do_not_know_the_gpu_are_as_good_as_missing(install: Install) -> None:
    """A GPU that cannot do MIG answers "Not Supported", as do virtual ones about PCI."""
    answer = nvml.query(
        install(
            "fault fails nvmlDeviceGetMigMode 3 0",
            "fault fails nvmlDeviceGetPciInfo_v3 3 0",
            "fault fails nvmlDeviceGetPciInfo_v2 3 0",
            "fault fails nvmlDeviceGetUUID 3 0",
            "fault fails nvmlDeviceGetName 3 0",
        )
    )
    first = Gpu(index=0, uuid="", minor=2, name="", architecture="9.0", brand="nvidia")
    assert answer.gpus == (first, *gpus()[1:])
    assert answer.problems == ()


@pytest.mark.parametrize(
    ("number", "version"),
    [(12040, "12.4"), (13000, "13.0"), (9010, "9.1"), (10020, "10.2"), (0, "")],
)
def test_the_newest_cuda_of_the_driver(install: Install, number: int, version: str) -> None:
    """What images require."""
    assert nvml.query(install(f"cuda {number}")).cuda_version == version


@pytest.mark.slow
def test_cuda_s_version_may_be_unknown(install: Install) -> None:
    """An NVML of long ago, or a host without libcuda: no container depends on it alone."""
    newest, older = "nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"
    assert nvml.query(install("cuda 11020", missing=(newest,))).cuda_version == "11.2"
    assert nvml.query(install("cuda 11020", missing=(newest, older))).cuda_version == ""
    for code in (3, 12, 999):
        answer = nvml.query(install("cuda 11020", f"fault fails {newest} {code}"))
        assert (answer.cuda_version, answer.problems) == ("", ())
        assert list(answer.gpus) == gpus()


@pytest.mark.parametrize(
    ("number", "brand"),
    [
        *((0, "unknown"), (1, "quadro"), (2, "tesla"), (3, "nvs"), (4, "grid"), (5, "geforce")),
        *((6, "titan"), (7, "nvidiavapps"), (8, "nvidiavpc"), (9, "nvidiavcs")),
        *((10, "nvidiavws"), (11, "nvidiacloudgaming"), (12, "quadrortx"), (13, "nvidiartx")),
        *((14, "nvidia"), (15, "geforcertx"), (16, "titanrtx")),
        *((17, "unknown"), (4294967295, "unknown")),
    ],
)
def test_brands_are_spelled_as_requirements_do(install: Install, number: int, brand: str) -> None:
    """A brand newer than this list is nobody's requirement."""
    answer = nvml.query(install(f"brand 1 {number}", "arch 1 8 6", "arch 2 10 0"))
    assert [gpu.brand for gpu in answer.gpus] == ["nvidia", brand, "nvidia"]
    assert [gpu.architecture for gpu in answer.gpus] == ["9.0", "8.6", "10.0"]


@pytest.mark.parametrize("code", [3, 13, 999])
def test_facts_that_nobody_tells_cost_no_gpu(install: Install, code: int) -> None:
    """Only a requirement asks for them."""
    answer = nvml.query(
        install(
            f"fault fails nvmlDeviceGetBrand {code}",
            f"fault fails nvmlDeviceGetCudaComputeCapability {code}",
        )
    )
    assert list(answer.gpus) == gpus(brand="", architecture="")
    assert answer.problems == ()


@pytest.mark.parametrize(
    ("line", "memory"),
    [
        ("addressing 1 2 5", (True, 5)),
        ("addressing 1 2", (True, -1)),
        # HMM: the page tables are not shared.
        ("addressing 1 1 5", (False, -1)),
        ("fault fails nvmlDeviceGetAddressingMode 999", (False, -1)),
    ],
)
def test_memory_that_is_coherent(install: Install, line: str, memory: tuple[bool, int]) -> None:
    """On Grace: the GPU shares page tables, and its memory is a NUMA node."""
    gpus_of_answer = nvml.query(install(line)).gpus
    assert [(gpu.coherent, gpu.memory_node) for gpu in gpus_of_answer] == [
        (False, -1),
        memory,
        (False, -1),
    ]


@pytest.mark.parametrize(
    ("lines", "states"),
    [
        ((), []),
        (("fabric 1 00112233-4455-6677-8899-aabbccddeeff 1",), [(1, 3, 0)]),
        (("fabricstate 0 1 0", "fabricstate 1 2 0", "fabricstate 2 3 999"),
         [(0, 1, 0), (1, 2, 0), (2, 3, 999)]),
        (("fabricstate 0 1 0", "fault lost 0", "fabricstate 1 3 0"), [(1, 3, 0)]),
        (("fault fails nvmlDeviceGetGpuFabricInfo 13",), []),
    ],
)  # fmt: skip
def test_the_state_of_the_fabric(
    install: Install, lines: tuple[str, ...], states: list[tuple[int, int, int]]
) -> None:
    """Of each GPU that has one; a lost GPU and an old NVML are left out."""
    rows = nvml_fabric.query(install(*lines), 10)
    assert [(row.index, row.state, row.status) for row in rows] == states


@pytest.mark.parametrize(
    "function",
    [
        *("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMinorNumber"),
        *("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMigMode"),
    ],
)
def test_one_gpu_in_trouble_does_not_cost_the_others(install: Install, function: str) -> None:
    """B116, B134: seven GPUs go on working after the eighth fell off the bus."""
    answer = nvml.query(install(f"fault fails {function} 999 1"))
    assert list(answer.gpus) == [gpus()[0], gpus()[2]]
    assert answer.problems == ("GPU 1 is left out: Unknown Error",)
    (device,) = answer.left_out
    bus_id = "" if function == "nvmlDeviceGetPciInfo_v3" else gpus()[1].bus_id
    assert (device.name, device.bus_id, device.reason) == ("1", bus_id, "Unknown Error")


def test_lost_devices_are_left_out_one_by_one(install: Install) -> None:
    """A MIG device in trouble costs neither its neighbour nor its GPU."""
    answer = nvml.query(install("fault lost 0", "fault mig-lost 1 0"))
    assert [gpu.index for gpu in answer.gpus] == [1, 2]
    assert answer.gpus[0].mig_devices == MIGS[1:]
    assert answer.problems == (
        "GPU 0 is left out: GPU is lost",
        "MIG device 1:0 is left out: GPU is lost",
    )
    assert tuple(map(str, answer.left_out)) == answer.problems
    assert all("Xid" in device.hint for device in answer.left_out)


def test_a_driver_that_goes_during_the_query_is_an_error(install: Install) -> None:
    """It costs all GPUs, not the one that was asked about."""
    with pytest.raises(DriverError, match="Driver Not Loaded"):
        nvml.query(install("fault fails nvmlDeviceGetHandleByIndex_v2 9 1"))


def test_an_error_without_words_has_its_number(install: Install) -> None:
    """Even a library without nvmlErrorString says something."""
    answer = nvml.query(install("fault lost 0", missing=("nvmlErrorString",)))
    assert answer.problems == ("GPU 0 is left out: code 15",)


def test_an_empty_bus_id_is_none(install: Install) -> None:
    """B134: else there would be a link /dev/dri/by-path/pci--card."""
    answer = nvml.query(install("fault nobusid 1"))
    assert [gpu.bus_id for gpu in answer.gpus] == ["0000:1a:00.0", "", "10000:ca:00.0"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"NVIDIA\x0a\x1b[31m \xc3\xa9 \xff", "NVIDIA\n\x1b[31m é \udcff"),
        ("N" * 400, "N" * 400),
        ("../../etc/passwd", "../../etc/passwd"),
        ("NVIDIA DGX Display", "NVIDIA DGX Display"),
    ],
    ids=["odd", "long", "path", "display"],
)
def test_names_are_kept_as_they_are(install: Install, written: str, read: str) -> None:
    """Whoever prints one escapes it; nothing else depends on it but equality."""
    host = (f"gpu {UUIDS[0]} 0 0000:1a:00.0 81559 0 {written}",)
    assert [gpu.name for gpu in nvml.query(install(host=host)).gpus] == [read]


def test_a_uuid_that_can_be_no_name_is_none(install: Install) -> None:
    """The GPU has its index still, and the problem is one line of ASCII."""
    host = (r"gpu GPU-\x0a\xff 0 0000:1a:00.0 81559 0 X", *HOST[2:4])
    answer = nvml.query(install(host=host))
    assert [gpu.uuid for gpu in answer.gpus] == ["", *UUIDS[1:]]
    assert answer.problems == (r'GPU 0 has no name by its UUID, which is "GPU-\x0a\xff"',)


def test_uuids_of_mig_devices_may_be_those_of_older_drivers(install: Install) -> None:
    """Until driver 470 they named the GPU and the numbers of the instances."""
    old = f"MIG-{UUIDS[1]}/1/0"
    answer = nvml.query(install(host=(*HOST[:3], f"mig 1 0 {old} 1 0 3 3 40448")))
    assert [mig.uuid for mig in answer.gpus[1].mig_devices] == [old]
    assert answer.problems == ()


def test_the_most_that_there_can_be(install: Install) -> None:
    """64 GPUs with 7 MIG devices each."""
    host = [f"gpu GPU-{i} {i} 0000:{i:02x}:00.0 81559 1 X" for i in range(64)]
    host += [f"mig {i} {m} MIG-{i}-{m} {m + 7} 0 1 1 9856" for i in range(64) for m in range(7)]
    answer = nvml.query(install(host=tuple(host)))
    assert [len(gpu.mig_devices) for gpu in answer.gpus] == [7] * 64
    assert answer.gpus[63].mig_devices[6].uuid == "MIG-63-6"


def test_a_library_that_hangs_is_given_up_in_time(install: Install) -> None:
    """And nothing is left behind that a signal can end."""
    start = time.monotonic()
    with pytest.raises(DriverError, match=r'did not answer in 0\.3 s: "/') as caught:
        nvml.query(install("fault init-hangs"), 0.3)
    assert 0.3 <= time.monotonic() - start < 15
    assert "dmesg" in str(caught.value.hint)
    assert children() == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "is_answer"),
    [
        ("pause();", True),
        # As a driver that is late, or a process that gets no time: it is not known which.
        ("for (;;) usleep(10000);", False),
        ("for (;;);", False),
        ("raise(SIGSTOP);", False),
    ],
)
def test_only_a_process_that_sleeps_in_the_driver_is_kept_by_it(
    tmp_path: Path, init: str, *, is_answer: bool
) -> None:
    """Such an answer is remembered for other creates; what a CPU limit did must not be."""
    source = tmp_path / "nvml.c"
    source.write_text(
        "#include <signal.h>\n#include <unistd.h>\n"
        f"int nvmlInitWithFlags(unsigned f) {{ {init} return 0; }}\n"
        f"int nvmlInit_v2(void) {{ {init} return 0; }}\n"
    )
    library = tmp_path / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    with pytest.raises(DriverError, match=r"did not answer in 4 s") as caught:
        nvml.query(str(library), 4)
    assert isinstance(caught.value, nvml.NoAnswerError) is not is_answer
    assert ("CPU limit" in str(caught.value.hint)) is not is_answer
    assert children() == set()


@pytest.mark.parametrize(
    ("code", "is_answer"),
    [
        *((9, True), (15, True), (18, True)),
        *((4, False), (12, False), (17, False), (20, False), (23, False), (999, False)),
    ],
)
def test_an_error_that_is_of_the_process_is_no_answer_for_others(
    install: Install, code: int, *, is_answer: bool
) -> None:
    """A cgroup forbids it the driver's nodes, or memory is short: others are asked anew."""
    with pytest.raises(DriverError) as caught:
        nvml.query(install(f"fault init-fails {code}"))
    assert isinstance(caught.value, nvml.NoAnswerError) is not is_answer


@pytest.mark.parametrize(
    ("faults", "is_shared"),
    [
        ((), True),
        (("fault lost 0",), True),
        (("fault fails nvmlDeviceGetUUID 4 0",), False),
        (("fault fails nvmlDeviceGetHandleByIndex_v2 23 0",), False),
    ],
)
def test_a_gpu_that_this_process_may_not_use_may_be_for_others(
    install: Install, faults: tuple[str, ...], *, is_shared: bool
) -> None:
    """A GPU that fell off the bus is gone for all."""
    answer = nvml.query(install(*faults))
    assert answer.is_shared is is_shared
    assert len(answer.problems) == len(faults)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt: who is started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_who_interrupts_does_not_wait(install: Install) -> None:
    """Ctrl-C on a command that waits for a driver in trouble."""
    library = install("fault init-hangs")
    start = time.monotonic()
    with (
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"]),
        pytest.raises(KeyboardInterrupt),
    ):
        nvml.query(library, 120)
    assert time.monotonic() - start < 60
    assert children() == set()


def test_a_query_without_a_reader_is_ended(install: Install) -> None:
    """An error of the work that the caller does meanwhile leaves no process behind."""
    with pytest.raises(KeyError), nvml.Query(install("fault init-hangs"), 100):
        raise KeyError
    assert children() == set()


@pytest.mark.slow
def test_an_answer_in_time_counts_for_a_caller_that_is_late(install: Install) -> None:
    """The work that the caller does meanwhile may take longer than the deadline."""
    with nvml.Query(install(), 3) as query:
        time.sleep(3.1)
        assert query.answer().driver_version == "550.163.01"


@pytest.mark.slow
def test_a_library_whose_asker_is_gone_is_not_asked_for_ever(install: Install) -> None:
    """A killed command must not leave a process for each of its runs."""
    script = (
        f"from gpuruntime.discover import nvml; nvml.query({install('fault init-hangs')!r}, 1)"
    )
    asker = subprocess.Popen([sys.executable, "-c", script])
    path = Path(f"/proc/{asker.pid}/task/{asker.pid}/children")
    end = time.monotonic() + 60
    while not path.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    child = path.read_text().strip()
    asker.kill()
    asker.wait()
    assert child
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


COMPILED = {
    "crashes": ("void __attribute__((constructor)) f(void) { __builtin_trap(); }", "signal"),
    "exits": (
        "#include <stdlib.h>\nvoid __attribute__((constructor)) f(void) { exit(3); }",
        "status 3",
    ),
    "prints": (
        '#include <unistd.h>\nint nvmlInit(void) { return write(1, "{}", 2) == 2 ? 9 : 8; }',
        "code 9",
    ),
    "closes": ("#include <unistd.h>\nint nvmlInit(void) { return close(3); }", "status 1"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_library_that_does_damage_does_it_elsewhere(name: str, tmp_path: Path) -> None:
    """What it prints is no answer, and what it ends is not us."""
    source, told = COMPILED[name]
    (tmp_path / "nvml.c").write_text(source)
    library = tmp_path / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nvml.c")]
    subprocess.run(command, check=True)
    with pytest.raises(DriverError, match=told) as caught:
        nvml.query(str(library))
    # Whoever was ended did not answer: it may have been for want of memory.
    assert isinstance(caught.value, nvml.NoAnswerError) == (name != "prints")


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF", b"INPUT(libc.so.6)\n"])
def test_what_is_no_library_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    """The loader's own words."""
    library = tmp_path / "lib\nnvidia-ml.so.1"
    if content is not None:
        library.write_bytes(content)
    with pytest.raises(DriverError) as caught:
        nvml.query(str(library))
    assert len(caught.value.lines().splitlines()) == 2


def test_the_library_is_not_loaded_into_this_process(install: Install) -> None:
    """NVML keeps threads and the driver's nodes open."""
    library = install()
    nvml.query(library)
    assert os.path.basename(library) not in Path("/proc/self/maps").read_text()
    assert children() == set()


def test_neither_environment_nor_descriptors_reach_the_library(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that steers a vendor's library is no business of who generates a spec."""
    library = install()
    (tmp_path / "other.conf").write_text("driver 1.2.3\n")
    monkeypatch.setenv("FAKENVML_CONF", str(tmp_path / "other.conf"))
    assert nvml.query(library).driver_version == "550.163.01"
    assert os.environ["FAKENVML_CONF"] == str(tmp_path / "other.conf")


def test_descriptors_of_the_parent_s_garbage_are_no_longer_its(install: Install) -> None:
    """The child's answer goes where the parent may have had a directory open."""
    script = f"""
import gc, os
from gpuruntime.discover import nvml, nvml_fabric
class Owner:
    def __init__(self):
        self.itself, self.fd = self, os.open("/", os.O_RDONLY)
    def __del__(self):
        os.close(self.fd)
gc.collect()
assert Owner().fd == 3
print(nvml.query({install()!r}).driver_version)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("550.163.01\n", "")


def test_pynvml_is_imported_only_by_the_process_that_asks(install: Install) -> None:
    """It is large, and its users in this process, if any, ask another library."""
    script = f"""
import sys
from gpuruntime.discover import nvml, nvml_fabric
nvml.query({install()!r})
print("pynvml" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"False\n"


def test_without_pynvml_there_is_an_error(install: Install) -> None:
    """Modules copied by hand."""
    script = f"""
import sys
sys.modules["pynvml"] = None
from gpuruntime.discover import nvml, nvml_fabric
from gpuruntime.errors import DriverError
try:
    nvml.query({install()!r})
except DriverError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True
    )
    assert "import of pynvml" in done.stdout


def test_two_versions_of_the_driver_are_both_named(install: Install, tmp_path: Path) -> None:
    """B036: an upgrade without a reboot."""
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun  3 2025\n"
    proc = kernel(tmp_path, {}, line)
    with pytest.raises(DriverError) as caught:
        nvml.query(install("fault init-fails 18"), proc=proc)
    assert "the library is 550.163.01, the loaded kernel module 535.261.03" in str(caught.value)
    assert "reboot" in str(caught.value.hint)


def test_why_the_driver_is_not_loaded(install: Install, tmp_path: Path) -> None:
    """A hint to load the module would contradict the host."""
    device = tmp_path / "sys/bus/pci/devices/0000:1a:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    (device / "driver").symlink_to("../nouveau")
    with pytest.raises(DriverError, match=r"Driver Not Loaded.*: nouveau has 1 GPU") as caught:
        nvml.query(install("fault init-fails"), proc=str(tmp_path / "proc"))
    assert caught.value.hint == "install the NVIDIA driver, and reboot"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Wed Apr  8\n", "550.163.01"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release (u@U)\n",
            "570.86.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06\n", "580.65.06"),
        ("GCC version:  gcc version 12.2.0\n", None),
        ("", None),
    ],
)
def test_the_version_of_the_loaded_module(text: str, version: str | None, tmp_path: Path) -> None:
    """Proprietary and open modules word it in different ways."""
    proc = kernel(tmp_path, {}, text or " ")
    assert nvml.module_version(proc) == version
    assert nvml.module_version(str(tmp_path / "nowhere")) is None
