# SPDX-License-Identifier: Apache-2.0
"""Create containers under strace in every mode; print which programs ran on the way.

Standard output is one JSON object: case → status, output, and for each program that was executed
the path that was given, that of the file, and its own name; "" for a file without one, in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import hostile
import scenario

MODE = "nvidia-container-runtime.mode"
# A call that did not fail: how the program was named, and how it is to call itself.
EXECUTED = re.compile(r'exec(?:ve|veat)\((?:-?\w+, )?"((?:[^"\\]|\\.)*)", \["([^"]*)".*\) = 0$')
DEADLINE_S = 60


def damage_cache(attack: hostile.Attack) -> None:
    """Have a cache that nobody can merge with."""
    with (attack.root / "etc" / "ld.so.cache").open("wb") as stream:
        stream.truncate(1 << 30)


# Case → the request, the values of the config file, and what else is done to the image.
CASES: dict[str, tuple[str, dict[str, str], Callable[[hostile.Attack], None] | None]] = {
    "cdi": ("nvidia.com/gpu=0", {}, None),
    "jit-cdi": ("0", {MODE: "jit-cdi"}, None),
    "legacy": ("0", {MODE: "legacy"}, None),
    "host ldconfig": ("0", {MODE: "jit-cdi", "ldconfig-mode": "host"}, damage_cache),
    "control": ("nvidia.com/gpu=0", {}, hostile.shebang_hook),
}


def trace(attack: hostile.Attack, log: Path) -> tuple[int, str]:
    """Create the container of *attack*, and no more; return the status and what was said."""
    out = attack.bundle / "output"
    name = f"programs-{os.getpid()}"
    tracer = ["strace", "-f", "-qq", "-s", "4096", "-e", "trace=execve,execveat", "-o", str(log)]
    with out.open("w") as stream, subprocess.Popen(
        [*tracer, "--", scenario.RUNTIME, "create", "--bundle", str(attack.bundle), name],
        stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
    ) as created:  # fmt: skip
        # It follows the container's first process as well, which waits to be started.
        end = time.monotonic() + DEADLINE_S
        while created.poll() is None and time.monotonic() < end:
            state = scenario.run("runc", "state", name, check=False).stdout
            if state and json.loads(state)["status"] == "created":
                break
            time.sleep(0.1)
        scenario.run("runc", "delete", "--force", name, check=False)
        try:
            created.wait(DEADLINE_S)
        finally:
            created.kill()
    return created.returncode, out.read_text(errors="replace")


def programs(log: Path, root: Path) -> list[list[str]]:
    """Return the programs in the trace *log*, each once."""
    found = {}
    for line in log.read_text(errors="replace").splitlines():
        # A call that another one interrupted ends on a line of its own.
        match = EXECUTED.search(line.replace(" <unfinished ...>", ") = 0"))
        if match is None:
            continue
        name = match[1]
        # A createContainer hook has the root of the image as working directory.
        place = name if name.startswith("/") or not name else str(root / name)
        file = os.path.realpath(place) if name and name != "/proc/self/exe" else ""
        found[name, match[2]] = [name, file, match[2]]
    return list(found.values())


def observe(top: Path, pristine: Path, spec: str, case: str) -> dict[str, object]:
    """Run one case; return what it came to."""
    asked, values, more = CASES[case]
    hostile.SPEC.write_text(spec)
    path = top / "config.toml"
    path.write_text("".join(f'{key} = "{value}"\n' for key, value in values.items()))
    os.environ["GPURUNTIME_CONFIG"] = str(path)
    work = top / case / "work"
    work.mkdir(parents=True)
    attack = hostile.Attack(work, pristine)
    hostile.exec_01_programs_of_the_image(attack)
    hostile.env_07_path(attack)
    if more is not None:
        more(attack)
    environment = {"PATH": "/bin", **attack.environment, "NVIDIA_VISIBLE_DEVICES": asked}
    attack.config["process"]["env"] = [f"{k}={v}" for k, v in environment.items()]
    (attack.bundle / "config.json").write_text(json.dumps(attack.config))
    log = work.parent / "trace"
    status, output = trace(attack, log)
    return {
        "status": status,
        "output": output,
        "marked": attack.mark.exists(),
        "root": str(attack.root),
        "programs": programs(log, attack.root),
    }


def main() -> None:
    """Run every case and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-programs-"))
    try:
        scenario.generate()
        spec = hostile.SPEC.read_text()
        pristine = scenario.make_bundle(top / "pristine", "0")
        json.dump({case: observe(top, pristine, spec, case) for case in CASES}, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
