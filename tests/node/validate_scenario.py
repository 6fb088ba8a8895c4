# SPDX-License-Identifier: Apache-2.0
"""`validate_scenario.py`: on the simulated host, validate it with and without what it needs.

Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BIN = Path(sys.prefix, "bin")
CONFIG = Path("/etc/gpuruntime/config.toml")
HOST = Path("/run/host")
SLOW = Path("/run/slow")


def command(*options: str) -> list[str]:
    """Return the command line with *options*."""
    return [str(BIN / "gpu-node"), "validate", "--json", "--output-dir=", *options]


def validate(*options: str) -> list[dict[str, str]]:
    """Return the components of the report."""
    done = subprocess.run(command(*options), stdout=subprocess.PIPE, text=True, check=False)
    components: list[dict[str, str]] = json.loads(done.stdout)["components"]
    return components


def statuses(components: list[dict[str, str]]) -> dict[str, str]:
    """Return the status of each component."""
    return {item["name"]: item["status"] for item in components}


def use_runc(program: str) -> None:
    """Have our runtime call *program* as the low-level runtime."""
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(f'[nvidia-container-runtime]\nruntimes = ["{program}"]\n')


def remains() -> list[str]:
    """Return processes, cgroups and mounts of containers that should be gone."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    left = [line for line in mounts if line.startswith("trial ")]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob("**/gpu-node-validate*")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if any(word in text for word in ("validation.trial", str(SLOW), "runc init")):
            left.append(text)
    return left


def killed() -> int:
    """End a validation whose runtime hangs; return its exit status."""
    process = subprocess.Popen(command("--component=toolkit"), stdout=subprocess.DEVNULL)
    started = time.monotonic()
    while not Path("/run/slow-started").exists() and time.monotonic() < started + 30:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    return process.wait(10) - 256


def main() -> None:
    """Validate, and print the results."""
    results: dict[str, Any] = {"namespace": os.readlink("/proc/self/ns/pid")}
    names = "--component=driver,toolkit,cuda"
    results["without an engine"] = statuses(validate(names))
    subprocess.run(
        [BIN / "gpuruntime", "runtime", "configure", "--runtime=docker"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    components = validate(names)
    results["works"] = statuses(components)
    results["sentences"] = {item["name"]: item["sentence"] for item in components}
    HOST.mkdir()
    subprocess.run(["mount", "--rbind", "/", HOST], check=True)
    results["from a pod"] = statuses(validate(names, f"--host-root={HOST}"))
    subprocess.run(["umount", "-l", HOST], check=True)
    use_runc("/bin/false")
    results["runc fails"] = statuses(validate("--component=toolkit,cuda"))
    # The container is there when the runtime hangs, and is not a child of it.
    SLOW.write_text('#!/bin/sh\nrunc "$@" && touch /run/slow-started && sleep 1000\n')
    SLOW.chmod(0o755)
    use_runc(str(SLOW))
    results["runc hangs"] = killed()
    results["remains"] = remains()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
