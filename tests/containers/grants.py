# SPDX-License-Identifier: Apache-2.0
"""`grants.py SCENARIO`: containers whose devices the prestart hook allows, without our runtime.

Prints one JSON object. Its cases: status, output and error of the create.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import prestart
from drivers import TREE, environment, run
from image import LOOK
from prestart import ENGINES, HOOK, NO_CGROUPS, Bench, configured
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
        if lowlevel == "runc":
            found["mapped"] = bench.case(prestart.in_user_namespace, plain=True)
        with configured({**LEGACY, NO_CGROUPS: True}):
            found["no-cgroups"] = bench.case(plain=True)
            found["no-cgroups, all allowed"] = bench.case(allow_all, plain=True)
        CONFIG.write_text(f'{MODE} = "legacy"\n')
        bench.prestart = HOOKS * 2
        found["twice"] = bench.case(plain=True)
        bench.prestart = HOOKS
        found["life"] = life(bench)
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


def systemctl(does: str) -> None:
    """Have a systemctl that notes how it is called, and then *does* something, in shell."""
    note = f'{{ printf "%s\\n" "$0" "$@"; echo; env; readlink /proc/self/ns/mnt; }} > {CALLED}'
    SYSTEMCTL.write_text(f"#!/bin/sh\n{note}\n{does}\n")
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
        systemctl("exit 0")
        os.environ["LD_PRELOAD"] = "/hostile.so"
        found["no scope"] = bench.case(plain=True)
        found["not called"] = not CALLED.exists()
        found["told"] = bench.case(in_scope, plain=True)
        del os.environ["LD_PRELOAD"]
        found["unit"] = UNIT.format(bench.last.name)
        found["called"] = CALLED.read_text().splitlines()
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
    code = (
        f"import os, sys; sys.path.append({str(TREE)!r})\n"
        "from gpuruntime.system import bpf\n"
        "cgroup = os.open('/sys/fs/cgroup/' + sys.argv[4], os.O_RDONLY)\n"
        # R0 = 1; exit: it has no rules that could be extended.
        "program = bpf.load(bytes.fromhex('b400000001000000' '9500000000000000'))\n"
        "bpf.syscalls.bpf(*bpf._PROG_ATTACH, bpf._buffer("
        "bpf._ATTACH.pack(cgroup, program, 6, 2, 0)))\n"
        f"open({str(number)!r}, 'w').write(str(bpf.attached(cgroup)[0][-1]))\n"
    )
    script = WORK / "attach.py"
    script.write_text(code)
    systemctl(f'exec {sys.executable} {script} "$@"')
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
            "engine": engine,
            "systemd-v1": partial(systemd, 1),
            "systemd-v2": partial(systemd, 2),
        }
    )
