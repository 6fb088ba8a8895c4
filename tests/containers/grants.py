# SPDX-License-Identifier: Apache-2.0
"""`grants.py SCENARIO`: containers whose devices the prestart hook allows, without our runtime.

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
    """Return bundles of *lowlevel* in which an engine has put our hook."""
    CONFIG.parent.mkdir(exist_ok=True)
    ENGINES.symlink_to(HOOK)
    bench = Bench(lowlevel)
    bench.case(plain=True, devices=None)
    return bench


def bind_nodes(root: Path, config: dict[str, Any]) -> None:
    """Have nodes of the host, which no rule allows: what the hook would do without a grant."""
    del root
    for name in NODES:
        prestart.bind(config, Path("/dev", name), f"/dev/{name}")


def allow_all(root: Path, config: dict[str, Any]) -> None:
    """Have a cgroup that allows every device, and none of the nodes."""
    del root
    config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]


def in_scope(root: Path, config: dict[str, Any]) -> None:
    """Have a cgroup with the name that systemd gives to one of its own."""
    config["linux"]["cgroupsPath"] = f"/{UNIT.format(root.parent.name)}"


def below_scope(root: Path, config: dict[str, Any]) -> None:
    """Have a cgroup as crun makes it below the scope that systemd has made for it."""
    config["linux"]["cgroupsPath"] = f"/{UNIT.format(root.parent.name)}/container"


@contextlib.contextmanager
def closed_above() -> Iterator[Prepare]:
    """Have a cgroup of version 1 above the container's that allows no GPU."""
    above = Path("/sys/fs/cgroup/devices/closed")
    above.mkdir()
    (above / "devices.deny").write_text("c 195:* rw")

    def prepare(root: Path, config: dict[str, Any]) -> None:
        config["linux"]["cgroupsPath"] = f"/closed/{root.parent.name}"

    try:
        yield prepare
    finally:
        # runc makes it in every hierarchy, and leaves it.
        for made in Path("/sys/fs/cgroup").glob("*/closed"):
            made.rmdir()


def with_calling_program(root: Path, config: dict[str, Any]) -> None:
    """Have another hook attach a program that calls a function of the kernel."""
    del root
    # R0 = bpf_get_current_uid_gid(); R0 = 1; exit.
    code = "850000000f000000 b700000001000000 9500000000000000"
    file = "'/proc/%d/cgroup' % json.load(sys.stdin)['pid']"
    hook = attaching(code, f"open({file}).read().split('0::')[1].strip()")
    config["hooks"]["prestart"].insert(-1, {"path": hook[0], "args": hook})


def attaching(code: str, path: str) -> list[str]:
    """Return the words of a program that attaches *code* to a cgroup; *path* is an expression."""
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
    found: dict[str, Any] = {}
    with nothing_left(found), configured(LEGACY):
        found["control"] = bench.case(bind_nodes, plain=True)
        if found["control"]["status"] != 0:
            # crun cannot set rules here at all, and leaves the cgroup that it has made.
            Path(f"/sys/fs/cgroup/look-{bench.count}").rmdir()
            return found
        bench.prestart = HOOKS
        found["granted"] = bench.case(plain=True)
        found["node of the engine"] = bench.case(bind_nodes, plain=True)
        found["all allowed"] = bench.case(allow_all, plain=True)
        bench.prestart = HOOKS * 2
        found["twice"] = bench.case(plain=True)
        bench.prestart = HOOKS
        found["life"] = life(bench)
    with nothing_left(found), configured({**LEGACY, NO_CGROUPS: True}):
        found["no-cgroups"] = bench.case(plain=True)
        found["no-cgroups, all allowed"] = bench.case(allow_all, plain=True)
    return found


def refused(version: int) -> dict[str, Any]:
    """Start containers of runc that can be given no devices, with cgroups of *version*."""
    if version == 2:
        cgroup2_alone()
    bench = bench_with("runc")
    bench.prestart = HOOKS
    found: dict[str, Any] = {}
    with nothing_left(found), configured(LEGACY):
        found["mapped"] = bench.case(prestart.in_user_namespace, plain=True)
        if version == 2:
            found["cgroup"] = bench.case(with_calling_program, plain=True)
        else:
            with closed_above() as prepare:
                found["cgroup"] = bench.case(prepare, plain=True)
    return found


def life(bench: Bench) -> dict[str, str]:
    """Run programs in a container before and after its limits are changed."""
    _, name = created(bench, ("/bin/busybox", "sleep", "1000"))
    run(bench.lowlevel, "start", name)
    looks = {}
    for when in ("before", "updated"):
        looks[when] = run(bench.lowlevel, "exec", name, *LOOK).stdout
        # As `docker update`, with whatever limits this hierarchy has.
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
    found: dict[str, Any] = {"rules before": rules.read_text()}
    with nothing_left(found), configured(LEGACY):
        found["case"] = bench.case(plain=True)
    found["rules after"] = rules.read_text()
    return found


def for_one_id(root: Path, config: dict[str, Any]) -> None:
    """Have no mounts that a user namespace with one id cannot make."""
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
    """Have a systemctl that shows properties, notes how it is called, and then *does* something.

    It shows those of runc's scopes if not those that are *shown*.
    """
    properties = shown or ("DevicePolicy=strict", "DeviceAllow=/dev/char/1:3 rwm")
    show = f'if [ "$1" = show ]; then printf "%s\\n" {shlex.join(properties)}; exit 0; fi'
    note = f'{{ printf "%s\\n" "$0" "$@"; echo; env; readlink /proc/self/ns/mnt; }} > {CALLED}'
    SYSTEMCTL.write_text(f"#!/bin/sh\n{show}\n{note}\n{does}\n")
    SYSTEMCTL.chmod(0o755)


def systemd(version: int) -> dict[str, Any]:
    """Start containers in scopes of systemd, whose systemctl is another program."""
    if version == 2:
        cgroup2_alone()
    SYSTEMCTL.unlink(missing_ok=True)
    bench = bench_with("runc")
    bench.prestart = HOOKS
    found: dict[str, Any] = {"namespace of the host": os.readlink("/proc/self/ns/mnt")}
    with configured(LEGACY):
        found["not booted"] = bench.case(in_scope, plain=True)
        Path("/run/systemd/system").mkdir(parents=True)
        found["no systemctl"] = bench.case(in_scope, plain=True)
        systemctl("exit 0", "DevicePolicy=auto", "DeviceAllow=")
        found["no rules"] = bench.case(in_scope, plain=True)
        systemctl("exit 0")
        os.environ["LD_PRELOAD"] = "/hostile.so"
        found["no scope"] = bench.case(plain=True)
        found["not called"] = not CALLED.exists()
        found["told"] = bench.case(in_scope, plain=True)
        del os.environ["LD_PRELOAD"]
        found["unit"] = UNIT.format(bench.last.name)
        found["called"] = CALLED.read_text().splitlines()
        found["below"] = bench.case(below_scope, plain=True)
        found["unit below"] = UNIT.format(bench.last.name)
        found["called below"] = CALLED.read_text().splitlines()
        systemctl('echo "Failed to set unit properties: Unit not loaded." >&2; exit 1')
        found["refused"] = bench.case(in_scope, plain=True)
        if version == 2:
            found["attached"] = attached_by_systemd(bench)
    with configured({**LEGACY, "hook-deadline": 2}):
        systemctl("exec sleep 600")
        start = time.monotonic()
        found["late"] = bench.case(in_scope, plain=True)
        found["late after"] = time.monotonic() - start
        left = subprocess.run(["pgrep", "-f", "sleep 600"], capture_output=True, check=False)
        found["left of it"] = left.stdout.decode().split()
    return found


def attached_by_systemd(bench: Bench) -> dict[str, Any]:
    """Have systemd attach a program of its own when it is told; return what is attached."""
    number = WORK / "number"
    # R0 = 1; exit: it has no rules that could be extended.
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
