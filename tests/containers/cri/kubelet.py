# SPDX-License-Identifier: Apache-2.0
"""The CRI plugin of containerd, used like by a kubelet: one pod for each container.

Pods name our runtime by its handler, which `runtime configure` has added to the config.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import image
from drivers import (
    BIN,
    OURS,
    Containerd,
    FailedError,
    answers,
    daemon,
    environment,
    run,
    until,
)

from . import logs
from .client import Client, Container, Pod

SLEEP = ("/bin/busybox", "sleep", "1000")
PARENT = "/kubepods"
HANDLER = "gpuruntime"
PREFIX = "cdi.k8s.io/"
TEXT = """\
version = 2
root = "{work}/root"
state = "{work}/state"
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
stream_server_port = "0"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


class Kubelet(Containerd):
    """A private containerd, used through its CRI."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.cri = Client(self.socket)

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Run containerd, with both images imported, within the context."""
        settings = self.work / "containerd.toml"
        settings.write_text(TEXT.format(work=self.work, socket=self.socket, pause=image.PAUSE))
        run(
            *(BIN / "gpuruntime", "runtime", "configure", "--runtime", "containerd"),
            *("--config", settings, "--runtime-path", OURS, "--container-annotations", PREFIX),
            *("--state-dir", self.work / "configured"),
        )
        archives = [image.archive_in(self.work), self.work / "pause.tar"]
        image.make_archive(self.work / "image", archives[1], image.PAUSE, SLEEP)
        with daemon(self.work / "containerd.log", "containerd", "--config", settings):
            until(lambda: answers(Path(self.socket)))
            until(lambda: self.client("version", check=False).returncode == 0)
            for archive in archives:
                self.client("--namespace", "k8s.io", "images", "import", archive)
            # The CRI plugin learns of the images asynchronously.
            for name in (image.NAME, image.PAUSE):
                until(lambda name=name: self.cri.has_image(name))
            yield
        self.cri.close()

    @contextlib.contextmanager
    def pod(self, *, plain: bool = False) -> Iterator[tuple[Pod, str]]:
        """Run a pod with its sandbox within the context; *plain*: by runc."""
        self.count += 1
        name = f"pod-{self.count}"
        directory = self.work / "logs" / name
        pod = Pod(name, f"uid-{self.count}", f"{PARENT}/{name}", str(directory))
        sandbox = self.cri.run_sandbox(pod, "runc" if plain else HANDLER)
        try:
            yield pod, sandbox
        finally:
            self.cri.remove_sandbox(sandbox)
            remove_groups(pod.parent)

    @contextlib.contextmanager
    def container(
        self,
        inside: tuple[Pod, str],
        devices: str | None,
        more: Sequence[str] = (),
        *,
        command: Sequence[str] = SLEEP,
        annotations: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[str, Path]]:
        """Run a container that requests *devices* in a pod; yield its id and its log."""
        self.count += 1
        pod, sandbox = inside
        name = f"look-{self.count}"
        variables = environment(devices, more)
        container = Container(name, image.NAME, command, variables, annotations or {})
        identity = self.cri.create(sandbox, pod, container)
        try:
            self.cri.start(identity)
            yield identity, Path(pod.logs, name)
        finally:
            self.cri.remove(identity)

    def look(self, container: str, *command: str) -> str:
        """Return the output of *command*, or of the probe, in *container*."""
        status, output, errors = self.cri.execute(container, command or image.LOOK)
        if status != 0:
            raise FailedError(f"exec {command}: status {status}\n{output}{errors}")
        return output

    def run(self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()) -> str:
        """Return the output of the probe as the container of a pod."""
        with (
            self.pod(plain=plain) as pod,
            self.container(pod, devices, more, command=image.LOOK) as (container, log),
        ):
            until(lambda: self.cri.has_exited(container))
            return logs.output(log)

    def config(self, container: str) -> dict[str, Any]:
        """Return the current config.json of *container*."""
        path = self.work / "state/io.containerd.runtime.v2.task/k8s.io" / container
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        return config


def remove_groups(name: str) -> None:
    """Remove the cgroup *name* of a pod, as kubelets do."""
    for group in Path("/sys/fs/cgroup").glob(f"*{name}"):
        group.rmdir()
