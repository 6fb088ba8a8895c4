# SPDX-License-Identifier: Apache-2.0
"""The manager of MIG between an API server and the fake NVML: in this process, killed, and whole.

What a kill leaves is shown by forked processes that the API server kills at the n-th request.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clean_forks
import pytest
from containers import seen
from node import mig_process
from node.fake_node_api import NAMESPACE, NODE, FakeNodeApi
from node.node_host import NodeHost
from node.test_mig import CONFIGS

from gpunode.api.client import connect
from gpunode.api.mig_node import MigNode
from gpunode.cli import agent_services
from gpunode.cli.main import root
from gpunode.mig import commands, journal
from gpunode.mig.host import Host
from gpunode.mig.host_services import HostServices
from gpunode.mig.manager import STATE_LABEL, Manager, Options
from gpunode.mig.node import CONFIG_LABEL
from gpuruntime.errors import GpuRuntimeError

PATIENCE_S = 30
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
DCGM = "nvidia.com/gpu.deploy.dcgm"
GFD = "nvidia.com/gpu.deploy.gpu-feature-discovery"
PAUSED = "paused-for-mig-change"
OPERANDS = {PLUGIN: "true", DCGM: "false", GFD: "yes"}
PODS = {"plugin-x": "nvidia-device-plugin-daemonset", "check-x": "nvidia-operator-validator"}


def until(condition: Callable[[], bool]) -> None:
    """Wait until *condition* holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Node:
    """A node whose first GPU is in MIG mode, with its API server."""

    def __init__(self, directory: Path, **labels: str) -> None:
        self.directory = directory
        self.host = NodeHost(directory, 2, migs=[0])
        self.data = next(self.host.root.rglob("fakenvml.conf"))
        (directory / "configs.yaml").write_text(CONFIGS)
        self.pause_file = directory / "lib/pause.json"
        self.api = FakeNodeApi({CONFIG_LABEL: "small", **OPERANDS, **labels}, PODS)
        self.kubeconfig = directory / "kubeconfig"
        self.reboots: list[str] = []
        self.refreshes = 0
        self.wake = threading.Event()
        self.pid = 0

    def label(self, name: str) -> None:
        """Name another config, and have the manager look, as its watch would."""
        self.api.set(CONFIG_LABEL, name)
        self.wake.set()

    def say(self, line: str) -> None:
        """Append *line* to what NVML reports."""
        with self.data.open("a") as stream:
            stream.write(f"{line}\n")

    def forget(self, word: str) -> None:
        """Remove the lines that begin with *word*."""
        lines = self.data.read_text().splitlines(keepends=True)
        self.data.write_text("".join(line for line in lines if not line.startswith(word)))

    def layout(self) -> list[str]:
        """Return the lines of the instances that NVML reports."""
        words = ("gpuinstance ", "computeinstance ")
        return sorted(x for x in self.data.read_text().splitlines() if x.startswith(words))

    def values(self, **options: Any) -> dict[str, Any]:
        """Return the options of a manager, *options* among them."""
        files = {
            "config_file": str(self.directory / "configs.yaml"),
            "pause_file": str(self.pause_file),
        }
        return {**files, "pods_timeout_s": 5, "boot_id": "b1", **options}

    def manager(self, **options: Any) -> tuple[Manager, threading.Event]:
        """Return a manager in this process, and the signal that ends it."""
        stop = threading.Event()

        def refresh() -> None:
            self.refreshes += 1

        chosen = Options(**self.values(refresh=refresh, **options))
        node = MigNode(connect(str(self.kubeconfig)), NODE, NAMESPACE)
        host = Host(str(self.host.root), str(self.directory / "state"), 20)
        return Manager(node, host, chosen, stop, self.wake), stop

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[Manager]:
        """Run a manager in a thread."""
        with self.api.config(self.kubeconfig):
            manager, stop = self.manager(**options)
            thread = threading.Thread(target=manager.run)
            thread.start()
            try:
                yield manager
            finally:
                stop.set()
                self.wake.set()
                thread.join()

    def until_state(self, state: str) -> None:
        """Wait until the node has *state*."""
        try:
            until(lambda: self.api.labels.get(STATE_LABEL) == state)
        except AssertionError:
            assert (self.api.labels, self.api.events) == state

    def states(self) -> list[str]:
        """Return the states that the label had, each once in a row."""
        texts = [labels.get(STATE_LABEL, "") for labels in self.api.history]
        return [one for index, one in enumerate(texts) if index == 0 or texts[index - 1] != one]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node that has not the config of its label yet."""
    return Node(tmp_path)


def small(layout: list[str]) -> bool:
    """Return whether both GPUs have the config `small`."""
    return sum(line.startswith("computeinstance ") for line in layout) == 14


def test_a_change_pauses_and_restores_the_operands(node: Node) -> None:
    """All in order: pending with the pause, the layout, success with the restored values."""
    with node.running():
        node.until_state("success")
        assert small(node.layout())
    first, *_, last = node.api.history
    assert (first[STATE_LABEL], first[PLUGIN], first[GFD]) == ("pending", PAUSED, PAUSED)
    assert {name: last[name] for name in OPERANDS} == OPERANDS
    assert node.states() == ["pending", "success"]
    assert node.api.deleted == ["check-x"]
    assert node.refreshes == 1
    assert [reason for reason, _ in node.api.events] == ["MigOperandsPaused", "MigConfigApplied"]
    assert not node.pause_file.exists()
    # Again with the same label: nothing is written.
    node.api.history.clear()
    with node.running() as manager:
        until(lambda: manager.state is not None)
        assert node.api.history == []


def test_a_label_that_changes_during_the_work_is_next(node: Node) -> None:
    """The first change ends, then the second begins."""

    def before(method: str, path: str) -> None:
        if path.endswith("/pods") and node.api.labels[CONFIG_LABEL] == "small":
            node.label("all-disabled")

    node.api.before = before
    with node.running():
        text = "the GPUs have the MIG config all-disabled"
        until(lambda: ("MigConfigApplied", text) in node.api.events)
    assert node.states() == ["pending", "success"] * 2
    assert "small" in node.api.events[1][1]
    assert node.layout() == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smal", 'the file has no MIG config "smal" (the nearest name is small)'),
        ("too-much", "these fit together: 2 x 3g.40gb"),
    ],
)
def test_what_cannot_be_applied_pauses_nobody(node: Node, name: str, reason: str) -> None:
    """The state is failed, an event has the reason, and the GPUs are as before."""
    before = node.layout()
    node.api.labels[CONFIG_LABEL] = name
    with node.running():
        node.until_state("failed")
        until(lambda: bool(node.api.events))
    assert [reason for reason, _ in node.api.events] == ["MigConfigFailed"]
    assert reason in node.api.events[0][1]
    assert PAUSED not in {value for labels in node.api.history for value in labels.values()}
    assert node.layout() == before


def test_nobody_is_paused_if_that_cannot_be_saved(node: Node) -> None:
    """The directory of the file cannot be made."""
    node.pause_file.parent.touch()
    with node.running():
        node.until_state("failed")
        until(lambda: bool(node.api.events))
    assert "--pause-file" in node.api.events[0][1]
    assert PAUSED not in {value for labels in node.api.history for value in labels.values()}


def test_pods_that_do_not_end_fail_the_change_and_operands_come_back(node: Node) -> None:
    """Complaint 25: no operand stays paused, no state stays pending."""
    before = node.layout()
    node.api.stay = True
    with node.running(pods_timeout_s=0.1):
        node.until_state("failed")
        until(lambda: len(node.api.events) == 2)
    assert "plugin-x" in node.api.events[1][1]
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS
    assert node.layout() == before


def test_an_instance_in_use_fails_the_change(node: Node) -> None:
    """What uses it is in the event; a failed step of NVML is undone."""
    with node.running():
        node.until_state("success")
        line = next(x for x in node.data.read_text().splitlines() if x.startswith("gpuinstance 0"))
        node.say(f"process 0 1 100 {line.split()[2]} 0")
        before = node.layout()
        node.label("all-disabled")
        node.until_state("failed")
        until(lambda: node.api.events[-1][0] == "MigConfigFailed")
        assert "in use by process 1" in node.api.events[-1][1]
        assert node.layout() == before
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS


def test_an_api_server_that_refuses_gets_the_end_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of the node in between, and errors of the server, are no obstacle."""
    monkeypatch.setattr("gpunode.mig.manager._RETRY_S", 0.05)
    refusals = {"PATCH": 0}

    def before(method: str, path: str) -> int | None:
        if method != "PATCH":
            return None
        refusals["PATCH"] += 1
        if refusals["PATCH"] % 2:
            # The version that was read is an old one now.
            node.api.set("other", str(refusals["PATCH"]))
        return 500 if refusals["PATCH"] in (3, 4) else None

    node.api.before = before
    with node.running():
        node.until_state("success")
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS
    assert small(node.layout())


def test_a_driver_that_comes_later_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is failed meanwhile, and no operand is paused."""
    monkeypatch.setattr("gpunode.mig.manager._BLOCKED_RETRY_S", 0.05)
    node.host.remove_libraries()
    with node.running():
        node.until_state("failed")
        assert len(node.api.history) == 1
        node.host.restore_libraries()
        node.until_state("success")


SYSTEMCTL = """\
#!/bin/sh
here=${0%/*}
verb=$1
while [ "$1" != -- ]; do shift; done
shift
echo "$verb $*" >> $here/calls
for one in "$@"; do
    case $verb in
    list-units) [ -e $here/$one ] && echo "$one loaded active running A service" ;;
    stop) rm $here/$one ;;
    start) touch $here/$one ;;
    esac
done
true
"""


def test_services_of_the_host_stop_for_a_change(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run, and the kubelet only for a mode; a kill does not leave them stopped."""
    programs = node.directory / "programs"
    programs.mkdir()
    (programs / "systemctl").write_text(SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in ("dcgm.service", "kubelet.service"):
        (programs / name).touch()
    clients = node.directory / "clients.yaml"
    clients.write_text(
        "version: v1\nsystemd-services: [dcgm.service, nvsm.service, kubelet.service]\n"
    )
    services = HostServices(str(clients), "/")
    with node.running(services=services):
        node.until_state("success")
        node.label("mixed")
        until(lambda: len(node.api.events) == 4)
    calls = (programs / "calls").read_text().splitlines()
    assert [call for call in calls if not call.startswith("list")] == [
        "stop dcgm.service kubelet.service",
        "start dcgm.service kubelet.service",
        "stop dcgm.service",
        "start dcgm.service",
    ]
    node.label("small")
    node.say("fault write-killed 1")
    with node.api.config(node.kubeconfig):
        assert isinstance(run_to_the_end(node, services=services), clean_forks.Killed)
        assert not (programs / "dcgm.service").exists()
        check_after_a_kill(node, services=services)
    assert (programs / "dcgm.service").exists()


def test_another_manager_is_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it may have paused is left to it."""
    monkeypatch.setattr("gpunode.mig.manager._BLOCKED_RETRY_S", 0.05)
    node.api.labels[PLUGIN] = PAUSED
    with journal.lock(str(node.directory / "state")), node.running() as manager:
        node.until_state("failed")
        until(lambda: "MIG is being changed by process" in manager.obstacle)
        assert node.api.labels[PLUGIN] == PAUSED
    with node.running():
        node.until_state("success")
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS


def test_a_mode_that_needs_a_reboot(node: Node) -> None:
    """Only if that is allowed, and once: a reboot that does not help is a failure."""
    node.say("migreset 1")
    program = node.host.root / "usr/bin/nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.unlink(missing_ok=True)
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    before = node.layout()
    with node.running():
        node.until_state("failed")
        until(lambda: "--with-reboot" in node.api.events[-1][1])
    assert node.layout() == before
    node.api.labels[STATE_LABEL] = ""
    with node.running(reboot=lambda: node.reboots.append("b1")):
        until(lambda: bool(node.reboots))
    assert node.api.labels[STATE_LABEL] == "rebooting"
    assert node.api.labels[PLUGIN] == PAUSED
    with node.running(reboot=lambda: node.reboots.append("b2"), boot_id="b2"):
        node.until_state("failed")
        until(lambda: "a reboot did not help" in node.api.events[-1][1])
    assert node.reboots == ["b1"]
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS


def test_a_reboot_completes_the_change(node: Node) -> None:
    """The operands are restored after it."""
    node.say("migreset 1")
    node.host.root.joinpath("usr/bin").mkdir(parents=True, exist_ok=True)
    reset = node.host.root / "usr/bin/nvidia-smi"
    reset.unlink(missing_ok=True)
    reset.write_text("#!/bin/sh\nexit 1\n")
    reset.chmod(0o755)
    with node.running(reboot=lambda: node.reboots.append("b1")):
        until(lambda: bool(node.reboots))
    node.data.write_text(
        re.sub(r"^migpending (.*)$", r"migmode \1", node.data.read_text(), flags=re.MULTILINE)
    )
    with node.running(boot_id="b2"):
        node.until_state("success")
    assert small(node.layout())
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS
    assert not node.pause_file.exists()


def test_operands_that_somebody_left_paused_come_back(node: Node) -> None:
    """Without a file, or with one that is damaged, and without a config."""
    node.api.labels.update({CONFIG_LABEL: "", PLUGIN: PAUSED, GFD: "false"})
    node.pause_file.parent.mkdir()
    node.pause_file.write_text("{")
    with node.running():
        until(lambda: node.api.labels[PLUGIN] == "true")
    assert node.api.labels[GFD] == "false"
    assert not node.pause_file.exists()


def run_to_the_end(node: Node, **options: Any) -> Any:
    """Run a manager in a process of its own until it says success; return None, or a Killed."""
    place = (str(node.kubeconfig), str(node.host.root), str(node.directory / "state"))

    def started(pid: int) -> None:
        node.pid = pid

    return clean_forks.call(
        mig_process.run_manager, *place, node.values(**options), started=started
    )


def test_the_requests_of_a_change_are_those_of_the_page(node: Node) -> None:
    """On a node without operands of the GPU operator."""
    for name in OPERANDS:
        del node.api.labels[name]
    requests: list[str] = []

    def before(method: str, path: str) -> None:
        requests.append(f"{method} {path.partition('?')[0].rpartition('/')[2]}")

    with node.running():
        node.until_state("success")
        until(lambda: len(node.api.events) == 1)
        node.api.before = before
        node.label("mixed")
        until(lambda: len(node.api.events) == 2)
    counts = Counter(name.replace(NODE, "nodes") for name in requests)
    cells = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    page = (Path(__file__).resolve().parents[2] / "docs/kubernetes/scale.md").read_text()
    assert f"| a change of MIG by the label | {cells} | {5000 * len(requests):,} |" in page


def check_after_a_kill(node: Node, **options: Any) -> None:
    """Start the manager again, and check that it ends the change and restores each value."""
    node.api.before = lambda *_: None
    node.forget("fault")
    assert run_to_the_end(node, **options) is None
    assert node.api.labels[STATE_LABEL] == "success"
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS
    assert not node.pause_file.exists()
    assert small(node.layout())


# Of the requests of a change: the last look before the pause, the pause itself, the list of pods,
# the look before the end, and the end, which the server takes though its client is dead.
@pytest.mark.parametrize("number", [2, 3, 6, 9, 10])
def test_a_kill_at_a_request_leaves_nothing_paused(node: Node, number: int) -> None:
    """The next start ends the change, and restores each value."""
    requests: list[str] = []

    def before(method: str, _path: str) -> None:
        requests.append(method)
        if len(requests) == number:
            until(lambda: node.pid != 0)
            os.kill(node.pid, signal.SIGKILL)

    node.api.before = before
    with node.api.config(node.kubeconfig):
        assert isinstance(run_to_the_end(node), clean_forks.Killed)
        assert (node.api.labels[PLUGIN] == PAUSED) == (3 <= number < 10)
        begun = list(requests)
        check_after_a_kill(node)
    # The numbers mean what is said above.
    assert [index for index, method in enumerate(begun, 1) if method == "PATCH"] == [
        index for index in (3, 10) if index <= number
    ]


@pytest.mark.parametrize("number", [4, 20])
def test_a_kill_at_a_change_of_nvml_leaves_nothing_paused(node: Node, number: int) -> None:
    """The journals of the engine and of the manager are both ended."""
    node.say(f"fault write-killed {number}")
    with node.api.config(node.kubeconfig):
        assert isinstance(run_to_the_end(node), clean_forks.Killed)
        assert node.api.labels[PLUGIN] == PAUSED
        check_after_a_kill(node)


PROGRAM = "import sys; from gpunode.cli.main import main; sys.argv[0] = '/x/gpu-node'; main()"


def command(node: Node, *options: str) -> list[str]:
    """Return the command line of the manager."""
    return [
        *(sys.executable, "-c", PROGRAM, "mig-manager", f"--node-name={NODE}"),
        f"--config-file={node.directory}/configs.yaml",
        f"--kubeconfig={node.kubeconfig}",
        f"--default-gpu-clients-namespace={NAMESPACE}",
        f"--nvidia-driver-root={node.host.root}",
        f"--state-directory={node.directory}/state",
        f"--pause-file={node.pause_file}",
        *options,
    ]


def agent_command(node: Node) -> list[str]:
    """Return the command line of an agent whose only service is the manager."""
    config = node.directory / "agent.yaml"
    config.write_text(
        f"""\
driver-root: {node.host.root}
services:
  mig-manager:
    node-name: {NODE}
    config-file: {node.directory}/configs.yaml
    kubeconfig: {node.kubeconfig}
    default-gpu-clients-namespace: {NAMESPACE}
    state-directory: {node.directory}/state
    pause-file: {node.pause_file}
"""
    )
    return [sys.executable, "-c", PROGRAM, "agent", f"--config={config}"]


@pytest.mark.parametrize("command_of", [command, agent_command])
def test_the_program_follows_the_label(
    node: Node, command_of: Callable[[Node], list[str]]
) -> None:
    """The watch wakes it at once; SIGTERM ends it while it waits for pods."""
    with node.api.config(node.kubeconfig):
        process = subprocess.Popen(command_of(node), stderr=subprocess.PIPE, text=True)
        try:
            node.until_state("success")
            node.api.stay = True
            node.api.set(CONFIG_LABEL, "all-disabled")
            until(lambda: node.api.labels[PLUGIN] == PAUSED)
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
        finally:
            process.kill()
            _, text = process.communicate()
    assert "Traceback" not in text
    assert node.api.labels[STATE_LABEL] == "failed"
    assert {name: node.api.labels[name] for name in OPERANDS} == OPERANDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--node-name=",), "the name of the node is empty"),
        (("--operand=a/b",), "not OPERAND or OPERAND=APP"),
        (("--with-shutdown-host-gpu-clients",), "the services to stop are not named"),
        (("--pods-timeout=soon",), 'is "soon", not a duration'),
        (("--config-file=/nonexistent",), "/nonexistent"),
        (("--kubeconfig=/nonexistent",), "cannot find the API server"),
        (("--kubeconfig=/proc/version",), '"/proc/version" is not a kubeconfig'),
        (("--node-name=a/../b",), "not the name of a node"),
    ],
)
def test_errors_of_the_command(
    node: Node, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with a hint, before anything runs."""
    with pytest.raises(GpuRuntimeError, match=re.escape(message)) as caught:
        root(command(node, *options)[3:], standalone_mode=False)
    assert caught.value.hint
    assert "Traceback" not in capsys.readouterr().err


def test_the_agent_leaves_the_manager_its_own_file(tmp_path: Path) -> None:
    """The config file of the agent is that of the device plugin."""
    path = tmp_path / "agent.yaml"
    path.write_text(
        "config-file: plugin.yaml\ndriver-root: /d\n"
        "services: {mig-manager: {config-file: m.yaml}}\n"
    )
    arguments = agent_services.arguments(agent_services.read(str(path)), "mig-manager")
    values = agent_services.context("mig-manager", arguments).params
    assert (values["config_file"], values["driver_root"]) == ("m.yaml", "/d")


def test_parts_of_commands(tmp_path: Path) -> None:
    """A program that fails is an error that says what it was for."""
    with pytest.raises(commands.CommandError, match="the reboot failed"):
        commands.run("the reboot", [str(tmp_path / "none")])


@pytest.mark.slow
@pytest.mark.system
def test_all_that_depends_on_mig_follows_a_change() -> None:
    """Layout, nodes, both CDI specs, the runtime's saved grants, units, labels and metrics."""
    results = seen.play(program=Path(__file__).with_name("mig_scenario.py"), host=["--gpus", "2"])
    assert results["status"] == 0
    # The exporter is the same process; what calls NVML was away while the mode changed.
    first, second = results["watched by"]
    assert (len(first), len(second), len({*first, *second})) == (2, 2, 3)
    before, after = results["before"], results["after"]
    mig = [f"MIG-1{instance}000000-51d2-5e0b-9f14-0b2a3c4d5e0f" for instance in (1, 2, 3)]
    uuids = [
        "GPU-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00",
        "GPU-5f1e0001-9a3c-4d27-8b60-0c1d2e3f4a01",
    ]
    assert before["units"] == {"nvidia.com/gpu": 2}
    assert after["units"] == {
        "nvidia.com/gpu": 1,
        "nvidia.com/mig-1g.10gb": 2,
        "nvidia.com/mig-3g.40gb": 1,
    }
    assert before["labels"] == {"nvidia.com/gpu.count": "2"}
    assert after["labels"] == {
        "nvidia.com/gpu.count": "2",
        "nvidia.com/mig-1g.10gb.count": "2",
        "nvidia.com/mig-3g.40gb.count": "1",
    }
    assert before["metrics"] == ["", ""]
    assert [one for one in after["metrics"] if one] == ["1g.10gb", "1g.10gb", "3g.40gb"]
    of_plugin = [f"k8s.device-plugin.nvidia.com/gpu={name}" for name in (*uuids, *mig)]
    assert set(of_plugin) <= set(after["spec of the plugin"])
    assert not set(of_plugin[2:]) & set(before["spec of the plugin"])
    of_host = [f"nvidia.com/gpu={name}" for name in ("1:0", "1:1", "1:2", *mig)]
    assert set(of_host) <= set(after["spec of the host"])
    assert "nvidia.com/gpu=1" not in after["spec of the host"]
    nodes = [seen.Seen.parse(facts["container"]).nodes for facts in (before, after)]
    caps = [[path for path in paths if "/nvidia-caps/" in path] for paths in nodes]
    # A node for each GPU instance and for each compute instance.
    assert (len(caps[0]), len(caps[1])) == (0, 6)
