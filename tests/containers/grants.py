# SPDX-License-Identifier: Apache-2.0
"""`grants.py SCENARIO`: containers without our runtime, whose devices the prestart hook grants.

Prints one JSON object. Its cases: status, output and error of the create.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import prestart
from drivers import TREE, environment, run
from image import LOOK
from prestart import ENGINES, HOOK, NO_CGROUPS, Bench, Prepare, configured
from scenario import CONFIG, WORK, cgroup2_alone, main, nothing_left, without_unified
from ways import MODE

sys.path.append(str(TREE))
from gpuruntime.system import bpf

NODES = ("nvidia1", "nvidia3", "nvidiactl")
UNIT = "docker-{}.scope"
SYSTEMCTL = Path("/usr/bin/systemctl")
CALLED = WORK / "systemctl.called"
LEGACY: dict[str, object] = {MODE: "legacy"}
HOOKS = [{"path": str(ENGINES), "args": [ENGINES.name, "prestart"]}]


def bench_with(lowlevel: str) -> Bench:
    """Return bundles of *lowlevel* to which an engine has added our hook."""
    CONFIG.parent.mkdir(exist_ok=True)
    ENGINES.symlink_to(HOOK)
    bench = Bench(lowlevel)
    bench.case(plain=True, devices=None)
    return bench


def bind_nodes(root: Path, config: dict[str, Any]) -> None:
    """Mount nodes of the host that no cgroup rule allows: the hook without a grant."""
    del root
    for name in NODES:
        prestart.bind(config, Path("/dev", name), f"/dev/{name}")


def allow_all(root: Path, config: dict[str, Any]) -> None:
    """Allow every device in the cgroup, and add no node."""
    del root
    config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]


def in_scope(root: Path, config: dict[str, Any]) -> None:
    """Name the cgroup as systemd names a scope."""
    config["linux"]["cgroupsPath"] = f"/{UNIT.format(root.parent.name)}"


def below_scope(root: Path, config: dict[str, Any]) -> None:
    """Place the cgroup below a scope of systemd, as crun does."""
    config["linux"]["cgroupsPath"] = f"/{UNIT.format(root.parent.name)}/container"


@contextlib.contextmanager
def closed_above() -> Iterator[Prepare]:
    """Place the container below a version 1 cgroup that allows no GPU."""
    above = Path("/sys/fs/cgroup/devices/closed")
    above.mkdir()
    (above / "devices.deny").write_text("c 195:* rw")

    def prepare(root: Path, config: dict[str, Any]) -> None:
        config["linux"]["cgroupsPath"] = f"/closed/{root.parent.name}"

    try:
        yield prepare
    finally:
        # runc creates it in every hierarchy and does not remove it.
        for made in Path("/sys/fs/cgroup").glob("*/closed"):
            made.rmdir()


def with_calling_program(root: Path, config: dict[str, Any]) -> None:
    """Add a hook that attaches a BPF program with a call to a kernel helper."""
    del root
    # R0 = bpf_get_current_uid_gid(); R0 = 1; exit.
    code = "850000000f000000 b700000001000000 9500000000000000"
    file = "'/proc/%d/cgroup' % json.load(sys.stdin)['pid']"
    hook = attaching(code, f"open({file}).read().split('0::')[1].strip()")
    config["hooks"]["prestart"].insert(-1, {"path": hook[0], "args": hook})


def attaching(code: str, path: str) -> list[str]:
    """Return a command that attaches *code* to a cgroup; *path* is a Python expression."""
    script = (
        f"import json, os, sys; sys.path.append({str(TREE)!r})\n"
        "from gpuruntime.system import bpf\n"
        f"cgroup = os.open('/sys/fs/cgroup' + {path}, os.O_RDONLY)\n"
        f"program = bpf.load(bytes.fromhex({code!r}))\n"
        # BPF_CGROUP_DEVICE, BPF_F_ALLOW_MULTI.
        "attributes = bpf._buffer(bpf._ATTACH.pack(cgroup, program, 6, 2, 0))\n"
        "bpf.syscalls.bpf(*bpf._PROG_ATTACH, attributes)\n"
        "print(bpf.attached(cgroup)[0][-1])\n"
    )
    return [sys.executable, "-c", script]


def play(version: int, lowlevel: str = "runc") -> dict[str, Any]:
    """Start containers on a host with cgroups of *version*, by *lowlevel*."""
    if version == 2:
        cgroup2_alone()
    elif lowlevel == "crun":
        without_unified()
    bench = bench_with(lowlevel)
    results: dict[str, Any] = {}
    with nothing_left(results), configured(LEGACY):
        results["control"] = bench.case(bind_nodes, plain=True)
        if results["control"]["status"] != 0:
            # crun cannot set rules here, and does not remove the cgroup that it created.
            Path(f"/sys/fs/cgroup/look-{bench.count}").rmdir()
            return results
        bench.prestart = HOOKS
        results["granted"] = bench.case(plain=True)
        results["node of the engine"] = bench.case(bind_nodes, plain=True)
        results["all allowed"] = bench.case(allow_all, plain=True)
        bench.prestart = HOOKS * 2
        results["twice"] = bench.case(plain=True)
        bench.prestart = HOOKS
        results["life"] = life(bench)
    with nothing_left(results), configured({**LEGACY, NO_CGROUPS: True}):
        results["no-cgroups"] = bench.case(plain=True)
        results["no-cgroups, all allowed"] = bench.case(allow_all, plain=True)
    return results


def refused(version: int) -> dict[str, Any]:
    """Start runc containers to which no device can be granted, with cgroups of *version*."""
    if version == 2:
        cgroup2_alone()
    bench = bench_with("runc")
    bench.prestart = HOOKS
    results: dict[str, Any] = {}
    with nothing_left(results), configured(LEGACY):
        results["mapped"] = bench.case(prestart.in_user_namespace, plain=True)
        if version == 2:
            results["cgroup"] = bench.case(with_calling_program, plain=True)
        else:
            with closed_above() as prepare:
                results["cgroup"] = bench.case(prepare, plain=True)
    return results


def life(bench: Bench) -> dict[str, str]:
    """Run programs in a container before and after its limits are changed."""
    _, name = created(bench, ("/bin/busybox", "sleep", "1000"))
    run(bench.lowlevel, "start", name)
    looks = {}
    for when in ("before", "updated"):
        looks[when] = run(bench.lowlevel, "exec", name, *LOOK).stdout
        # As `docker update` does.
        update = [bench.lowlevel, "update", "--resources", "-", name]
        subprocess.run(update, input="{}", text=True, check=True, timeout=30)
    run(bench.lowlevel, "delete", "--force", name)
    return looks


def created(bench: Bench, program: tuple[str, ...], prepare: Any = None) -> tuple[int, str]:
    """Create a container for *program*; return the pid of its first process, and its name."""
    bench.count += 1
    bench.prepare = prepare or prestart.nothing
    bundle = bench._make(environment("1,3"))
    prestart.change(bundle, lambda config: config["process"].update(args=list(program)))
    name = f"created-{bench.count}"
    prestart.create(bench, name)
    return int(json.loads(run(bench.lowlevel, "state", name).stdout)["pid"]), name


def engine() -> dict[str, Any]:
    """Start a container that has no cgroup of its own."""
    without_unified()
    crun = WORK / "crun"
    crun.write_text('#!/bin/sh\nexec crun --cgroup-manager=disabled "$@"\n')
    crun.chmod(0o755)
    bench = bench_with(str(crun))
    bench.prestart = HOOKS
    path = next(
        line.rstrip().split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.split(":")[1] == "devices"
    )
    rules = Path(f"/sys/fs/cgroup/devices/{path}/devices.list")
    results: dict[str, Any] = {"rules before": rules.read_text()}
    with nothing_left(results), configured(LEGACY):
        results["case"] = bench.case(plain=True)
    results["rules after"] = rules.read_text()
    return results


def for_one_id(root: Path, config: dict[str, Any]) -> None:
    """Remove the mounts that a user namespace with one id cannot make."""
    del root
    for mount in config["mounts"]:
        mount["options"] = [word for word in mount.get("options", ()) if word != "gid=5"]
    config["mounts"] = [m for m in config["mounts"] if m["type"] not in ("cgroup", "mqueue")]


def rootless() -> dict[str, Any]:
    """Start a container where engine, runc and hook are in a user namespace."""
    runc = WORK / "runc"
    runc.write_text('#!/bin/sh\nexec unshare --user --map-root-user --mount runc "$@"\n')
    runc.chmod(0o755)
    bench = bench_with("runc")
    bench.prestart = HOOKS
    bench.count += 1
    bench.prepare = for_one_id
    bench._make(environment("1,3"))
    bench.lowlevel = str(runc)
    return {
        "usual": bench.again(),
        "no-cgroups": bench.again(**{NO_CGROUPS: True}),
    }


def systemctl(does: str, *shown: str) -> None:
    """Write a systemctl that shows properties, records its call and then executes *does*.

    Without *shown* it shows the properties of a scope of runc.
    """
    properties = shown or ("DevicePolicy=strict", "DeviceAllow=/dev/char/1:3 rwm")
    show = f'if [ "$1" = show ]; then printf "%s\\n" {shlex.join(properties)}; exit 0; fi'
    note = f'{{ printf "%s\\n" "$0" "$@"; echo; env; readlink /proc/self/ns/mnt; }} > {CALLED}'
    SYSTEMCTL.write_text(f"#!/bin/sh\n{show}\n{note}\n{does}\n")
    SYSTEMCTL.chmod(0o755)


def systemd(version: int) -> dict[str, Any]:
    """Start containers in scopes of systemd, with a fake systemctl."""
    if version == 2:
        cgroup2_alone()
    SYSTEMCTL.unlink(missing_ok=True)
    bench = bench_with("runc")
    bench.prestart = HOOKS
    results: dict[str, Any] = {"namespace of the host": os.readlink("/proc/self/ns/mnt")}
    with configured(LEGACY):
        results["not booted"] = bench.case(in_scope, plain=True)
        Path("/run/systemd/system").mkdir(parents=True)
        results["no systemctl"] = bench.case(in_scope, plain=True)
        systemctl("exit 0", "DevicePolicy=auto", "DeviceAllow=")
        results["no rules"] = bench.case(in_scope, plain=True)
        systemctl("exit 0")
        os.environ["LD_PRELOAD"] = "/hostile.so"
        results["no scope"] = bench.case(plain=True)
        results["not called"] = not CALLED.exists()
        results["told"] = bench.case(in_scope, plain=True)
        del os.environ["LD_PRELOAD"]
        results["unit"] = UNIT.format(bench.last.name)
        results["called"] = CALLED.read_text().splitlines()
        results["below"] = bench.case(below_scope, plain=True)
        results["unit below"] = UNIT.format(bench.last.name)
        results["called below"] = CALLED.read_text().splitlines()
        systemctl('echo "Failed to set unit properties: Unit not loaded." >&2; exit 1')
        results["refused"] = bench.case(in_scope, plain=True)
        if version == 2:
            results["attached"] = attached_by_systemd(bench)
    with configured({**LEGACY, "hook-deadline": 2}):
        systemctl("exec sleep 600")
        start = time.monotonic()
        results["late"] = bench.case(in_scope, plain=True)
        results["late after"] = time.monotonic() - start
        left = subprocess.run(["pgrep", "-f", "sleep 600"], capture_output=True, check=False)
        results["left of it"] = left.stdout.decode().split()
    return results


def attached_by_systemd(bench: Bench) -> dict[str, Any]:
    """Make systemctl attach its own BPF program; return the attached programs."""
    number = WORK / "number"
    # R0 = 1; exit: a program without rules to extend.
    words = attaching("b700000001000000 9500000000000000", "'/' + sys.argv[4]")
    systemctl(f'exec {shlex.join(words)} "$@" > {number}')
    pid, name = created(bench, ("/bin/busybox", "true"), in_scope)
    path = next(
        line.rstrip().split(":", 2)[2]
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        if line.startswith("0::")
    )
    cgroup = os.open(f"/sys/fs/cgroup{path}", os.O_RDONLY)
    ids, _ = bpf.attached(cgroup)
    os.close(cgroup)
    run(bench.lowlevel, "delete", "--force", name)
    return {"ids": ids, "of systemd": int(number.read_text())}


if __name__ == "__main__":
    main(
        {
            "v1": partial(play, 1),
            "v2": partial(play, 2),
            "crun-v1": partial(play, 1, "crun"),
            "crun-v2": partial(play, 2, "crun"),
            "refused-v1": partial(refused, 1),
            "refused-v2": partial(refused, 2),
            "engine": engine,
            "rootless": rootless,
            "systemd-v1": partial(systemd, 1),
            "systemd-v2": partial(systemd, 2),
        }
    )
