# SPDX-License-Identifier: Apache-2.0
"""Run jobs that come over a virtio-serial port: a service of the virtual machine.

A frame is a type byte, the length of its payload as 32 bits big-endian, and the payload. The host
sends J (a job, JSON). The guest sends R (ready: the boot id), O and E (output of the job), and X
(the job's exit status).
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import struct
import subprocess
import time
from pathlib import Path

PORT = "vm.job"
RNDRESEEDCRNG = 0x5207
# How long the output of a job is awaited after its end, if a process in the background holds it.
LINGER_S = 1.0


def main() -> None:
    """Answer the host for as long as the machine runs."""
    port = os.open(find("/sys/class/virtio-ports", "name", PORT), os.O_RDWR | os.O_CLOEXEC)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    while True:
        send(port, b"R", boot_id)
        job = json.loads(receive(port))
        resume_clock(job)
        status = 125
        try:
            status = run(port, job)
        except (OSError, subprocess.SubprocessError) as error:
            send(port, b"E", f"agent: {error}\n".encode())
        send(port, b"X", str(status).encode())


def find(directory: str, attribute: str, value: str) -> str:
    """Return the device node whose *attribute* in sysfs has *value*; wait until it exists."""
    while True:
        for device in Path(directory).iterdir():
            file = device / attribute
            if file.exists() and file.read_text().strip() == value:
                return f"/dev/{device.name}"
        time.sleep(0.1)


def receive(port: int) -> bytes:
    """Return the payload of the next frame."""
    _, size = struct.unpack(">cI", receive_bytes(port, 5))
    return receive_bytes(port, size)


def receive_bytes(port: int, count: int) -> bytes:
    """Return *count* bytes. While the host's end is closed, which a saved machine sees, wait."""
    data = b""
    while len(data) < count:
        part = os.read(port, count - len(data))
        if not part:
            data = b""
            time.sleep(0.02)
        data += part
    return data


def send(port: int, kind: bytes, payload: bytes = b"") -> None:
    """Send one frame."""
    frame = struct.pack(">cI", kind, len(payload)) + payload
    while frame:
        frame = frame[os.write(port, frame) :]


def resume_clock(job: dict) -> None:
    """Set the clock and stir the random pool: a resumed machine has those of its saving."""
    time.clock_settime(time.CLOCK_REALTIME, job["time"])
    with open("/dev/urandom", "wb", buffering=0) as pool:
        pool.write(bytes.fromhex(job["seed"]))
        fcntl.ioctl(pool, RNDRESEEDCRNG)


def run(port: int, job: dict) -> int:
    """Run a job, send its output, and return its exit status: 128 + N after signal N."""
    child = subprocess.Popen(
        job["command"], cwd="/root",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    selector = selectors.DefaultSelector()
    selector.register(child.stdout, selectors.EVENT_READ, b"O")
    selector.register(child.stderr, selectors.EVENT_READ, b"E")
    ended = None
    while selector.get_map() and (ended is None or time.monotonic() < ended + LINGER_S):
        for key, _ in selector.select(0.2):
            data = os.read(key.fd, 65536)
            if data:
                send(port, key.data, data)
            else:
                selector.unregister(key.fileobj)
        if ended is None and child.poll() is not None:
            ended = time.monotonic()
    status = child.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    main()
