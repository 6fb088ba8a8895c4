# SPDX-License-Identifier: Apache-2.0
"""The simulated GPU host shows what it promises, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SIMHOST = Path(__file__).resolve().parents[1] / "simhost" / "simhost.py"
DEADLINE_S = 20.0
# Runs inside. Prints one JSON document: what NVML says, or the code of its error.
ASK_NVML = """
import json, sys
import pynvml
try:
    pynvml.nvmlInit()
    answers = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            minor = pynvml.nvmlDeviceGetMinorNumber(gpu)
            bus_id = pynvml.nvmlDeviceGetPciInfo(gpu).busId
            answers.append([pynvml.nvmlDeviceGetUUID(gpu), minor, bus_id])
        except pynvml.NVMLError as error:
            answers.append(error.value)
    print(json.dumps(answers))
except pynvml.NVMLError as error:
    print(json.dumps(error.value))
"""

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif("SIMHOST" in os.environ, reason="runs outside of the simulated host"),
]


def command_line(*command: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command line that runs *command* on the simulated host."""
    return [sys.executable, str(SIMHOST), "run", *options, "--", *command]


def inside(
    *command: str, options: tuple[str, ...] = (), check: bool = True, user: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run *command* on the simulated host."""
    return subprocess.run(
        command_line(*command, options=options),
        capture_output=True,
        text=True,
        timeout=60,
        check=check,
    )


def ask_nvml(*options: str) -> object:
    """Return what NVML answers on a host with *options*."""
    return json.loads(inside(sys.executable, "-c", ASK_NVML, options=options).stdout)


def device_nodes() -> dict[str, tuple[int, int]]:
    """Return mode and numbers of everything in /dev."""
    found = {}
    for directory, _, files in os.walk("/dev"):
        if directory.startswith(("/dev/pts", "/dev/shm", "/dev/mqueue")):
            continue
        for name in files:
            path = f"{directory}/{name}"
            status = os.lstat(path)
            found[path] = (status.st_mode, status.st_rdev)
    return found


def processes_with(token: str) -> list[int]:
    """Return the processes that have *token* in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def groups_of(supervisor: int) -> list[Path]:
    """Return the cgroups that the simulated host of process *supervisor* made."""
    return list(Path("/sys/fs/cgroup").rglob(f"simhost-{supervisor}"))


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether *condition* holds within the deadline."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture
def as_before() -> Iterator[None]:
    """Assert that /dev and the mounts are afterwards what they were."""
    nodes = device_nodes()
    mounts = Path("/proc/self/mountinfo").read_text()
    yield
    assert device_nodes() == nodes
    assert Path("/proc/self/mountinfo").read_text() == mounts


@pytest.fixture
def busy_host() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Give a simulated host with processes, a mount and cgroups in it, and its token."""
    token = f"token-{uuid.uuid4()}"
    script = """
        group=/sys/fs/cgroup/pids
        [ -d $group ] || group=/sys/fs/cgroup
        mkdir -p $group/engine/container
        mount -t tmpfs tmpfs /mnt
        setsid sleep 1000 < /dev/null > /dev/null 2>&1 &
        echo $! > $group/engine/container/cgroup.procs
        mknod /dev/simhost-test c 195 9
        touch /etc/simhost-test /usr/simhost-test /run/simhost-test
        echo ready
        sleep 1000
    """
    host = subprocess.Popen(
        command_line("sh", "-c", script),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKEN": token},
        start_new_session=True,
    )
    assert host.stdout is not None
    try:
        assert host.stdout.readline() == "ready\n"
        yield host, token
    finally:
        host.kill()
        host.wait()
        host.stdout.close()


def nothing_remains(supervisor: int, token: str) -> bool:
    """Whether the processes with *token* and the cgroups of *supervisor* are gone."""
    return not processes_with(token) and not groups_of(supervisor)


@pytest.mark.usefixtures("as_before")
def test_nothing_remains_after_a_run(tmp_path: Path) -> None:
    """A test run must not change the machine it runs on."""
    script = f"""
        setsid sleep 1000 < /dev/null > /dev/null 2>&1 &
        mkdir -p /sys/fs/cgroup/pids/engine 2> /dev/null || mkdir /sys/fs/cgroup/engine
        touch /etc/simhost-test /usr/simhost-test /run/simhost-test /dev/simhost-test
        touch /etc/cdi/simhost-test /run/gpuruntime/simhost-test /var/run/cdi/simhost-test
        cat /proc/self/mountinfo > {tmp_path}/mounts
    """
    token = f"token-{uuid.uuid4()}"
    host = subprocess.Popen(command_line("sh", "-euc", script), env={**os.environ, "TOKEN": token})
    assert host.wait(timeout=60) == 0
    assert nothing_remains(host.pid, token)
    assert "simhost" in (tmp_path / "mounts").read_text()
    for directory in ("/etc", "/usr", "/run", "/dev", "/etc/cdi", "/run/gpuruntime", "/run/cdi"):
        assert not os.path.lexists(f"{directory}/simhost-test")


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["supervisor", "group"])
def test_nothing_remains_after_a_kill(
    kill: Callable[[int, int], None], busy_host: tuple[subprocess.Popen[str], str]
) -> None:
    """A CI job that is cancelled must not leave processes, mounts or cgroups."""
    host, token = busy_host
    assert len(processes_with(token)) >= 4
    assert groups_of(host.pid)
    kill(host.pid, signal.SIGKILL)
    assert eventually(lambda: nothing_remains(host.pid, token))
    assert not os.path.lexists("/etc/simhost-test")


@pytest.mark.usefixtures("as_before")
def test_the_next_host_removes_cgroups_that_a_killed_one_left(
    busy_host: tuple[subprocess.Popen[str], str],
) -> None:
    """Not even the death of the process that tidies up may fill the machine with cgroups."""
    host, token = busy_host
    for pid in processes_with(token):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert eventually(lambda: not processes_with(token))
    assert groups_of(host.pid)
    inside("true")
    assert not groups_of(host.pid)


def test_a_living_host_keeps_its_cgroups_when_another_starts(
    busy_host: tuple[subprocess.Popen[str], str],
) -> None:
    """Two test runs on one machine must not disturb each other."""
    host, _ = busy_host
    before = groups_of(host.pid)
    inside("true")
    assert before
    assert groups_of(host.pid) == before


def test_a_frozen_process_does_not_outlive_the_host() -> None:
    """A container left paused is frozen, and what is frozen does not die of SIGKILL."""
    script = """
        group=/sys/fs/cgroup/freezer; file=freezer.state; word=FROZEN
        [ -d $group ] || { group=/sys/fs/cgroup; file=cgroup.freeze; word=1; }
        mkdir $group/paused
        sleep 1000 &
        echo $! > $group/paused/cgroup.procs
        echo $word > $group/paused/$file
    """
    token = f"token-{uuid.uuid4()}"
    host = subprocess.Popen(command_line("sh", "-euc", script), env={**os.environ, "TOKEN": token})
    assert host.wait(timeout=30) == 0
    assert nothing_remains(host.pid, token)


def test_nodes_have_the_driver_s_numbers_and_no_driver() -> None:
    """The product copies these numbers into containers; opening tells granted from refused."""
    script = """
import errno, json, os
nodes = {}
for directory, _, files in os.walk("/dev"):
    for name in files:
        if "nvidia" in directory + name:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            nodes[path] = [os.major(status.st_rdev), os.minor(status.st_rdev), status.st_mode]
codes = []
for index in range(8):
    try:
        os.open(f"/dev/nvidia{index}", os.O_RDWR)
    except OSError as error:
        codes.append(errno.errorcode[error.errno])
print(json.dumps([nodes, codes, open("/proc/devices").read()]))
"""
    nodes, codes, devices = json.loads(inside(sys.executable, "-c", script).stdout)
    majors = {
        line.split()[1]: int(line.split()[0])
        for line in devices.partition("Block devices:")[0].splitlines()[1:]
        if line.strip()
    }
    assert majors["nvidia"] == 195
    expected = {f"/dev/nvidia{index}": [195, index, 0o20666] for index in range(8)}
    expected["/dev/nvidiactl"] = [195, 255, 0o20666]
    expected["/dev/nvidia-modeset"] = [195, 254, 0o20666]
    expected["/dev/nvidia-uvm"] = [majors["nvidia-uvm"], 0, 0o20666]
    expected["/dev/nvidia-uvm-tools"] = [majors["nvidia-uvm"], 1, 0o20666]
    expected["/dev/nvidia-caps/nvidia-cap1"] = [majors["nvidia-caps"], 1, 0o20400]
    expected["/dev/nvidia-caps/nvidia-cap2"] = [majors["nvidia-caps"], 2, 0o20444]
    assert nodes == expected
    assert codes == ["ENXIO"] * 8


def test_the_machine_s_own_nodes_are_there_too() -> None:
    """Engines need /dev/null, /dev/fuse and a terminal as before."""
    script = "test -c /dev/null && test -r /dev/urandom && echo x > /dev/null && ls -d /dev/pts"
    assert inside("sh", "-euc", script).stdout == "/dev/pts\n"
    outside = {path for path in device_nodes() if not path.startswith(("/dev/nvidia", "/dev/dri"))}
    listed = set(inside("find", "/dev", "-xdev", "!", "-type", "d").stdout.splitlines())
    assert outside <= listed


def test_the_loader_finds_libcuda() -> None:
    """On a GPU host libcuda.so.1 is in the loader's cache, from where containers get it."""
    script = """
import ctypes
library = ctypes.CDLL("libcuda.so.1")
version = ctypes.c_int()
assert library.cuInit(0) == 0
assert library.cuDriverGetVersion(ctypes.byref(version)) == 0
print(version.value)
"""
    assert inside(sys.executable, "-c", script).stdout == "12040\n"


def test_sonames_lead_to_the_files_of_the_version() -> None:
    """The CDI generator finds driver files by version and makes links by SONAME."""
    options = ("--version", "535.261.03")
    directory = inside("sh", "-c", 'dirname "$SIMHOST_CONF"', options=options).stdout.strip()
    listed = inside("ls", "-l", directory, options=options).stdout
    for link in (
        "libcuda.so.1 -> libcuda.so.535.261.03",
        "libcuda.so -> libcuda.so.1",
        "libnvidia-ml.so.1 -> libnvidia-ml.so.535.261.03",
        "libnvidia-nvvm.so.4 -> libnvidia-nvvm.so.535.261.03",
        "libGLX_nvidia.so.0 -> libGLX_nvidia.so.535.261.03",
    ):
        assert f"{link}\n" in listed
    assert "libnvidia-gpucomp.so.535.261.03\n" in listed


def test_nvidia_smi_lists_the_gpus_of_proc_driver() -> None:
    """NVML and the kernel's files must tell of the same GPUs."""
    listed = inside("nvidia-smi", "-L").stdout.splitlines()
    assert len(listed) == 8
    files = inside(
        "sh", "-c", "grep -h UUID /proc/driver/nvidia/gpus/*/information"
    ).stdout.splitlines()
    uuids = sorted(line.split()[-1] for line in files)
    assert len(set(uuids)) == 8
    assert sorted(line.split()[-1].rstrip(")") for line in listed) == uuids


def test_nvml_tells_minor_and_bus_id_of_each_gpu() -> None:
    """pynvml, which discovery uses, works with the fake NVML."""
    answers = ask_nvml("--gpus", "2")
    assert isinstance(answers, list)
    assert [answer[1:] for answer in answers] == [[0, "00000000:1A:00.0"], [1, "00000000:1B:00.0"]]


@pytest.mark.parametrize(("fault", "code"), [("init-fails", 9), ("init-fails 999", 999)])
def test_fault_init_fails(fault: str, code: int) -> None:
    """A node whose driver is not loaded."""
    assert ask_nvml("--fault", fault) == code
    listed = inside("nvidia-smi", "-L", options=("--fault", fault), check=False)
    assert listed.returncode == 9
    assert listed.stdout == ""


def test_fault_one_gpu_lost() -> None:
    """A GPU that has fallen off the bus is counted and answers nothing."""
    answers = ask_nvml("--fault", "lost 3", "--fault", "lost 5")
    assert isinstance(answers, list)
    assert [index for index, answer in enumerate(answers) if answer == 15] == [3, 5]
    assert len(answers) == 8


def test_fault_init_hangs() -> None:
    """A driver that never answers; a deadline of the caller's must be able to end it."""
    script = f"timeout -s KILL 1 {sys.executable} -c 'import pynvml; pynvml.nvmlInit()'"
    assert (
        inside("sh", "-c", script, options=("--fault", "init-hangs"), check=False).returncode
        == 137
    )
    # The control: without the fault the same ends at once.
    assert inside("sh", "-c", script).returncode == 0


def test_init_can_be_slow() -> None:
    """A cold driver takes seconds."""
    start = time.monotonic()
    ask_nvml("--fault", "initdelay_us 700000")
    assert time.monotonic() - start > 0.7


def test_faults_can_be_made_at_run_time() -> None:
    """A test breaks the driver between two steps of its own."""
    script = (
        'nvidia-smi -L > /dev/null && echo "fault init-fails" >> "$SIMHOST_CONF"; nvidia-smi -L'
    )
    assert inside("sh", "-c", script, check=False).returncode == 9


@pytest.mark.parametrize("value", ["0", "1"])
def test_modify_device_files(value: str) -> None:
    """The driver's default is 1, and it decides whether a hook is needed."""
    script = "grep ^ModifyDeviceFiles /proc/driver/nvidia/params"
    shown = inside("sh", "-c", script, options=("--modify-device-files", value)).stdout
    assert shown == f"ModifyDeviceFiles: {value}\n"
    assert inside("sh", "-c", script).stdout == "ModifyDeviceFiles: 1\n"


def test_a_real_user_space_takes_the_place_of_the_generated_one() -> None:
    """What holds for tiny libraries must hold for NVIDIA's own files and Debian's layout."""
    roots = sorted((SIMHOST.parents[2] / "build" / "driver-root").glob("[0-9]*"))
    if not roots:
        pytest.skip('no driver root: run "make driver-root VERSION=550"')
    script = (
        "nvidia-smi -L; ldconfig -p | grep -w libcuda.so.1; stat -L -c %s /usr/lib/*/libcuda.so.1"
    )
    for root in roots:
        nvml = next(root.glob("usr/lib/*/nvidia/current/libnvidia-ml.so.[0-9]*.*"))
        size = nvml.stat().st_size
        shown = inside("sh", "-euc", script, options=("--driver-root", str(root))).stdout
        assert shown.count("GPU ") == 8
        assert int(shown.split()[-1]) > 10_000_000
        assert nvml.stat().st_size == size


def test_a_separate_root_leaves_the_loader_alone() -> None:
    """A driver container keeps its files in a root of its own."""
    script = """
        test -e "$SIMHOST_ROOT/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1"
        test -e "$SIMHOST_ROOT/etc/ld.so.cache"
        test "$SIMHOST_ROOT" != /
        ldconfig -p
    """
    cache = inside("sh", "-euc", script, options=("--separate-root",)).stdout
    outside = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True)
    assert cache == outside.stdout


def test_gpus_are_on_the_pci_bus() -> None:
    """DRM nodes of a GPU are found by way of its PCI device."""
    script = (
        "cat /sys/bus/pci/devices/0000:1b:00.0/vendor; ls /sys/bus/pci/devices/0000:1b:00.0/drm"
    )
    assert inside("sh", "-euc", script).stdout.split() == ["0x10de", "card2", "renderD130"]


def test_the_exit_status_is_the_command_s() -> None:
    """Test runners decide by it."""
    assert inside("sh", "-c", "exit 7", check=False).returncode == 7
    assert inside("sh", "-c", "kill -KILL $$", check=False).returncode == 137
    missing = inside("no-such-command", check=False)
    assert missing.returncode == 127
    assert missing.stderr == 'simhost: "no-such-command": No such file or directory\n'


def test_signals_reach_the_command() -> None:
    """Ctrl-C and a CI's SIGTERM must let a test tidy up."""
    script = 'trap "echo caught; exit 7" TERM; echo ready; while :; do sleep 0.05; done'
    with subprocess.Popen(
        command_line("sh", "-c", script), stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        host.terminate()
        assert host.stdout.readline() == "caught\n"
        assert host.wait(timeout=30) == 7


def test_inside_it_refuses_to_run_again() -> None:
    """Overlays on overlays would show neither host."""
    again = inside(*command_line("true"), check=False)
    assert again.returncode == 1
    assert again.stderr.splitlines()[0] == "simhost: this is a simulated host already"


def test_without_root_it_says_what_to_do() -> None:
    """A newcomer's first run gets one line, not a traceback."""
    # Neither the checkout nor pytest's own directory need be readable for others.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        copy = Path(directory) / "tests" / "simhost"
        shutil.copytree(SIMHOST.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (copy, *copy.parents[:2]):
            path.chmod(0o755)
        refused = subprocess.run(
            ["/usr/bin/python3", "-B", str(copy / "simhost.py"), "run", "--", "true"],
            capture_output=True,
            text=True,
            check=False,
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
        )
    assert refused.returncode == 1
    expected = ["simhost: the simulated host needs root", "hint: run it with sudo"]
    assert refused.stderr.splitlines() == expected


def test_a_container_sees_proc_driver(tmp_path: Path) -> None:
    """A kernel driver shows its files in every procfs; the params mask is tested against them."""
    (tmp_path / "rootfs").mkdir()
    for name in ("bin", "proc", "dev", "sys"):
        (tmp_path / "rootfs" / name).mkdir()
    shutil.copy("/usr/bin/busybox", tmp_path / "rootfs/bin/cat")
    subprocess.run(["runc", "spec"], cwd=tmp_path, check=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    config["process"]["terminal"] = False
    config["process"]["args"] = ["/bin/cat", "/proc/driver/nvidia/params"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = ("runc", "--root", f"{tmp_path}/state", "run", "-b", str(tmp_path), "simhost-test")

    # The control: without the hook the container's own procfs has no such file.
    assert inside(*run, check=False).returncode != 0
    subprocess.run([sys.executable, str(SIMHOST), "fakeproc", str(tmp_path)], check=True)
    assert "ModifyDeviceFiles: 1\n" in inside(*run).stdout
