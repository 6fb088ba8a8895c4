# SPDX-License-Identifier: Apache-2.0
"""`pods.py NAME`: on the simulated host, have pods as Kubernetes does, by containerd or CRI-O.

For the simulated host, as scenario.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
from cri.crio import Crio
from cri.kubelet import PREFIX, Kubelet
from drivers import FailedError
from scenario import WORK, go_all, host_of, main, nothing_left, without_unified
from ways import FEW, Way


def containerd() -> dict[str, Any]:
    """Use containerd's CRI."""
    engine = Kubelet(WORK)
    with engine.started():
        found = go_all(engine, FEW)
        with nothing_left(found):
            found["annotated"] = annotated(engine)
            found["life"] = life(engine)
            found["refused"] = refused(engine)
    return found


def annotated(engine: Kubelet) -> dict[str, Any]:
    """Run containers that ask for devices of a CDI spec by annotations, and one that does not."""
    asked = {f"{PREFIX}vendor_a": "nvidia.com/gpu=1", f"{PREFIX}vendor_b": "nvidia.com/gpu=3"}
    other = {"other.k8s.io/x": "nvidia.com/gpu=1"}
    found = {}
    with host_of(Way(None, None, spec=())), engine.pod() as pod:
        for name, annotations in (("asked", asked), ("other", other)):
            with engine.container(pod, None, annotations=annotations) as (container, _):
                found[name] = engine.look(container)
    return found


def life(engine: Kubelet) -> dict[str, Any]:
    """Look at a sandbox, and into its two containers before and after a change of resources."""
    with (
        host_of(Way(None, None)),
        engine.pod() as pod,
        engine.container(pod, "1,3") as (first, _),
        engine.container(pod, "0") as (second, _),
    ):
        found = {
            "sandbox": engine.config(pod[1]),
            "listed": engine.look(first, "/bin/busybox", "ls", "/dev"),
            "first": engine.look(first),
            "second": engine.look(second),
        }
        engine.cri.limit(first, 512)
        found["after"] = engine.look(first)
    return found


def refused(engine: Kubelet) -> str:
    """Return what the kubelet hears of a container whose GPU is not there."""
    try:
        engine.run("9")
    except grpc.RpcError as error:
        return str(error.details())
    return ""


def crio(lowlevel: str) -> dict[str, Any]:
    """Use conmon and *lowlevel* as CRI-O does."""
    without_unified()
    config = {"nvidia-container-runtime.runtimes": [lowlevel]}
    engine = Crio(WORK, lowlevel)
    found = go_all(engine, FEW, **config)
    with nothing_left(found), host_of(Way(None, None, config=config)):
        try:
            found["refused"] = engine.run("9")
        except FailedError as error:
            found["refused"] = str(error)
    return found


if __name__ == "__main__":
    main(
        {
            "containerd": containerd,
            **{f"crio-{name}": partial(crio, name) for name in ("runc", "crun")},
        }
    )
