# SPDX-License-Identifier: Apache-2.0
"""Build the launcher with test constants, and recorders in place of the programs it executes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuruntime import __version__

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "gpuruntime" / "launcher" / "launcher.c"
FAKES = ROOT / "tests" / "fakes" / "runtime"
TWIN = ROOT / "tests" / "launcher" / "twin.c"
START_PYTHON = "/usr/bin/python3"

WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
FREESTANDING = (
    *("-std=c11", *WARNINGS, "-Os", "-nostdlib", "-static", "-ffreestanding"),
    *("-fno-pie", "-no-pie", "-fno-stack-protector", "-fno-asynchronous-unwind-tables"),
    *("-fno-tree-loop-distribute-patterns", "-s"),
    *("-Wl,-z,noexecstack", "-Wl,-z,noseparate-code", "-Wl,--build-id=none"),
)
SANITISED = (
    *("-std=gnu11", *WARNINGS, "-g", "-O1"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
RUNTIME_NAMES = (
    *("gpu-container-runtime", "nvidia-container-runtime"),
    *("nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy"),
)
HOOK_NAMES = (
    *("gpu-cdi-hook", "gpu-container-runtime-hook", "nvidia-cdi-hook"),
    *("nvidia-container-runtime-hook", "nvidia-container-toolkit"),
)
# Each of these executes the next, so that the PID does not change.
OWN_RUN = (
    *("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c"),
    *('/usr/bin/mount -t tmpfs run /run && exec /usr/bin/env -u PWD "$@"', "sh"),
)
DEADLINE_S = 30
VERSION = __version__
CLI_PYTHON = "/cli/python"
LIBRARY = "/library"


def compile_c(source: Path, output: Path, *options: str, cc: str = "gcc") -> None:
    """Compile one C file; assert success with the output of the compiler."""
    command = [cc, *options, "-o", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def constants(**values: str) -> list[str]:
    """Return the string constants of a launcher build as compiler options."""
    return [f'-D{name}="{value}"' for name, value in values.items()]


@dataclass
class Record:
    """The output of a recording program, by part."""

    parts: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read the format that tests/fakes/runtime/recorder.c writes."""
        data = path.read_bytes()
        parts = {}
        while data:
            head, _, rest = data.partition(b"\n")
            name, length = head.removeprefix(b"@").split()
            parts[name.decode()] = rest[: int(length)]
            data = rest[int(length) + 1 :]
        return cls(parts)

    @property
    def arguments(self) -> list[bytes]:
        """Return the argument list with argv[0]."""
        return self.parts["cmdline"].split(b"\0")[:-1]

    @property
    def environment(self) -> list[bytes]:
        """Return the entries of the environment block, in order."""
        return self.parts["environ"].split(b"\0")[:-1]

    @property
    def status(self) -> dict[str, str]:
        """Return the fields of /proc/self/status."""
        lines = self.parts["status"].decode().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @property
    def descriptors(self) -> dict[int, tuple[int, int, str]]:
        """Return the open descriptors: number → position, flags and target."""
        descriptors = {}
        for line in self.parts["fds"].decode("utf-8", "surrogateescape").splitlines():
            number, position, flags, target = line.split(" ", 3)
            descriptors[int(number)] = int(position), int(flags, 8), target
        return descriptors

    @property
    def process(self) -> dict[str, int]:
        """Return the ids of the process and its parent-death signal."""
        lines = self.parts["process"].decode().splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}


@dataclass
class Outcome:
    """The result of one start: exit code, output, and records of the executed program."""

    returncode: int
    pid: int
    stdout: bytes
    stderr: bytes
    records: dict[str, Record]

    @property
    def who(self) -> str | None:
        """Return the program that the launcher executed, None for none; assert at most one."""
        assert len(self.records) <= 1, self.records.keys()
        return next(iter(self.records), None)

    @property
    def record(self) -> Record:
        """Return the record of the executed program; assert that there is one."""
        assert self.records, self.stderr.decode(errors="replace")
        return next(iter(self.records.values()))


@dataclass
class Workshop:
    """The built programs below the directory of this test session."""

    root: Path
    built: dict[str, Path] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return a path below the directory of the session."""
        return self.root / name

    def fixed(self) -> dict[str, str]:
        """Return the constants of a launcher that executes only recording programs."""
        return {
            "LIBDIR": LIBRARY,
            "PYTHON": str(self.path("python")),
            "CLI_PYTHON": CLI_PYTHON,
            "VERSION": VERSION,
            "COMPANION": str(self.path("run/launcher")),
            "REPLAY": str(self.path("run/replay")),
            "CONFIG_ROOT": str(self.path("etc")),
            "STANDARD_PATH": f"{self.path('standard')}:{self.path('standard2')}",
        }

    def compile_launcher(
        self, output: Path, *, cc: str = "gcc", extra: tuple[str, ...] = (), **changed: str
    ) -> None:
        """Compile the launcher as the Makefile does, except for its constants."""
        values = constants(**{**self.fixed(), **changed})
        compile_c(LAUNCHER, output, *FREESTANDING, *extra, *values, cc=cc)

    def build(
        self, name: str, *, sanitised: bool = False, extra: tuple[str, ...] = (), **changed: str
    ) -> Path:
        """Return a directory of links to a launcher, built once for each *name*."""
        if name not in self.built:
            directory = self.path(f"programs/{name}")
            directory.mkdir(parents=True)
            binary = directory / "launcher"
            if sanitised:
                compile_c(TWIN, binary, *SANITISED, *constants(**self.fixed()))
            else:
                self.compile_launcher(binary, extra=extra, **changed)
            for link in (*RUNTIME_NAMES, *HOOK_NAMES):
                (directory / link).symlink_to("launcher")
            self.built[name] = directory
        return self.built[name]


@dataclass
class Bench:
    """The directories, programs and records of one test."""

    workshop: Workshop

    def path(self, name: str) -> Path:
        """Return a path below the directory of the session."""
        return self.workshop.path(name)

    def records(self) -> list[Path]:
        """Return what recording programs have written."""
        return [
            Path(directory, name)
            for directory, _, names in os.walk(self.workshop.root)
            for name in names
            if name.endswith(".record")
        ]

    def put(self, name: str) -> Path:
        """Copy a recording program to *name*."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.path("recorder"), path)
        return path

    def environment(self, **changed: str) -> dict[str, str]:
        """Return an environment with the recording low-level runtimes on PATH."""
        return {"PATH": str(self.path("lowlevel")), **changed}

    def start(
        self,
        command: list[str] | list[bytes],
        *,
        habits: tuple[str, ...] = (),
        program: str | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        own_run: bool = False,
    ) -> Outcome:
        """Start *command* as a caller with *habits* does, and return the outcome with its records.

        With *own_run*, /run is an empty tmpfs that ends with the process.
        """
        for old_record in self.records():
            old_record.unlink()
        executable = program or os.fsdecode(command[0])
        with subprocess.Popen(
            [
                *(OWN_RUN if own_run else ()),
                *(str(self.path("caller")), *habits, "--", executable, *command),
            ],
            env=self.environment() if env is None else env,
            cwd=cwd or str(self.path("empty")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as child:
            try:
                stdout, stderr = child.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
        records = {
            str(path.relative_to(self.workshop.root)).removesuffix(".record"): Record.read(path)
            for path in self.records()
        }
        return Outcome(child.returncode, child.pid, stdout, stderr, records)

    def runtime(
        self,
        *arguments: str,
        build: str = "plain",
        name: str = "gpu-container-runtime",
        habits: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        cwd: str | None = None,
    ) -> Outcome:
        """Start the launcher with test constants in its runtime role."""
        program = str(self.workshop.build(build) / name)
        return self.start([program, *arguments], habits=habits, env=env, cwd=cwd)

    def hook(
        self,
        *arguments: str,
        name: str = "gpu-cdi-hook",
        habits: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Outcome:
        """Start the launcher with test constants in its hook role."""
        program = str(self.workshop.build("plain") / name)
        return self.start([program, *arguments], habits=habits, env=env)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Return the built programs of this session."""
    root = tmp_path_factory.mktemp("launcher")
    workshop = Workshop(root)
    compile_c(
        FAKES / "recorder.c", workshop.path("recorder"), "-static", "-O1", "-Wall", "-Wextra"
    )
    compile_c(FAKES / "caller.c", workshop.path("caller"), "-static", "-O1", "-Wall", "-Wextra")
    workshop.build("plain")
    return workshop


@pytest.fixture
def bench(workshop: Workshop) -> Bench:
    """Return a bench with runc and crun on PATH, without a config file and a companion."""
    for name in ("run", "etc", "standard", "standard2", "lowlevel", "other", "empty"):
        directory = workshop.path(name)
        if directory.exists():
            directory.chmod(stat.S_IRWXU)
            shutil.rmtree(directory)
        directory.mkdir(mode=0o755)
        directory.chmod(0o755)
    bench = Bench(workshop)
    for name in ("python", "lowlevel/runc", "lowlevel/crun"):
        bench.put(name)
    return bench


@pytest.fixture(scope="session")
def twin(workshop: Workshop) -> str:
    """Return the name of the build under the address and undefined-behaviour sanitisers."""
    probe = workshop.path("probe.c")
    probe.write_text("int main(void) { return 0; }\n")
    done = subprocess.run(
        ["gcc", *SANITISED, "-o", str(workshop.path("probe")), str(probe)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"gcc has no sanitiser runtime (libasan, libubsan): {done.stderr.strip()}")
    workshop.build("twin", sanitised=True)
    return "twin"


@pytest.fixture(scope="session")
def readers(twin: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory in which fuzz.replay builds its program once, with sanitisers."""
    assert twin
    return tmp_path_factory.mktemp("readers")


@pytest.fixture(scope="session")
def real(workshop: Workshop) -> Path:
    """Return the links to a launcher that starts the Python code of this tree.

    Start it only with `own_run`: it writes to /run.
    """
    return workshop.build(
        "real",
        LIBDIR=str(ROOT),
        PYTHON=START_PYTHON,
        CLI_PYTHON=sys.executable,
        COMPANION="/run/gpuruntime/launcher",
        REPLAY="/run/gpuruntime/replay",
        CONFIG_ROOT="/etc",
    )
