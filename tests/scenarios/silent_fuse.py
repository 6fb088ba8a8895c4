# SPDX-License-Identifier: Apache-2.0
"""Call the hook on a root whose /etc is a FUSE server that never answers a lookup.

For a private mount namespace. Standard output: exit status, seconds, what the hook said, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HOOK = Path(__file__).parents[2] / ".venv" / "bin" / "gpu-cdi-hook"
# linux/fuse.h, "Opcodes" and the answers to them.
GETATTR, INIT = 3, 26
HEADER = struct.Struct("<IIQQIIII")
DEADLINE_S = 40


def serve(fd: int) -> None:
    """Answer what the mount needs; a lookup stays without an answer."""
    while True:
        _, operation, unique, *_ = HEADER.unpack_from(os.read(fd, 1 << 17))
        if operation == INIT:
            body = struct.pack("<IIIIHHIIHHI", 7, 31, 0, 0, 12, 10, 1 << 16, 1, 0, 0, 0) + bytes(
                28
            )
        elif operation == GETATTR:
            body = struct.pack("<QII6Q10I", 1, 0, 0, 1, *[0] * 5, *[0] * 3, 0o40755, 2, *[0] * 5)
        else:
            continue
        os.write(fd, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)


def main() -> None:
    """Mount, call the hook, print what came of it."""
    bundle = Path(tempfile.mkdtemp(prefix="gpuruntime-fuse-"))
    etc = bundle / "rootfs" / "etc"
    etc.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"silent", os.fsencode(etc), b"fuse", 0, options) != 0:
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    threading.Thread(target=serve, args=(fd,), daemon=True).start()
    library = "libcuda.so.1::/opt/nv/libcuda.so.1::x86-64"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [HOOK, "update-container", "--library", library],
            input=json.dumps({"bundle": str(bundle)}),
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        json.dump([done.returncode, time.monotonic() - start, done.stderr], sys.stdout)
        sys.stdout.flush()
    finally:
        # Aborts the connection: whoever still waits for an answer gets an error.
        os.close(fd)
        libc.umount2(os.fsencode(etc), 2)
        for path in (etc, bundle / "rootfs"):
            path.rmdir()
        (bundle / "config.json").unlink()
        bundle.rmdir()
        # The serving thread may be in a read of the closed descriptor.
        os._exit(0)


if __name__ == "__main__":
    main()
