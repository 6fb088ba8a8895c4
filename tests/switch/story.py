# SPDX-License-Identifier: Apache-2.0
"""`story.py story`: on the simulated host, switch a node from the incumbent to us and back.

Prints one JSON object, as scenario.py of tests/containers. Engines read their usual files below
/etc of the simulated host; their sockets and their state are below WORK.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "containers"))

import image
import node
from cri.client import Pod
from cri.crio import Crio
from cri.kubelet import PARENT, SLEEP, Kubelet, remove_groups
from drivers import (
    TREE,
    Bundle,
    Docker,
    FailedError,
    Podman,
    answers,
    daemon,
    environment,
    run,
    until,
)
from scenario import WORK, main, without_unified

STATE = WORK / "records"
CALLS = WORK / "calls"
DEVICES = "1,3"
PAGE = TREE / "docs" / "switch.md"
REFUSED = "was not installed by us"
# Not on the page: a containerd with another config.
VERSION_3 = ("runtime", "configure", "--runtime=containerd", f"--config={node.CONTAINERD_3}")
# Option forms that the tool of the incumbent accepts.
GENERATE = ("cdi", "generate", "-format=json", "-device-id", "0", "--no-all-device=true")

Way = Callable[[], str]


class NodeDocker(Docker):
    """A dockerd that reads the daemon.json of the node."""

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Run dockerd, with the image loaded, within the context."""
        command = [
            *("dockerd", "-H", self.socket, "--data-root", self.work / "data"),
            *("--exec-root", self.work / "exec", "--pidfile", self.work / "docker.pid"),
            *("--iptables=false", "--ip6tables=false", "--bridge=none"),
            "--storage-driver=overlay2",
        ]
        with daemon(self.work / "dockerd.log", *command):
            until(lambda: answers(self.listens))
            until(lambda: self.client("version", check=False).returncode == 0)
            self.client("load", "--input", image.archive_in(self.work))
            yield

    def by(self, runtime: str, devices: str | None, *words: str) -> str:
        """Return the output of the probe in a container of *runtime*; "" is the default."""
        request = [] if devices is None else [f"NVIDIA_VISIBLE_DEVICES={devices}"]
        variables = [word for entry in request for word in ("--env", entry)]
        named = [f"--runtime={runtime}"] if runtime else []
        return self.client(
            *("run", "--rm", "--network=none", *named, *variables, *words),
            *(image.NAME, *image.LOOK),
        ).stdout

    @contextlib.contextmanager
    def running_on(self) -> Iterator[str]:
        """Run a container of the runtime `nvidia` within the context; return its name."""
        sleep = (image.NAME, "/bin/busybox", "sleep", "1000")
        name = "runs-on"
        self.client("run", "-d", "--network=none", "--runtime=nvidia", "--name", name, *sleep)
        yield name
        # Each command uses the runtime that is configured now.
        self.client("stop", "-t", "0", name)
        self.client("start", name)
        self.client("rm", "-f", name)


class NodeKubelet(Kubelet):
    """A containerd that reads the config.toml of the node; its pods use the runtime *handler*."""

    handler = ""

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Run containerd, with both images imported, within the context."""
        archives = [image.archive_in(self.work), self.work / "pause.tar"]
        if not archives[1].exists():
            image.make_archive(self.work / "image", archives[1], image.PAUSE, SLEEP)
        with daemon(self.work / "containerd.log", "containerd", "--config", node.CONTAINERD):
            until(lambda: answers(Path(self.socket)))
            until(lambda: self.client("version", check=False).returncode == 0)
            for archive in archives:
                self.client("--namespace", "k8s.io", "images", "import", archive)
            self.client("images", "import", archives[0])
            for name in (image.NAME, image.PAUSE):
                until(lambda name=name: self.cri.has_image(name))
            yield

    @contextlib.contextmanager
    def pod(self, *, plain: bool = False) -> Iterator[tuple[Pod, str]]:
        """Run a pod with its sandbox, by `handler`, within the context."""
        del plain
        self.count += 1
        name = f"pod-{self.count}"
        logs = str(self.work / "logs" / name)
        pod = Pod(name, f"uid-{self.count}", f"{PARENT}/{name}", logs)
        sandbox = self.cri.run_sandbox(pod, self.handler)
        try:
            yield pod, sandbox
        finally:
            self.cri.remove_sandbox(sandbox)
            remove_groups(pod.parent)

    def by(self, handler: str) -> str:
        """Return the output of the probe in a pod of the runtime *handler*."""
        self.handler = handler
        return self.run(DEVICES)

    def ctr(self, program: Path) -> str:
        """Return the output of the probe in a container that ctr runs by *program*."""
        self.count += 1
        variables = [word for entry in environment(DEVICES) for word in ("--env", entry)]
        return self.client(
            *("run", "--rm", "--runc-binary", program, "--cap-add", "CAP_MKNOD", *variables),
            *(image.NAME, f"look-{self.count}", *image.LOOK),
        ).stdout


class OldHooks(Bundle):
    """Bundles with the hooks of an old spec, and an image that sets LD_PRELOAD for hooks.

    runc before 1.3 gives such hooks the environment of the image. The library leaves a mark.
    """

    def __init__(self, work: Path, program: Path) -> None:
        super().__init__(work)
        self.program = program
        self.mark = work / "mark"
        self.library = work / "mark.so"
        run(
            *("gcc", "-shared", "-fPIC", "-Wall", "-Wextra", f'-DMARK="{self.mark}"'),
            *("-o", self.library, TREE / "tests" / "scenarios" / "marker.c"),
        )

    def case(self) -> dict[str, Any]:
        """Start a container by runc alone; return its result, and whether the mark exists."""
        done = self.create(None, plain=True, more=["LD_PRELOAD=/proc/self/cwd/mark.so"])
        link = self.last / "rootfs" / node.LIBRARIES[1:] / "libcuda.so"
        return {
            "status": done.returncode,
            "error": done.stderr,
            "marked": self.mark.exists(),
            "link": os.readlink(link) if link.is_symlink() else "",
        }

    def _make(self, env: list[str]) -> Path:
        self.last = super()._make(env)
        shutil.copy(self.library, self.last / "rootfs" / "mark.so")
        path = self.last / "config.json"
        config = json.loads(path.read_text())
        old_hooks = [
            {name: value for name, value in hook.items() if name != "hookName"}
            for hook in node.hooks(self.program, env=False)
        ]
        config["hooks"]["createContainer"] = old_hooks
        path.write_text(json.dumps(config))
        return self.last


class Node:
    """The node, its engines, and the results of each step."""

    def __init__(self) -> None:
        self.files = node.write(WORK / "containerd", image.PAUSE)
        self.docker = NodeDocker(place("docker"))
        self.kubelet = NodeKubelet(place("containerd"))
        self.podman = Podman(place("podman"))
        self.crio = Crio(place("crio"))
        self.steps: dict[str, Any] = {}
        self.digests = {"before": node.digests(self.files)}
        self.containerd_2: dict[str, dict[str, str] | None] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the engines that are daemons within the context."""
        with self.docker.started(), self.kubelet.started():
            yield

    def step(self, name: str, ways: dict[str, Way]) -> None:
        """Start a container in each of *ways*, and record its result."""
        results = {}
        for way, start in ways.items():
            CALLS.unlink(missing_ok=True)
            try:
                result = {"output": start()}
            except FailedError as error:
                result = {"error": str(error)}
            calls = CALLS.read_text().split() if CALLS.exists() else []
            results[way] = {**result, "stand-ins": len(calls)}
        self.steps[name] = results
        self.digests[name] = node.digests(self.files)
        self.containerd_2[name] = runtimes_of_containerd_2()

    def incumbent_ways(self) -> dict[str, Way]:
        """Return the ways in which this node starts containers by the names of the incumbent."""
        docker, kubelet = self.docker, self.kubelet
        return {
            "docker run --runtime nvidia": lambda: docker.by("nvidia", DEVICES),
            "docker run --runtime nvidia --gpus": lambda: docker.by(
                "nvidia", None, "--gpus", f'"device={DEVICES}"'
            ),
            "docker run --runtime nvidia, an old spec": lambda: docker.by(
                "nvidia", ",".join(f"{node.OLD_KIND}={gpu}" for gpu in DEVICES.split(","))
            ),
            "docker run --runtime nvidia-cdi": lambda: docker.by("nvidia-cdi", DEVICES),
            "docker run --runtime nvidia-legacy": lambda: docker.by("nvidia-legacy", DEVICES),
            "a pod of RuntimeClass nvidia": lambda: kubelet.by("nvidia"),
            "ctr run --runc-binary": lambda: kubelet.ctr(node.PROGRAMS / node.RUNTIME),
            "a pod of CRI-O": lambda: self.by_crio(node.CRIO_DROP_IN, "nvidia"),
            "podman run --device": lambda: self.by_podman(device=node.KIND),
            "podman run --device, an old spec": lambda: self.by_podman(device=node.OLD_KIND),
            "podman run --runtime nvidia": lambda: self.by_podman("nvidia"),
        }

    def repeated(self, names: Collection[str]) -> dict[str, Way]:
        """Return those of the incumbent's ways that *names* contains."""
        return {name: way for name, way in self.incumbent_ways().items() if name in names}

    def our_ways(self) -> dict[str, Way]:
        """Return the ways by our own names, for engines that are configured for them."""
        docker, kubelet = self.docker, self.kubelet
        drop_in = node.CRIO_DROP_IN.with_name("99-gpuruntime.toml")
        return {
            "docker run --runtime gpuruntime": lambda: docker.by("gpuruntime", DEVICES),
            "docker run --gpus": lambda: docker.by("", None, "--gpus", f'"device={DEVICES}"'),
            "a pod of RuntimeClass gpuruntime": lambda: kubelet.by("gpuruntime"),
            "a pod of CRI-O, gpuruntime": lambda: self.by_crio(drop_in, "gpuruntime"),
            "podman run --runtime gpuruntime": lambda: self.by_podman("gpuruntime"),
        }

    def by_crio(self, drop_in: Path, name: str) -> str:
        """Return the output of the probe in a container of the runtime *name* in *drop_in*."""
        document = tomllib.loads(drop_in.read_text())
        program = document["crio"]["runtime"]["runtimes"][name]["runtime_path"]
        self.crio.lowlevel = program
        return self.crio.run(DEVICES, plain=True)

    def by_podman(self, runtime: str = "", *, device: str = "") -> str:
        """Return the output of the probe in a container of *runtime*, or with the CDI *device*."""
        words = self.podman.words(None)
        if device:
            words += [
                word for gpu in DEVICES.split(",") for word in ("--device", f"{device}={gpu}")
            ]
        else:
            words += ["--env", f"NVIDIA_VISIBLE_DEVICES={DEVICES}"]
        named = ["--runtime", runtime] if runtime else []
        return self.podman.client(*named, "run", "--rm", *words, image.NAME, *image.LOOK).stdout


def place(name: str) -> Path:
    """Create and return the state directory of an engine."""
    path = WORK / name
    path.mkdir()
    return path


def runtimes_of_containerd_2() -> dict[str, str] | None:
    """Return name → program of the runtimes of containerd 2; None if it is not installed.

    It reads the version 3 config of the node. `make test-newer-engines` installs it.
    """
    root = TREE / "build" / "newer-engines" / "sid" / "root"
    loaders = [*root.glob("usr/lib64/ld-linux-*.so.2"), *root.glob("usr/lib/ld-linux-*.so.1")]
    if not loaders:
        return None
    libraries = f"{root}{node.LIBRARIES}"
    program = root / "usr/bin/containerd"
    words = ("--library-path", libraries, program, "--config", node.CONTAINERD_3)
    document = tomllib.loads(run(loaders[0], *words, "config", "dump").stdout)
    runtimes = document["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
    return {name: table["options"].get("BinaryName", "") for name, table in runtimes.items()}


def follow(section: str) -> list[dict[str, str]]:
    """Run the commands in *section* of the page; return each command and its output."""
    (text,) = re.findall(rf"(?ms)^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text())
    done = []
    for block in re.findall(r"(?s)```console\n(.*?)```", text):
        for part in block.split("$ ")[1:]:
            command, _, expected = part.partition("\n")
            if command.startswith("make install") and REFUSED not in expected:
                node.remove_stand_ins()
            output = run("sh", "-c", f"{command} 2>&1", cwd=TREE, check=False).stdout
            done.append({"command": command, "expected": expected, "said": output})
    return done


def call(program: str, *words: str, check: bool = True) -> dict[str, Any]:
    """Return the result of the installed *program*."""
    done = run(node.PROGRAMS / program, *words, check=check)
    return {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def story(*again: str) -> dict[str, Any]:
    """Switch from the incumbent to us, also by our own names, and back.

    *again*: the ways of the incumbent that are repeated beside our own names and after the switch
    back.
    """
    without_unified()
    # The variables of an outer make must not reach the commands of the page.
    for name in [name for name in os.environ if name.startswith("MAKE")]:
        del os.environ[name]
    os.environ |= {"PYTHON": sys.executable, "GPURUNTIME_STATE_DIRECTORY": str(STATE)}
    results: dict[str, Any] = {"page": {}}
    node.put_stand_ins(CALLS)
    test_node = Node()
    with test_node.running():
        test_node.podman.client("load", "--input", image.archive_in(test_node.podman.work))
        test_node.step("incumbent", test_node.incumbent_ways())
        # After the engines have created their own files below /etc.
        before = node.tree("/usr", "/etc")
        with test_node.docker.running_on() as container:
            results["page"]["Switch"] = follow("Switch")
            results["runs on"] = test_node.docker.client("exec", container, *image.LOOK).stdout
        test_node.step("switched", test_node.incumbent_ways())
        results["by runc"] = test_node.docker.by("runc", None, "--gpus", f'"device={DEVICES}"')
    results["old hooks"] = OldHooks(place("old"), node.PROGRAMS / "nvidia-ctk").case()
    # The command line instead of the hook program: an image can influence it.
    weak = Path("/usr/lib/gpuruntime/nvidia-ctk")
    results["weak hooks"] = OldHooks(place("weak"), weak).case()
    results["told"] = tool_results()
    results["page"]["Our own names"] = follow("Our own names beside them")
    call("gpuruntime", *VERSION_3)
    with test_node.running():
        test_node.step("by our names", {**test_node.our_ways(), **test_node.repeated(again)})
    call("gpuruntime", *VERSION_3, "--undo")
    results["page"]["Switch back"] = follow("Switch back")
    results["records left"] = STATE.exists()
    node.put_stand_ins(CALLS)
    with test_node.running():
        test_node.step("switched back", test_node.repeated(again))
    results["left"] = difference(before, node.tree("/usr", "/etc"))
    return {
        **results,
        "steps": test_node.steps,
        "digests": test_node.digests,
        "containerd 2": test_node.containerd_2,
    }


def tool_results() -> dict[str, Any]:
    """Return the results of the programs by the names of the incumbent."""
    results: dict[str, Any] = {
        "runtime version": call(node.RUNTIME, "--version"),
        "hook version": call(f"{node.RUNTIME}-hook", "-version"),
        "quiet": call("nvidia-ctk", "--quiet", "config", f"--config-file={node.CONFIG}"),
        "list": call("nvidia-ctk", "cdi", "list"),
        "generate": call("nvidia-ctk", *GENERATE),
        "generate as of old": call("nvidia-ctk", *GENERATE, "--nvidia-ctk-path=nvidia-ctk"),
    }
    # Engines that the incumbent configured are configured.
    for engine in ("docker", "containerd", "crio"):
        words = ("runtime", "configure", "--runtime", engine, "--check")
        results[f"check {engine}"] = call("nvidia-ctk", *words, check=False)
    return results


def difference(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the differences between *before* and *after*."""
    return sorted(
        f"{path} {before.get(path)} {after.get(path)}"
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    )


if __name__ == "__main__":
    main({"story": story})
