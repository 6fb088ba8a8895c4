# SPDX-License-Identifier: Apache-2.0
"""The calls of CRI-O, with a config.json as it writes it; conmon is real.

This distribution has no package of CRI-O. CRI-O starts a conmon for each container, which creates
the container by the runtime; CRI-O then starts it, and conmon writes its exit status to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import image
from drivers import (
    CAPABILITY,
    DEADLINE_S,
    OURS,
    FailedError,
    environment,
    proc_driver_hook,
    run,
    until,
)

from . import crio_config, logs

# The first byte of each packet on the attach socket.
STDOUT, STDERR = 2, 3
PACKET = 8193


class Crio:
    """Pods of one container each; files pin the namespaces of their sandboxes.

    *plain* containers are created by *lowlevel*.
    """

    def __init__(self, work: Path, lowlevel: str = "runc") -> None:
        self.work = work
        self.lowlevel = lowlevel
        self.count = 0
        self.userland = image.make_root(work / "userland")
        for name in ("exits", "attach", "logs", "persist", "ns", "storage"):
            (work / name).mkdir()
        # A hook as in hooks.d.
        self.hook = proc_driver_hook()

    def run(self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()) -> str:
        """Return the output of the probe in a container that requests *devices*."""
        self.count += 1
        name = f"{self.count:064x}"
        program = shutil.which(self.lowlevel) if plain else OURS
        with self._sandbox(name) as namespaces, self._root(name) as root:
            bundle = self.work / "storage" / name / "userdata"
            config = crio_config.container(
                name,
                root,
                bundle,
                args=image.LOOK,
                env=[image.PATH, *environment(devices, more)],
                capability=CAPABILITY,
                namespaces=namespaces,
            )
            config["hooks"] = {"createRuntime": [{"path": self.hook, "args": ["fakeproc"]}]}
            (bundle / "config.json").write_text(json.dumps(config))
            return self._live(str(program), name, bundle)

    def _live(self, program: str, name: str, bundle: Path) -> str:
        """Create, start and delete the container, and return its output."""
        log = self.work / "logs" / name
        with self._monitor(program, name, bundle, log) as attached:
            run(program, *self._words(), "start", name)
            output = _read(attached)
            exits = self.work / "exits" / name
            until(exits.exists)
            status = exits.read_text()
        run(program, *self._words(), "delete", name)
        exits.unlink()
        if status != "0":
            raise FailedError(f"container: status {status}\n{log.read_text()}")
        if logs.output(log) != output:
            raise FailedError(f"the output of the attach socket differs from the log\n{output}")
        return output

    def _words(self) -> tuple[str, ...]:
        return (f"--root={self.work}/runtime",)

    @contextlib.contextmanager
    def _monitor(
        self, program: str, name: str, bundle: Path, log: Path
    ) -> Iterator[socket.socket]:
        """Run a conmon that creates the container, and yield a connection to its output."""
        sync_read, sync_write = os.pipe()
        start_read, start_write = os.pipe()
        command = [
            *("conmon", "-b", bundle, "-c", name, "--exit-dir", self.work / "exits"),
            *("-l", log, "--log-level", "warning", "-n", f"k8s_look_{self.count}"),
            *("-P", bundle / "conmon-pidfile", "-p", bundle / "pidfile"),
            *("--persist-dir", self.work / "persist", "-r", program),
            *(f"--runtime-arg={word}" for word in self._words()),
            *("--socket-dir-path", self.work / "attach", "--sync", "-u", name),
        ]
        with subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(sync_write, start_read),
            env={
                "PATH": os.environ["PATH"],
                "_OCI_SYNCPIPE": str(sync_write),
                "_OCI_STARTPIPE": str(start_read),
            },
        ) as process:
            os.close(sync_write)
            os.close(start_read)
            os.write(start_write, b"\0")
            os.close(start_write)
            with open(sync_read) as stream:
                report = json.loads(stream.readline() or '{"pid": -1, "message": "no report"}')
            if report["pid"] <= 0:
                process.kill()
                raise FailedError(f"conmon: {report.get('message')}\n{process.stderr.read()}")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attached:
                attached.settimeout(DEADLINE_S)
                attached.connect(str(self.work / "attach" / name / "attach"))
                yield attached
            process.wait(DEADLINE_S)

    @contextlib.contextmanager
    def _sandbox(self, name: str) -> Iterator[dict[str, Path]]:
        """Create namespaces pinned by files, as pinns of CRI-O does; yield kind → file."""
        files = {kind: self.work / "ns" / f"{kind}-{name}" for kind in ("ipc", "uts", "net")}
        for file in files.values():
            file.touch()
        run("unshare", *(f"--{kind}={file}" for kind, file in files.items()), "true")
        try:
            yield files
        finally:
            for file in files.values():
                run("umount", file)
                file.unlink()

    @contextlib.contextmanager
    def _root(self, name: str) -> Iterator[Path]:
        """Mount the image as containers/storage does, outside the bundle."""
        place = self.work / "storage" / name
        for part in ("diff", "work", "merged", "userdata"):
            (place / part).mkdir(parents=True)
        merged = place / "merged"
        layers = f"lowerdir={self.userland},upperdir={place}/diff,workdir={place}/work"
        run("mount", "-t", "overlay", "overlay", "-o", layers, merged)
        try:
            yield merged
        finally:
            run("umount", merged)
            shutil.rmtree(place)


def _read(attached: socket.socket) -> str:
    """Return the output of the container until its end."""
    output = {STDOUT: b"", STDERR: b""}
    while packet := attached.recv(PACKET):
        output[packet[0]] += packet[1:]
    return output[STDOUT].decode()
