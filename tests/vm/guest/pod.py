# SPDX-License-Identifier: Apache-2.0
"""A pod of containerd with one container that sleeps, made as a kubelet makes it.

    pod.py run NAME HANDLER [REQUEST]...    start it; a request is a variable or a CDI device
    pod.py limit NAME                       change its limits
    pod.py id NAME                          print its container's id

A sandbox runs the command of the image.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, "/srv/vm/containers")
from cri.client import Client, Container, Pod

SOCKET = "/run/containerd/containerd.sock"
IDS = Path("/run/pods")
# Under emulation.
TIMEOUT_S = 300
SHARES = 512


def main() -> None:
    """Run the command line."""
    action, name, *arguments = sys.argv[1:]
    if action == "run":
        run(name, *arguments)
    elif action == "limit":
        Client(SOCKET, TIMEOUT_S).limit((IDS / name).read_text(), SHARES)
    else:
        print((IDS / name).read_text())


def run(name: str, handler: str, *requests: str) -> None:
    """Start a pod *name* with the runtime *handler*; its container requests *requests*."""
    IDS.mkdir(exist_ok=True)
    pod = Pod(name, name, "system.slice", f"/var/log/pods/{name}")
    container = Container(
        name,
        "docker.io/library/busybox:local",
        ("sleep", "99999"),
        [request for request in requests if "/" not in request],
        {
            f"cdi.k8s.io/{number}": request
            for number, request in enumerate(requests)
            if "/" in request
        },
    )
    cri = Client(SOCKET, TIMEOUT_S)
    identity = cri.create(cri.run_sandbox(pod, handler), pod, container)
    cri.start(identity)
    (IDS / name).write_text(identity)


if __name__ == "__main__":
    main()
