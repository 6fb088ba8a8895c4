# SPDX-License-Identifier: Apache-2.0
"""Create again what was created before: whether it is the same, and what it costs.

For the simulated host. Prints one JSON object. "cases": request → what came of the first create
and of the second. "counts": what → instructions up to the exec of a low-level runtime that is no
program, for counting ends at an exec that succeeds; of a hook, up to its first operation. "calls":
what → system calls of all its processes, with "files", the number of mounts in that container.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import scenario

sys.path.append(str(scenario.TREE / "tests"))
import start_code

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c")
RUN = Path("/run/gpuruntime")
READY = RUN / "ready.json"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
SETTLED_S = 1.2
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
# Name → mode, environment, and whether the second create is given what the first one was.
CASES: dict[str, tuple[str, list[str], bool]] = {
    "all": ("auto", [f"{VISIBLE}=all"], True),
    "two": ("auto", [f"{VISIBLE}=1,3"], True),
    "driver only": ("auto", [f"{VISIBLE}=none"], True),
    "all capabilities": ("auto", [f"{VISIBLE}=0", f"{CAPABILITIES}=all"], True),
    "unknown capability": ("auto", [f"{VISIBLE}=0", f"{CAPABILITIES}=utility,flying"], True),
    "requirement": ("auto", [f"{VISIBLE}=0", "NVIDIA_REQUIRE_CUDA=cuda>=11.0"], True),
    # The driver is asked for it each time.
    "MIG device": ("auto", [f"{VISIBLE}=7:0"], False),
    "legacy": ("legacy", [f"{VISIBLE}=0,1"], True),
    "cdi": ("cdi", [f"{VISIBLE}=all"], True),
    "cdi, one": ("auto", [f"{VISIBLE}=nvidia.com/gpu=1"], True),
    "cdi, MIG device": ("cdi", [f"{VISIBLE}=7:1"], True),
    "cdi, driver only": ("cdi", [f"{VISIBLE}=none"], True),
    "nothing": ("auto", [f"{VISIBLE}=void"], False),
}


class Place:
    """A bundle, a config, our modules with their bytecode, and a runtime that is no program."""

    def __init__(self, top: Path, *, is_counted: bool) -> None:
        self.library = scenario.TREE
        if is_counted:
            # As they are installed.
            self.library = top / "library"
            self.compile()
        self.bundle = scenario.make_bundle(top, "all")
        self.document = self.bundle / "config.json"
        self.original = json.loads(self.document.read_text())
        self.config = top / "config.toml"
        self.log = top / "log"
        self.callgrind = top / "callgrind"
        self.runtime = top / "runtime"
        self.runtime.write_text("not a program\n")
        self.runtime.chmod(0o755)
        self.trace = top / "trace"
        self.hook = top / "gpu-cdi-hook"
        shutil.copy(scenario.TREE / "build" / "launcher", self.hook)
        (top / "launcher.interpreter").write_text(
            f"gpuruntime-interpreter 1\nlibrary {self.library}\npython {PYTHON[0]}\nend\n"
        )

    def compile(self) -> None:
        """Have the modules in the library, with bytecode whose sources nobody looks at."""
        for package in ("cdi", "gpuruntime", "hooks"):
            shutil.copytree(
                scenario.TREE / package,
                self.library / package,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        compiler = (PYTHON[0], "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash")
        scenario.run(*compiler, self.library)
        scenario.run(PYTHON[0], "-S", self.library / "gpuruntime/bytecode.py", "--unchecked")

    def prepare(self, mode: str, environment: list[str]) -> None:
        """Have the container ask by *environment*, in *mode*."""
        self.config.write_text(
            f'[nvidia-container-runtime]\nruntimes = ["{self.runtime}"]\nmode = "{mode}"\n'
            f'[nvidia-ctk]\npath = "{self.hook}"\n'
            f'[nvidia-container-runtime-hook]\npath = "{self.hook}"\n'
        )
        self.original["process"]["env"] = ["PATH=/bin", *environment]

    def command(self) -> list[str]:
        """Return the create, as the launcher starts it."""
        code = start_code.code(self.library, "shim", sys.executable)
        words = ["--log", str(self.log), "create", "--bundle", str(self.bundle), "one"]
        return [*PYTHON, code, "0", "0:0", "gpu-container-runtime", *words]

    def hook_command(self, *more: str) -> list[str]:
        """Return the hook of the config.json that is there, with *more* arguments."""
        config = json.loads(self.document.read_text())
        (hook,) = config["hooks"]["createContainer"]
        return [str(self.hook), *hook["args"][1:], *more]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run *command*, a hook too, before a config.json that nobody changed."""
        self.document.write_text(json.dumps(self.original))
        state = json.dumps({"ociVersion": "1.0.2", "bundle": str(self.bundle)})
        self.log.unlink(missing_ok=True)
        environment = {"PATH": "/usr/bin:/bin", "GPURUNTIME_CONFIG": str(self.config)}
        return subprocess.run(
            command, env=environment, input=state, capture_output=True, text=True, check=False
        )

    def create(self) -> dict[str, Any]:
        """Create; return the config.json that is left, and what was said, without times."""
        done = self.run(*self.command())
        said = self.log.read_text() if self.log.exists() else ""
        return {
            "status": done.returncode,
            "config": self.document.read_text(),
            "said": re.sub(r'time="[^"]*" ', "", said),
        }

    def count(self, *command: str) -> int:
        """Return how many instructions *command* takes, its children aside."""
        # The process itself is the last to end.
        return self.count_each(*command)[-1]

    def count_hook(self) -> int:
        """Return how many instructions the hook takes up to its first operation.

        Its container has no root. It may start the host's ldconfig: else it would confine itself,
        and valgrind.
        """
        bundle = self.bundle.with_name("no-root")
        bundle.mkdir()
        (bundle / "config.json").write_text(self.document.read_text())
        state = bundle / "state.json"
        state.write_text(json.dumps({"ociVersion": "1.0.2", "bundle": str(bundle)}))
        more = ("--ldconfig-mode", "host", "--container-spec", str(state))
        return sum(self.count_each(*self.hook_command(*more)))

    def count_each(self, *command: str) -> list[int]:
        """Return how many instructions each process of *command* takes, as they end."""
        output = f"--callgrind-out-file={self.callgrind}"
        # The launcher becomes another program.
        trace = "--trace-children=yes"
        done = self.run("valgrind", "--tool=callgrind", trace, output, *command)
        counted = re.findall(r"Collected : (\d+)", done.stderr)
        if not counted:
            sys.exit(done.stderr)
        return [int(count) for count in counted]

    def count_calls(self, *command: str) -> int:
        """Return how many system calls *command* makes, with its children."""
        done = self.run("strace", "-f", "-o", str(self.trace), *command)
        # The runtime that the shim becomes is no program.
        if done.returncode not in (0, 126):
            sys.exit(done.stderr)
        # Two lines of a call that another process interrupts.
        return sum(
            "resumed>" not in line and "+++" not in line and "---" not in line
            for line in self.trace.read_text().splitlines()
        )


def forget() -> None:
    """Remove what is kept between creates."""
    for path in RUN.iterdir():
        if path.is_file():
            path.unlink()


def marked() -> tuple[int, int] | None:
    """Return what is another after each grant that is kept."""
    if not READY.exists():
        return None
    status = READY.stat()
    return status.st_ino, status.st_mtime_ns


def main() -> None:
    """Go through the CASES that are named, count, and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-start-path-"))
    top.chmod(0o755)
    found: dict[str, Any] = {"cases": {}, "counts": {}, "calls": {}}
    counted = {"all", "cdi"} & {*sys.argv[1:]} if shutil.which("valgrind") else set()
    try:
        place = Place(top, is_counted=bool(counted))
        scenario.generate()
        # Of a spec that is younger nothing is kept.
        time.sleep(SETTLED_S)
        for name in sys.argv[1:]:
            mode, environment, is_kept = CASES[name]
            place.prepare(mode, environment)
            if RUN.exists():
                forget()
            first = place.create()
            before = marked()
            second = place.create()
            hit = before is not None and marked() == before
            found["cases"][name] = {"first": first, "second": second, "hit": hit, "kept": is_kept}
            if name in counted:
                found["counts"][name] = place.count(*place.command())
            if name == "all" and counted:
                found["counts"]["hook"] = place.count_hook()
            if name == "all capabilities" and counted:
                files = len(json.loads(place.document.read_text())["mounts"])
                found["calls"] = {"files": files, "shim": place.count_calls(*place.command())}
                found["calls"]["hook"] = place.count_calls(*place.hook_command())
        if counted:
            found["counts"]["floor"] = place.count(*PYTHON, "pass")
    finally:
        shutil.rmtree(top)
        if RUN.exists():
            forget()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
