# SPDX-License-Identifier: Apache-2.0
"""On the simulated host: refresh the CDI spec many times at once while the driver changes.

Prints how often the spec was no whole document, and what was left over, as escapes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import yaml

GPURUNTIME = Path(__file__).parents[2] / ".venv" / "bin" / "gpuruntime"
FOLDER = Path("/etc/cdi")
AT_A_TIME = 8


def main() -> None:
    """Start the refreshes, read meanwhile, look at what is left."""
    times = int(sys.argv[1])
    spec = FOLDER / "nvidia.yaml"
    command = [str(GPURUNTIME), "cdi", "refresh", "--output", str(spec)]
    subprocess.run(command, check=True, capture_output=True)
    (library,) = list(Path("/usr/lib").glob("*/libnvidia-ml.so.[0-9][0-9]*"))[:1]
    hidden = library.with_name("hidden")
    stop = threading.Event()
    escapes = 0

    def change() -> None:
        while not stop.is_set():
            library.rename(hidden)
            time.sleep(0.05)
            hidden.rename(library)
            time.sleep(0.05)

    changer = threading.Thread(target=change)
    changer.start()
    running: list[subprocess.Popen[bytes]] = []
    started = 0
    try:
        while started < times or running:
            running = [child for child in running if child.poll() is None]
            while started < times and len(running) < AT_A_TIME:
                running.append(
                    subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                )
                started += 1
            document = yaml.safe_load(spec.read_text())
            escapes += not (isinstance(document, dict) and document.get("devices"))
            time.sleep(0.02)
    finally:
        stop.set()
        changer.join()
    subprocess.run(command, check=True, capture_output=True)
    escapes += os.listdir(FOLDER) != ["nvidia.yaml"]
    json.dump({"escapes": escapes, "left": os.listdir(FOLDER)}, sys.stdout)


if __name__ == "__main__":
    main()
