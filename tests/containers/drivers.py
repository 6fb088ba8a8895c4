# SPDX-License-Identifier: Apache-2.0
"""One class for each engine: run containers by a private daemon, with and without our runtime.

Everything runs on the simulated host and ends with it. `plain` is the engine with runc or crun
alone, the control that our runtime is compared with.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

sys.path.append(str(Path(__file__).parents[1] / "simhost"))
import artefacts
import fakeproc
import image

TREE = Path(__file__).resolve().parents[2]
BIN = TREE / ".venv" / "bin"
OURS = str(BIN / "gpu-container-runtime")
CAPABILITY = "CAP_MKNOD"
# Environment variables that the user of the container sets.
USERS = ("MINE=kept", "EMPTY=", "CUDA_MODULE_LOADING=LAZY")
DEADLINE_S = 30.0
# The unprivileged user who runs rootless engines, and the first mapped id.
USER, FIRST_ID = 2000, 100000


class FailedError(Exception):
    """A command that had to succeed failed."""


def run(*command: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run *command* and return it with its output; raise FailedError if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        text=True,
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=60,
        **options,
    )
    if check and done.returncode != 0:
        raise FailedError(
            f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done


def until(holds: Callable[[], bool]) -> None:
    """Wait until *holds* returns true; raise FailedError after DEADLINE_S."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > end:
            raise FailedError(f"{holds}: still false after {DEADLINE_S} s")
        time.sleep(0.02)


@contextlib.contextmanager
def daemon(log: Path, *command: object) -> Iterator[None]:
    """Run a daemon within the context; print the end of its log after a FailedError."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=stream, stderr=stream, stdin=subprocess.DEVNULL
        )
    try:
        yield
    except FailedError:
        sys.stderr.write(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def proc_driver_hook() -> str:
    """Return the path of the hook that mounts /proc/driver, as a kernel driver shows it."""
    return str(artefacts.fakeproc_hook())


def has_ended(pid: int) -> bool:
    """Return whether the process *pid* has exited, also if its parent has not waited for it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def answers(socket_path: Path) -> bool:
    """Return whether a daemon listens on the socket *socket_path*."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(socket_path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _process_names() -> Iterator[str]:
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield (directory / "comm").read_text().strip()


def environment(devices: str | None, more: Sequence[str] = ()) -> list[str]:
    """Return the environment of a container that requests *devices*, with *more* variables."""
    variables = [] if devices is None else [f"NVIDIA_VISIBLE_DEVICES={devices}"]
    return [*USERS, *more, *variables]


class Bundle:
    """runc or crun without an engine, on bundles with a /proc/driver as of a real driver.

    *prestart* are the prestart hooks that an engine adds; *program* is the runtime in front.
    """

    def __init__(self, work: Path, lowlevel: str = "runc", program: str = OURS) -> None:
        self.work = work
        self.program = program
        self.lowlevel = lowlevel
        self.count = 0
        self.prestart: list[dict[str, Any]] = []

    def run(self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()) -> str:
        """Return the output of the probe in a container that requests *devices*."""
        done = self.create(devices, plain=plain, more=more)
        if done.returncode != 0:
            raise FailedError(f"create: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def create(
        self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Make a bundle, create its container and, if that works, run and delete it.

        Returns the completed create, with the output of the container.
        """
        self.count += 1
        bundle = self._make(environment(devices, more))
        program = self.lowlevel if plain else self.program
        name = f"look-{self.count}"
        out = bundle / "output"
        errors = bundle / "errors"
        with out.open("w") as stdout, errors.open("w") as stderr:
            pid_file = bundle / "pid"
            command = [program, "create", "--bundle", str(bundle), "--pid-file", str(pid_file)]
            command.append(name)
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                timeout=60,
                check=False,
            )
        if done.returncode == 0:
            run(program, "start", name)
            pid = int(pid_file.read_text())
            until(lambda: has_ended(pid))
            # A start of the runtime costs more than all other polls together.
            until(lambda: self._has_stopped(program, name))
            run(program, "delete", name)
        status = done.returncode
        return subprocess.CompletedProcess(command, status, out.read_text(), errors.read_text())

    def _has_stopped(self, program: str, name: str) -> bool:
        state = json.loads(run(program, "state", name).stdout)
        return bool(state["status"] == "stopped")

    def _make(self, env: list[str]) -> Path:
        userland = self.work / "userland"
        if not userland.exists():
            image.make_root(userland)
            run("runc", "spec", "--bundle", self.work)
        bundle = self.work / f"bundle-{self.count}"
        shutil.copytree(userland, bundle / "rootfs", symlinks=True)
        path = bundle / "config.json"
        config = json.loads((self.work / "config.json").read_text())
        process = config["process"]
        process["terminal"] = False
        process["args"] = list(image.LOOK)
        process["env"] = [image.PATH, *env]
        config["root"]["readonly"] = False
        for capabilities in process["capabilities"].values():
            capabilities.append(CAPABILITY)
        if self.prestart:
            config["hooks"] = {"prestart": self.prestart}
        path.write_text(json.dumps(config))
        fakeproc.add(bundle)
        return bundle


class Docker:
    """A private dockerd with our runtime configured by path, as an administrator does."""

    settings: ClassVar[dict[str, Any]] = {"runtimes": {"gpuruntime": {"path": OURS}}}

    def __init__(self, work: Path) -> None:
        self.work = work
        self.listens = work / "docker.sock"
        self.socket = f"unix://{self.listens}"
        # Further options of dockerd.
        self.options: list[str] = []

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Run dockerd, with the image loaded, within the context."""
        settings = self.work / "daemon.json"
        settings.write_text(json.dumps(self.settings))
        command = [
            *("dockerd", "--config-file", settings, "-H", self.socket),
            *("--data-root", self.work / "data", "--exec-root", self.work / "exec"),
            *("--pidfile", self.work / "docker.pid", "--iptables=false", "--ip6tables=false"),
            *("--bridge=none", "--storage-driver=overlay2", *self.options),
        ]
        archive = image.archive_in(self.work)
        with daemon(self.work / "dockerd.log", *command):
            until(lambda: answers(self.listens))
            until(lambda: self.client("version", check=False).returncode == 0)
            self.client("load", "--input", archive)
            yield

    def client(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the docker client with *words*."""
        return run("docker", "-H", self.socket, *words, check=check)

    def words(
        self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()
    ) -> list[str]:
        """Return the options of `docker run` for a container that requests *devices*."""
        runtime = "runc" if plain else "gpuruntime"
        variables = [word for entry in environment(devices, more) for word in ("--env", entry)]
        return ["--network=none", "--hostname=box", f"--runtime={runtime}", *variables]

    def run(self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()) -> str:
        """Return the output of the probe in a container that requests *devices*."""
        words = self.words(devices, plain=plain, more=more)
        return self.client("run", "--rm", *words, image.NAME, *image.LOOK).stdout


class Containerd:
    """A private containerd, used through ctr."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.socket = f"{work}/containerd.sock"
        self.count = 0

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Run containerd, with the image imported, within the context."""
        settings = self.work / "containerd.toml"
        settings.write_text(
            f'version = 2\nroot = "{self.work}/root"\nstate = "{self.work}/state"\n'
            'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
            f'[grpc]\naddress = "{self.socket}"\n'
        )
        archive = image.archive_in(self.work)
        with daemon(self.work / "containerd.log", "containerd", "--config", settings):
            until(lambda: answers(Path(self.socket)))
            until(lambda: self.client("version", check=False).returncode == 0)
            self.client("images", "import", archive)
            yield

    def client(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ctr with *words*."""
        return run("ctr", "--address", self.socket, *words, check=check)

    def run(self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()) -> str:
        """Return the output of the probe in a container that requests *devices*."""
        self.count += 1
        variables = [word for entry in environment(devices, more) for word in ("--env", entry)]
        return self.client(
            *("run", "--rm", "--runc-binary", "runc" if plain else OURS),
            *("--cap-add", CAPABILITY, *variables),
            *(image.NAME, f"look-{self.count}", *image.LOOK),
        ).stdout


class Podman:
    """podman, which reads the CDI spec itself; only the hook is ours.

    *proc_driver*: its containers have /proc/driver.
    """

    def __init__(self, work: Path, *, proc_driver: bool = True) -> None:
        self.work = work
        # The command that runs podman, and options other than those for its directories.
        self.before: list[str] = []
        self.options = ["--storage-driver=overlay"]
        hooks = work / "hooks"
        hooks.mkdir()
        if not proc_driver:
            return
        # A kernel driver adds its entries to the /proc of every container.
        hook = {
            "version": "1.0.0",
            "hook": {"path": proc_driver_hook(), "args": ["fakeproc"]},
            "when": {"always": True},
            "stages": ["createRuntime"],
        }
        (hooks / "fakeproc.json").write_text(json.dumps(hook))

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Load the image."""
        self.client("load", "--input", image.archive_in(self.work))
        yield

    def client(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run podman with *words*."""
        return run(
            *(*self.before, "podman"),
            *("--root", self.work / "storage", "--runroot", self.work / "runroot"),
            *("--tmpdir", self.work / "tmp", *self.options),
            *("--cgroup-manager=cgroupfs", "--events-backend=none"),
            *("--hooks-dir", self.work / "hooks", *words),
            check=check,
        )

    def settle(self) -> None:
        """Wait for the processes that podman leaves running when `run --rm` returns."""
        until(lambda: not any(name in ("conmon", "podman") for name in _process_names()))

    def words(self, devices: str | None) -> list[str]:
        """Return the options of `podman run` for a container that requests *devices*."""
        names = [] if devices is None else devices.split(",")
        return [
            *("--network=none", "--hostname=box", "--pull=never"),
            *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"),
            *("--cap-add", CAPABILITY),
            *(word for entry in USERS for word in ("--env", entry)),
            *(word for name in names for word in ("--device", f"nvidia.com/gpu={name}")),
        ]

    def run(self, devices: str | None, *, plain: bool = False) -> str:
        """Return the output of the probe in a container; it requests *devices* unless *plain*."""
        words = self.words(None if plain else devices)
        output = self.client("run", "--rm", *words, image.NAME, *image.LOOK).stdout
        self.settle()
        return output


class RuntimePodman(Podman):
    """podman with our runtime; its containers request devices by their environment."""

    def run(self, devices: str | None, *, plain: bool = False, more: Sequence[str] = ()) -> str:
        """Return the output of the probe in a container that requests *devices*."""
        runtime = "crun" if plain else OURS
        own = environment(devices, more)[len(USERS) :]
        variables = [word for entry in own for word in ("--env", entry)]
        words = ["--rm", *self.words(None), *variables, image.NAME, *image.LOOK]
        output = self.client("--runtime", runtime, "run", *words).stdout
        self.settle()
        return output


def make_rootless(engine: Podman) -> None:
    """Make *engine*, before its start, run as an unprivileged user with subordinate ids."""
    for name, line in {
        "passwd": f"lab:x:{USER}:{USER}::{engine.work}:/bin/sh",
        "group": f"lab:x:{USER}:",
        "subuid": f"lab:{FIRST_ID}:65536",
        "subgid": f"lab:{FIRST_ID}:65536",
    }.items():
        with Path("/etc", name).open("a") as stream:
            stream.write(f"{line}\n")
    run("chown", "-R", f"{USER}:{USER}", engine.work)
    variables = (f"HOME={engine.work}", f"XDG_RUNTIME_DIR={engine.work}/run")
    user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
    engine.before = [*user, "env", "-i", "-C", "/", *variables, f"PATH={os.environ['PATH']}"]
    # Overlays need root or FUSE.
    engine.options = ["--storage-driver=vfs"]


def open_to_others(*directories: Path) -> None:
    """Make *directories* accessible to every user, even below a private home directory.

    Each parent that only its owner may enter is covered by a tmpfs with these directories alone.
    """
    below: dict[Path, dict[Path, int]] = {}
    for directory in directories:
        for parent in reversed(directory.parents):
            if not parent.stat().st_mode & stat.S_IXOTH:
                held = os.open(directory, os.O_PATH | os.O_CLOEXEC)
                below.setdefault(parent, {})[directory] = held
                break
    for parent, held in below.items():
        run("mount", "-t", "tmpfs", "-o", "mode=755", "open", parent)
        for directory, descriptor in held.items():
            directory.mkdir(parents=True, exist_ok=True)
            source = f"/proc/self/fd/{descriptor}"
            # By descriptor: the tmpfs covers the path.
            run("mount", "-c", "--rbind", source, directory, pass_fds=[descriptor])
            os.close(descriptor)
