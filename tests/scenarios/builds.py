# SPDX-License-Identifier: Apache-2.0
"""Containers of `run`: the steps of a build, as BuildKit has them, and one at a terminal.

For the simulated host, with its runc. Prints one JSON object: case → what came of it.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scenario

ASKED = "/proc/driver/nvidia/params"
LOOK = ["/bin/busybox", "sh", "-c", "/bin/busybox ls /dev; /bin/asks " + ASKED]
# Prints what it has in front of it, and ends by what comes from there.
AT_TERMINAL = """
trap 'echo interrupted; exit 41' INT
trap 'echo ended; exit 42' TERM
/bin/busybox test -t 0 && echo terminal
/bin/busybox ls /dev
echo ready
while :; do /bin/busybox sleep 0.1; done
"""
DEADLINE_S = 30
# Longer than it takes to interrupt a process that asks the driver.
DRIVER_DELAY_US = 5_000_000


def configure(bundle: Path, devices: str, args: list[str], *, terminal: bool = False) -> Any:
    """Return the config.json of *bundle* as BuildKit's worker writes it, for *devices*."""
    config = json.loads((bundle / "config.json").read_text())
    process = config["process"]
    process["args"] = args
    process["env"] = ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={devices}"]
    process["terminal"] = terminal
    config["hostname"] = "buildkitsandbox"
    config["root"] = {"path": str(bundle / "rootfs")}
    config["linux"]["cgroupsPath"] = f"/buildkit/{bundle.name}"
    for name in ("resolv.conf", "hosts"):
        source = bundle / name
        source.write_text("")
        mount = {"destination": f"/etc/{name}", "type": "bind", "source": str(source)}
        config["mounts"].append({**mount, "options": ["nosuid", "noexec", "nodev", "rbind", "ro"]})
    return config


def inject(config: Any, *devices: str) -> Any:
    """Return *config* with CDI *devices*, as an engine adds them by itself."""
    words = [word for device in devices for word in ("--device", device)]
    done = scenario.run(scenario.BIN / "gpuruntime", "cdi", "inject", *words,
                        input=json.dumps(config))  # fmt: skip
    return json.loads(done.stdout)


def entries(root: Path) -> dict[str, str]:
    """Return path → what is there, of all below *root*."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            kind = f"link to {path.readlink()}"
        elif stat.S_ISDIR(status.st_mode):
            kind = "directory"
        else:
            kind = "file" if status.st_size else "empty file"
        found[str(path.relative_to(root))] = kind
    return found


def step(bundle: Path, config: Any) -> dict[str, Any]:
    """Run a step of a build; return what it printed, and what is in the image afterwards."""
    root = bundle / "rootfs"
    before = entries(root)
    (bundle / "config.json").write_text(json.dumps(config))
    words = ["--log", bundle / "log", "--log-format", "json", "run", "--bundle", bundle, "--keep"]
    done = scenario.run(scenario.RUNTIME, *words, bundle.name, check=False)
    scenario.run(scenario.RUNTIME, "delete", bundle.name, check=False)
    after = entries(root)
    new = {path: kind for path, kind in after.items() if before.get(path) != kind}
    return {
        "status": done.returncode,
        "output": done.stdout,
        "errors": done.stderr,
        "new": new,
        "gone": sorted(before.keys() - after.keys()),
    }


class Terminal:
    """A terminal in whose foreground *command* runs, in a session of its own."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)
        os.set_blocking(self.fd, False)
        self.output = b""

    def wait_for(self, word: bytes) -> None:
        """Read until *word* is there, or exit."""
        end = time.monotonic() + DEADLINE_S
        while word not in self.output:
            self._read()
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                sys.exit(f"no {word!r} in {self.output!r}")

    def finish(self) -> dict[str, Any]:
        """Return how the command ended, and what was printed."""
        end = time.monotonic() + DEADLINE_S
        while True:
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
        self._read()
        os.close(self.fd)
        text = self.output.decode(errors="replace").replace("\r\n", "\n")
        return {"status": os.waitstatus_to_exitcode(status), "output": text}

    def _read(self) -> None:
        try:
            self.output += os.read(self.fd, 65536)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            # Linux has it so once the other end is closed.
            time.sleep(0.01)


def at_terminal(bundle: Path, act: Callable[[Terminal], object]) -> dict[str, Any]:
    """Run a container at a terminal, and *act* on it when it is ready."""
    args = ["/bin/busybox", "sh", "-c", AT_TERMINAL]
    config = configure(bundle, "1", args, terminal=True)
    (bundle / "config.json").write_text(json.dumps(config))
    terminal = Terminal([scenario.RUNTIME, "run", "--bundle", str(bundle), bundle.name])
    terminal.wait_for(b"ready")
    # The process that the terminal's shell has started is the low-level runtime now.
    program = os.readlink(f"/proc/{terminal.pid}/exe")
    act(terminal)
    return {**terminal.finish(), "program": Path(program).name}


def interrupted_early(bundle: Path) -> dict[str, Any]:
    """Interrupt `run` while the driver is asked, as a user does who waits for too long."""
    (bundle / "config.json").write_text(json.dumps(configure(bundle, "0", LOOK)))
    before = (bundle / "config.json").read_bytes()
    for path in Path("/run/gpuruntime").iterdir():
        if path.is_file():
            path.unlink()
    conf = Path(os.environ["SIMHOST_CONF"])
    quick = conf.read_text()
    conf.write_text(f"{quick}initdelay_us {DRIVER_DELAY_US}\n")
    # A shell that has started the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = [scenario.RUNTIME, "run", "--bundle", str(bundle), bundle.name]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + DEADLINE_S
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text() and time.monotonic() < end:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=DEADLINE_S)
    conf.write_text(quick)
    changed = (bundle / "config.json").read_bytes() != before
    names = sorted(path.name for path in bundle.iterdir() if path.name.startswith("."))
    return {
        "status": process.returncode,
        "output": output + errors,
        "changed": changed,
        "left": names,
    }


def main() -> None:
    """Run every case and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-builds-"))
    top.chmod(0o755)
    found: dict[str, Any] = {}
    try:
        scenario.generate()
        pristine = scenario.make_bundle(top / "pristine", "void")
        scenario.run("gcc", "-o", pristine / "rootfs/bin/asks", scenario.HERE / "asks.c", "-ldl")

        def bundle() -> Path:
            copy = top / f"build-{os.getpid()}-{len(found)}"
            shutil.copytree(pristine, copy, symlinks=True)
            return copy

        place = bundle()
        found["no request"] = step(place, configure(place, "void", LOOK))
        place = bundle()
        found["image requests"] = step(place, configure(place, "0,2", LOOK))
        place = bundle()
        found["again"] = step(place, configure(place, "0,2", LOOK))
        place = bundle()
        cdi = inject(configure(place, "void", LOOK), "nvidia.com/gpu=0")
        found["RUN --device"] = step(place, cdi)
        place = bundle()
        found["missing GPU"] = step(place, configure(place, "99", LOOK))
        place = bundle()
        found["Ctrl-C"] = at_terminal(place, lambda tty: os.write(tty.fd, b"\x03"))
        place = bundle()
        found["SIGTERM"] = at_terminal(place, lambda tty: os.kill(tty.pid, signal.SIGTERM))
        place = bundle()
        found["early"] = interrupted_early(place)
        json.dump(found, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
