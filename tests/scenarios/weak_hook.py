# SPDX-License-Identifier: Apache-2.0
"""A weak hook: does the work of ours by path strings, as one would at first. Never copy this."""

import json
import os
import sys

state = json.load(sys.stdin)
with open(os.path.join(state["bundle"], "config.json")) as stream:
    root = os.path.join(state["bundle"], json.load(stream)["root"]["path"])
libraries = root + "/usr/lib/x86_64-linux-gnu"
os.makedirs(libraries, exist_ok=True)
for path in (
    libraries + "/libcuda.so.1",
    root + "/etc/ld.so.cache~",
    root + "/etc/ld.so.cache",
    root + "/etc/ld.so.conf.d/00-gpuruntime.conf",
):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "w") as stream:
            stream.write("written by the weak hook\n")
    except OSError:
        pass
