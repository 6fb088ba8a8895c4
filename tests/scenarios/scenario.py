# SPDX-License-Identifier: Apache-2.0
"""What the programs of attacks share: a userland, a spec, a bundle that asks for GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "simhost"))
import fakeproc

HERE = Path(__file__).parent
TREE = HERE.parents[1]
BIN = TREE / ".venv" / "bin"
RUNTIME = str(BIN / "gpu-container-runtime")
BUSYBOX = "/bin/busybox"
SCRIPT = "/bin/busybox grep ModifyDeviceFiles /proc/driver/nvidia/params"


def run(
    *command: object, check: bool = True, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run *command*, its output captured; exit with it if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, check=False, **options)  # type: ignore[call-overload]
    if check and done.returncode != 0:
        sys.exit(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def create(bundle: Path, name: str, timeout_s: float = 30) -> tuple[int, Path]:
    """Create the container *name* of *bundle*; return the status, and the file of what is said."""
    out = bundle / "output"
    with out.open("w") as stream:
        created = subprocess.run(
            [RUNTIME, "create", "--bundle", str(bundle), name],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, check=False, timeout=timeout_s,
        )  # fmt: skip
    return created.returncode, out


def finish(name: str) -> None:
    """Start the container *name*, which was created; delete it when it has ended."""
    run(RUNTIME, "start", name)
    deadline = time.monotonic() + 5
    while True:
        state = json.loads(run(RUNTIME, "state", name).stdout)
        if state["status"] == "stopped" or time.monotonic() > deadline:
            break
        # The end of the process, because each start of the runtime costs much.
        await_end(state["pid"], deadline)
    run(RUNTIME, "delete", "--force", name)


def await_end(pid: int, deadline: float) -> None:
    """Wait until the process *pid* has exited, or until *deadline*."""
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)


def make_root(root: Path) -> None:
    """Make a userland: busybox, the machine's own glibc and loader."""
    for name in ("bin", "dev", "etc", "proc", "sbin", "sys", "tmp", "run", "var"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    for word in run("ldd", "/usr/bin/env").stdout.split():
        if word.startswith("/"):
            target = Path(f"{root}{word}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, target)


def generate(target: str = "/etc/cdi/nvidia.json") -> None:
    """Write the spec that the runtime reads."""
    run(BIN / "gpuruntime", "cdi", "generate", "--output", target)


def make_bundle(work: Path, devices: str) -> Path:
    """Make a bundle that asks for *devices* and shows whether the driver's params are masked."""
    bundle = work / "bundle"
    make_root(bundle / "rootfs")
    run("runc", "spec", "--bundle", bundle)
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    config["process"]["terminal"] = False
    config["process"]["args"] = ["/bin/busybox", "sh", "-c", SCRIPT]
    config["process"]["env"] = ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={devices}"]
    config["root"]["readonly"] = False
    path.write_text(json.dumps(config))
    fakeproc.add(bundle)
    return bundle
