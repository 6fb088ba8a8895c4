# SPDX-License-Identifier: Apache-2.0
"""`pods.py NAME`: on the simulated host, run pods as Kubernetes does, by containerd or CRI-O.

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
    """Run containers by the CRI of containerd."""
    engine = Kubelet(WORK)
    with engine.started():
        results = go_all(engine, FEW)
        with nothing_left(results):
            results["annotated"] = annotated(engine)
            results["life"] = life(engine)
            results["refused"] = refused(engine)
    return results


def annotated(engine: Kubelet) -> dict[str, Any]:
    """Run a container that requests CDI devices by annotations, and one with other annotations."""
    requesting = {f"{PREFIX}vendor_a": "nvidia.com/gpu=1", f"{PREFIX}vendor_b": "nvidia.com/gpu=3"}
    other = {"other.k8s.io/x": "nvidia.com/gpu=1"}
    outputs = {}
    with host_of(Way(None, None, spec=())), engine.pod() as pod:
        for name, annotations in (("asked", requesting), ("other", other)):
            with engine.container(pod, None, annotations=annotations) as (container, _):
                outputs[name] = engine.look(container)
    return outputs


def life(engine: Kubelet) -> dict[str, Any]:
    """Examine a sandbox, and its containers before and after a change of resources."""
    with (
        host_of(Way(None, None)),
        engine.pod() as pod,
        engine.container(pod, "1,3") as (first, _),
        engine.container(pod, "0") as (second, _),
    ):
        results = {
            "sandbox": engine.config(pod[1]),
            "listed": engine.look(first, "/bin/busybox", "ls", "/dev"),
            "first": engine.look(first),
            "second": engine.look(second),
        }
        engine.cri.limit(first, 512)
        results["after"] = engine.look(first)
    return results


def refused(engine: Kubelet) -> str:
    """Return the CRI error of a container whose GPU does not exist."""
    try:
        engine.run("9")
    except grpc.RpcError as error:
        return str(error.details())
    return ""


def crio(lowlevel: str) -> dict[str, Any]:
    """Run containers by conmon and *lowlevel*, as CRI-O does."""
    without_unified()
    config = {"nvidia-container-runtime.runtimes": [lowlevel]}
    engine = Crio(WORK, lowlevel)
    results = go_all(engine, FEW, **config)
    with nothing_left(results), host_of(Way(None, None, config=config)):
        try:
            results["refused"] = engine.run("9")
        except FailedError as error:
            results["refused"] = str(error)
    return results


if __name__ == "__main__":
    main(
        {
            "containerd": containerd,
            **{f"crio-{name}": partial(crio, name) for name in ("runc", "crun")},
        }
    )
