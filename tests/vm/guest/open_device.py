# SPDX-License-Identifier: Apache-2.0
"""Allow a device in a cgroup behind systemd's back: a control.

    open_device.py CGROUP MAJOR MINOR

It puts rules in front of the cgroup's own device program, as our prestart hook does, and does not
tell systemd. Our package must be installed.
"""

import os
import sys

sys.path.insert(0, "/usr/lib/gpuruntime")
from gpuruntime.system import bpf, device_program

cgroup = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
device = ("c", int(sys.argv[2]), int(sys.argv[3]))
numbers, flags = bpf.attached(cgroup)
for number in numbers:
    old = bpf.open_program(number)
    new = bpf.load(device_program.with_rules(bpf.instructions(old), [device]))
    bpf.replace(cgroup, flags, old, new)
