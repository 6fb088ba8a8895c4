# SPDX-License-Identifier: Apache-2.0
"""Reports of faults at a container's start, each built as its input and asserted as what is right.

The real launcher and shim, on simulated hosts, with a low-level runtime that records its call.
`docs/reference/bug-reports.md` has a row for each, with the line that the test prints as observed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import reachable
from shim_host import LAUNCHER, PROGRAM, RUNTIMES, Call, ShimHost, asking

VISIBLE = "NVIDIA_VISIBLE_DEVICES="
ALL = f"{VISIBLE}all"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES="
RUNTIME = "nvidia-container-runtime"
MODE = f"{RUNTIME}.mode"
BY_VARIABLE = "accept-nvidia-visible-devices-envvar-when-unprivileged"
BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
ONLY_MOUNTS = {BY_VARIABLE: False, BY_MOUNTS: True}
LOAD = "nvidia-container-cli.load-kmods"
ROOT_OF_DRIVER = "nvidia-container-cli.root"
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
PRIVILEGED = {"bounding": ["CAP_CHOWN", "CAP_SYS_ADMIN"]}
# As a rootless engine, or one in a container with id mappings, calls the runtime.
IN_USER_NAMESPACE = ("unshare", "--user", "--map-root-user")
MAPPED = {
    "namespaces": [{"type": "mount"}, {"type": "user"}],
    "uidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}],
    "gidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}],
}
# What a start may not touch: the devices of a cgroup are the low-level runtime's.
OUT_OF_BAND = re.compile(r'\bbpf\(|"/sys/fs/cgroup|/devices\.(allow|deny)"')
SPEC: dict[str, object] = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {
            "name": name,
            "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{name}"}]},
        }
        for name in ("0", "1", "2", "3")
    ],
    "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
}

pytestmark = pytest.mark.system("unshare", "strace")

Hosts = Callable[..., ShimHost]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShimHost]:
    """One host for all tests that leave it as it was: four GPUs, a CDI spec of them."""
    with ShimHost(tmp_path_factory.mktemp("host"), "--gpus", "4") as started:
        with_spec(started, SPEC)
        yield started


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Return what starts a host of the test's own."""
    with ExitStack() as stack:

        def start(*options: str) -> ShimHost:
            place = tmp_path / str(len(list(tmp_path.iterdir())))
            place.mkdir()
            return stack.enter_context(ShimHost(place, *options))

        yield start


def observed(line: str) -> None:
    """Print the line that shows what came of the input; `pytest -rP` passes it on."""
    print("observed:", re.sub(r"/[^ \"]*/(host|test_b)\d[^/ \"]*(/\d+)?", "/test", line).strip())


def with_spec(host: ShimHost, spec: dict[str, object], path: str = "/etc/cdi/gpus.json") -> None:
    """Give *host* a CDI spec."""
    file = host.place / "spec.json"
    file.write_text(json.dumps(spec))
    host.shell(f"install -D -m 644 {file} {path}")


def mount_request(*names: str) -> list[dict[str, str]]:
    """Return the mounts that ask for the devices *names*."""
    root = "/var/run/nvidia-container-devices"
    return [{"destination": f"{root}/{name}", "source": "/dev/null"} for name in names]


def numbers(host: ShimHost) -> dict[str, tuple[int, int]]:
    """Return path → numbers of the driver's nodes in the host's /dev."""
    told = host.shell("find /dev -type c -exec stat -c '%n %Hr %Lr' {} +")
    words = (line.split() for line in told.splitlines())
    return {path: (int(major), int(minor)) for path, major, minor in words}


def loaded(host: ShimHost, major: int) -> None:
    """Let the module for unified memory have this number, and its second node too."""
    host.shell(
        f"rm /dev/nvidia-uvm-tools; mknod -m 666 /dev/nvidia-uvm-tools c {major} 1;"
        f"sed 's/.* nvidia-uvm$/{major} nvidia-uvm/' /proc/devices > /run/devices{major};"
        f"mount --bind /run/devices{major} /proc/devices"
    )


def rules(call: Call) -> list[tuple[str, int, int, str]]:
    """Return the device rules that allow something, as (type, major, minor, access)."""
    found = call.config["linux"]["resources"]["devices"]
    return [(r["type"], r["major"], r["minor"], r["access"]) for r in found if r["allow"]]


def traced(host: ShimHost, *behind: str) -> tuple[Call, list[str]]:
    """Return a create with every GPU, after *behind*, and what it did that touches cgroups."""
    trace = host.place / "trace"
    tracer = ("strace", "-f", "-o", str(trace), "-e", "trace=%file,bpf")
    # What is looked for is seen where somebody does it.
    host.run(*tracer, "sh", "-c", "true > /sys/fs/cgroup/none/devices.allow")
    assert OUT_OF_BAND.search(trace.read_text())
    call = host.create(asking(ALL), prefix=(*behind, *tracer))
    assert call.gpus == [0, 1, 2, 3]
    lines = trace.read_text().splitlines()
    assert any("config.json" in line for line in lines)
    return call, [line for line in lines if OUT_OF_BAND.search(line)]


def test_b001_every_node_is_in_the_config(hosts: Hosts) -> None:
    """systemd, which sets the rules again on a reload, has them from there, by links in /dev."""
    host = hosts("--gpus", "4")
    document = asking(ALL, linux={"cgroupsPath": "system.slice:docker:0123"})
    call = host.create(document)
    there = numbers(host)
    assert call.gpus == [0, 1, 2, 3]
    assert set(call.nodes) >= CONTROL
    for path, found in call.nodes.items():
        assert found == there[path]
        assert rules(call).count(("c", *found, "rw")) == 1
    assert all(node["type"] == "c" for node in call.config["linux"]["devices"])
    assert len(rules(call)) == len(call.nodes)
    (warning,) = call.said("warning")
    assert "/dev/nvidia3" in warning
    assert '"systemctl daemon-reload"' in warning
    observed(json.dumps(call.config["linux"]["resources"]["devices"][-1]))
    # Who does not use systemd's cgroups loses nothing.
    for path in ("/docker/0123", None):
        assert host.create(asking(ALL, linux={"cgroupsPath": path})).said("warning") == []
    links = "; ".join(
        f"ln -sf {path} /dev/char/{major}:{minor}" for path, (major, minor) in there.items()
    )
    host.shell(f"mkdir -p /dev/char; {links}")
    assert host.create(document).said("warning") == []


def test_b002_a_user_namespace_has_the_nodes_that_there_are(hosts: Hosts) -> None:
    """Nothing is made, loaded or allowed there; where a node lies elsewhere, it is bound."""
    host = hosts("--gpus", "2")
    host.shell("printf '#!/bin/sh\\necho $* >> /run/loaded' > /usr/bin/nvidia-modprobe")
    host.shell("chmod 755 /usr/bin/nvidia-modprobe")
    document = asking(f"{VISIBLE}1", linux=MAPPED)
    call = host.create(document)
    assert call.gpus == [1]
    assert set(call.nodes) >= CONTROL
    assert call.nodes.items() <= numbers(host).items()

    root = "/run/nvidia/driver"
    host.shell(f"mkdir -p {root}/dev; mount --rbind / /mnt; mount --move /mnt {root}; ")
    host.shell(f"mount -t tmpfs dev {root}/dev; mv /dev/nvidia* {root}/dev")
    call = host.create(document, {ROOT_OF_DRIVER: root})
    assert call.gpus == []
    bound = {m["destination"]: m["source"] for m in call.config["mounts"]}
    assert bound["/dev/nvidia1"] == f"{root}/dev/nvidia1"
    assert ("c", 195, 1, "rw") in rules(call)

    host.shell(f"rm {root}/dev/nvidia-uvm")
    error = host.create(document, {ROOT_OF_DRIVER: root}, prefix=IN_USER_NAMESPACE).error
    assert f'"{root}/dev/nvidia-uvm"' in error
    assert f'pass "{root}/dev/nvidia-uvm" into this container on its host' in error
    assert host.run("cat", "/run/loaded").stdout == ""
    observed(error.split("\n")[1])


def test_b015_a_gpu_if_there_is_one(hosts: Hosts) -> None:
    """Only where the operator says so, and with a note; else a GPU that is not there is told."""
    host = hosts("--gpus", "1", "--fault", "init-fails 9")
    error = host.create(asking(ALL)).error
    assert error.startswith("initialization: ")
    assert "Driver Not Loaded" in error
    call = host.create(asking(ALL), {"missing-gpu": "warn"})
    assert call.nodes == {}
    assert call.after == call.before
    (warning,) = call.said("warning")
    assert warning.startswith("starts without what it asks for: ")
    assert "Driver Not Loaded" in warning
    observed(re.sub(r" \(.*", "", warning))


def test_b016_a_build_calls_run(host: ShimHost) -> None:
    """BuildKit's worker calls `run` in place of `create`: a step gets what its image requests."""
    build = ("run", "--bundle", "{bundle}", "--keep", "id")
    call = host.create(asking(ALL), arguments=build)
    assert call.gpus == [*range(4)]
    assert call.arguments is not None
    assert call.arguments[-5:-3] == ["run", "--bundle"]
    # A step that BuildKit itself gave CDI devices of our specs is left as it is.
    by_buildkit = {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]}
    done = host.create(asking(f"{VISIBLE}void", linux=by_buildkit), arguments=build)
    assert done.after == done.before
    assert done.gpus == [0]
    observed(f"run: {len(call.gpus)} GPUs; with CDI devices of BuildKit: {len(done.gpus)}")


def test_b019_nothing_of_ours_edits_a_cgroup(host: ShimHost) -> None:
    """In a user namespace, without any setting, as everywhere."""
    call, found = traced(host, *IN_USER_NAMESPACE)
    assert found == []
    assert set(call.nodes) >= CONTROL
    observed(f"exit status {call.returncode}; bpf() or files of cgroups: {len(found)}")


def test_b020_one_config_for_root_and_for_others(host: ShimHost) -> None:
    """The same file, with the key either way; the namespace is told by each call itself."""
    found = []
    for value in (False, True):
        for prefix in ((), IN_USER_NAMESPACE):
            call = host.create(
                asking(f"{VISIBLE}0"), {"nvidia-container-cli.no-cgroups": value}, prefix=prefix
            )
            found.append((call.nodes, rules(call)))
    assert len(found[0][0]) > len(CONTROL)
    assert all(each == found[0] for each in found)
    observed(f"nodes: {', '.join(len(found) * [str(len(found[0][0]))])}")


@reachable.by_others
def test_b021_spec_directories_that_are_links_or_cannot_be_read(hosts: Hosts) -> None:
    """A link is followed, and a directory that gives nothing does not hide the next."""
    host = hosts("--gpus", "4")
    specs = "/run/specs"
    with_spec(host, SPEC, f"{specs}/gpus.json")
    host.shell("umount /etc/cdi /run/cdi; rmdir /etc/cdi /run/cdi")
    host.shell(f"ln -s {specs} /etc/cdi")
    document = asking(f"{VISIBLE}nvidia.com/gpu=2")
    assert host.create(document).gpus == [2]
    # Root reads everything: a directory that is none stands for one that cannot be read.
    host.shell(f"rm /etc/cdi; echo > /etc/cdi; ln -s {specs} /run/cdi")
    call = host.create(document)
    assert call.gpus == [2]
    observed(f"devices: {', '.join(path for path in call.nodes)}")
    # The user's own directories are for the user's programs.
    host.shell(f"rm /etc/cdi /run/cdi; mkdir /run/home; mv {specs} /run/home/cdi")
    as_user = ("setpriv", "--reuid", "1000", "--clear-groups")
    listed = host.run(*as_user, PROGRAM, "cdi", "list", XDG_CONFIG_HOME="/run/home")
    assert "nvidia.com/gpu=2" in listed.stdout, listed.stderr


def test_b036_library_and_module_of_two_versions(hosts: Hosts) -> None:
    """Both versions, and what to do."""
    host = hosts("--gpus", "1")
    host.shell(
        "sed 's/550.163.01/550.90.07/' /proc/driver/nvidia/version > /run/version; "
        "cp /run/version /proc/driver/nvidia/version"
    )
    error = host.create(asking(ALL)).error
    assert error.startswith("initialization: ")
    assert "550.90.07" in error
    assert "550.163.01" in error
    assert "hint: reboot" in error
    observed(error.split("\n")[0])


def test_b037_swarm_reserves_by_its_own_variable(host: ShimHost) -> None:
    """What the node advertises, UUIDs or starts of them, goes before the image's variable."""
    uuids = re.findall(r"UUID: (\S+)\)", host.run("nvidia-smi", "-L").stdout)
    config = {"swarm-resource": "DOCKER_RESOURCE_GPU, DOCKER_RESOURCE_CARD"}
    call = host.create(asking(ALL, f"DOCKER_RESOURCE_GPU={uuids[2]}"), config)
    assert call.gpus == [2]
    both = ("DOCKER_RESOURCE_CARD=GPU-5f1e0001", f"DOCKER_RESOURCE_GPU={uuids[2]},{uuids[0]}")
    assert host.create(asking(ALL, *both), config).gpus == [0, 1, 2]
    assert host.create(asking(ALL, "DOCKER_RESOURCE_GPU="), config).nodes == {}
    assert host.create(asking(ALL, "OTHER=1"), config).gpus == [0, 1, 2, 3]
    observed(f"DOCKER_RESOURCE_GPU={uuids[2]}: GPUs {call.gpus}")


def test_b039_nodes_of_a_group(hosts: Hosts) -> None:
    """The process has the group, the node its mode and owner, whatever `user` is set to."""
    host = hosts("--gpus", "1")
    host.shell("chgrp 1044 /dev/nvidia0; chmod 660 /dev/nvidia0; chmod 1231 /dev/nvidiactl")
    for config in ({}, {"nvidia-container-cli.user": "root:video"}):
        call = host.create(asking(f"{VISIBLE}0"), config)
        found = {node["path"]: node for node in call.config["linux"]["devices"]}
        assert 1044 in call.config["process"]["user"]["additionalGids"]
        assert found["/dev/nvidia0"]["gid"] == 1044
        assert found["/dev/nvidia0"]["fileMode"] == 0o660
        assert found["/dev/nvidiactl"]["fileMode"] == 0o1231
    observed(json.dumps(found["/dev/nvidia0"]))


def test_b040_requirements_that_are_not_met(host: ShimHost) -> None:
    """What was found, what is needed, and how to start all the same."""
    asked = (
        f"{VISIBLE}0",
        "NVIDIA_REQUIRE_CUDA=cuda>=12.8 brand=tesla,driver>=470,driver<471",
    )
    error = host.create(asking(*asked)).error
    assert error.startswith("requirement: ")
    assert "cuda>=12.8 (cuda=12.4)" in error
    assert "brand=tesla" in error
    assert "NVIDIA_DISABLE_REQUIRE=1" in error
    observed(error.split("\n")[0])
    for word in ("1", "true"):
        assert host.create(asking(*asked, f"NVIDIA_DISABLE_REQUIRE={word}")).gpus == [0]
    assert "cuda>=12.8" in host.create(asking(*asked, "NVIDIA_DISABLE_REQUIRE=0")).error
    assert host.create(asking(*asked), {"disable-require": True}).gpus == [0]
    # Either alternative will do, all parts of it together.
    met = "NVIDIA_REQUIRE_CUDA=cuda>=12.8 brand=nvidia,driver>=550,driver<551"
    assert host.create(asking(f"{VISIBLE}0", met)).gpus == [0]


def test_b041_an_unknown_device_and_those_that_there_are(hosts: Hosts) -> None:
    """An index counts the devices that the driver shows; MIG devices by index and by UUID."""
    host = hosts("--gpus", "4", "--mig", "0:2")
    error = host.create(asking(f"{VISIBLE}4")).error
    assert error.startswith('device: there is no device "4"; ')
    assert error.split("\n")[0].endswith(": 0, 1, 2, 3, 0:0, 0:1")
    observed(error.split("\n")[0])
    told = host.run("nvidia-smi", "-L").stdout
    (uuid,) = re.findall(r"Device +1: \(UUID: (\S+)\)", told)
    (parent,) = re.findall(r"GPU 0: .*\(UUID: (\S+)\)", told)
    ids = ("0:1", "0/1", uuid, f"MIG-{parent}/8/0")
    found = [set(host.create(asking(f"{VISIBLE}{name}")).nodes) for name in ids]
    assert all(each == found[0] for each in found)
    assert "/dev/nvidia0" in found[0]
    assert len([path for path in found[0] if path.startswith("/dev/nvidia-caps/")]) == 2
    error = host.create(asking(f"{VISIBLE}MIG-{parent}/1/0")).error
    assert f'there is no device "MIG-{parent}/1/0"; ' in error


def test_b059_commands_that_create_nothing_log_nothing(host: ShimHost) -> None:
    """A probe that runs in the container every few seconds."""
    created = host.create(asking(ALL))
    assert created.records != []
    log, rest = host.place / "probes.json", ("--log-format", "json")
    config = str(host.write_config({f"{RUNTIME}.log-level": "info"}))
    probe = f"'{LAUNCHER}' --log {log} {' '.join(rest)} exec --process /p.json id"
    script = f"n=0; while [ $n -lt 200 ]; do {probe}; n=$((n+1)); done; cat $RECORD"
    record = {"GPURUNTIME_CONFIG": config, "RECORD": str(host.place / "record")}
    done = host.run("sh", "-euc", script, **record)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[4:6] == ["exec", "--process"]
    size = log.stat().st_size if log.exists() else 0
    assert size == 0
    assert host.create(asking(ALL), arguments=("kill", "id", "KILL")).records == []
    # Nor does a container that asks for nothing.
    assert host.create(asking()).records == []
    observed(f"200 times exec: {size} bytes in the --log file")


def test_b060_a_log_that_cannot_be_written_and_a_bad_runtime(host: ShimHost) -> None:
    """No log is worth a container; without a runtime, the engine's log says why."""
    for path in ("/proc/none/x.log", "/run/no/such/x.log", "/etc"):
        assert host.create(asking(ALL), {f"{RUNTIME}.debug": path}).gpus == [0, 1, 2, 3]
        arguments = ("--log", path, "create", "--bundle", "{bundle}", "id")
        assert host.create(asking(ALL), arguments=arguments).gpus == [0, 1, 2, 3]
    host.shell("mkdir -p /run/read-only; mount -t tmpfs -o ro none /run/read-only")
    call = host.create(asking(ALL), {f"{RUNTIME}.debug": "/run/read-only/x.log"})
    assert call.gpus == [0, 1, 2, 3]

    plain = host.place / "plain"
    plain.write_text("")
    call = host.create(asking(ALL), {RUNTIMES: ["/etc", str(plain)]})
    assert call.returncode == 127
    assert 'searched for "/etc" (not a program), ' in call.error
    assert "runtimes" in call.error
    assert set(call.records[-1]) == {"level", "msg", "time"}
    observed(call.error.split("\n")[0])


def test_b061_the_hook_of_the_engine_in_mode_cdi(host: ShimHost) -> None:
    """It is taken away, and others stay; the devices are the spec's."""
    other = {"path": "/usr/bin/other", "args": ["other"]}
    for name in (f"{RUNTIME}-hook", "nvidia-container-toolkit", "gpu-container-runtime-hook"):
        hook = {"path": f"/usr/bin/{name}", "args": [name, "prestart"]}
        hooks = {"prestart": [hook, other]}
        call = host.create(asking(f"{VISIBLE}1", hooks=hooks), {MODE: "cdi"})
        assert call.config["hooks"]["prestart"] == [other]
        assert call.gpus == [1]
        # Also where nothing is asked for: it would only fail.
        call = host.create(asking(hooks={"prestart": [hook]}), {MODE: "cdi"})
        assert "prestart" not in call.config.get("hooks", {})
    observed(f"prestart hooks: {json.dumps([other['path']])}; devices: /dev/nvidia1")


def test_b070_a_running_container_is_left_as_it_is(host: ShimHost) -> None:
    """No command gives it a GPU, nor takes one: what an engine may call goes through."""
    for words in (
        ("update", "--resources", "/r.json", "id"),
        ("exec", "--env", f"{VISIBLE}1", "id", "true"),
        ("start", "id"),
    ):
        call = host.create(asking(ALL), arguments=words)
        assert call.after == call.before
        assert call.arguments is not None
        assert call.arguments[4:] == list(words)
        assert call.records == []
    observed(f"{' '.join(call.arguments[4:])}: passed through, config.json unchanged")


def test_b072_no_device_filter_is_written(host: ShimHost) -> None:
    """So that no kernel can refuse one; and no message is longer than a screen."""
    call, found = traced(host)
    assert found == []
    long = host.create(asking(f"{VISIBLE}{'x' * 60000}"))
    assert len(long.stderr) < 500
    observed(f"bpf(): {len(found)}; devices: {len(call.nodes)}")


def test_b074_majors_of_now_and_nodes_that_are_not_there_yet(hosts: Hosts) -> None:
    """Numbers are read when the container is made; a missing node is made, or named."""
    host = hosts("--gpus", "1")
    document = asking(f"{VISIBLE}0")
    before = numbers(host)["/dev/nvidia-uvm"]
    assert host.create(document).nodes["/dev/nvidia-uvm"] == before != (509, 0)
    host.shell("rm /dev/nvidia-uvm; mknod -m 666 /dev/nvidia-uvm c 509 0")
    # Of the number before the module was loaded again, now another driver's or nobody's.
    error = host.create(document, {LOAD: False}).error
    assert '"/dev/nvidia-uvm" is device c 509:0, which does not match its name' in error
    loaded(host, 509)
    call = host.create(document)
    assert call.nodes["/dev/nvidia-uvm"] == (509, 0)
    assert ("c", 509, 0, "rw") in rules(call)
    assert ("c", *before, "rw") not in rules(call)

    host.shell("rm /dev/nvidia-uvm")
    host.shell(
        "printf '#!/bin/sh\\necho $* >> /run/loaded\\nmknod -m 666 /dev/nvidia-uvm c 508 0\\n'"
        " > /usr/bin/nvidia-modprobe; chmod 755 /usr/bin/nvidia-modprobe"
    )
    error = host.create(document, {LOAD: False}).error
    assert '"/dev/nvidia-uvm"' in error
    assert "create-device-nodes --all --load-kernel-modules" in error
    observed(error.split("\n")[0])
    loaded(host, 508)
    assert host.create(document).nodes["/dev/nvidia-uvm"] == (508, 0)
    assert host.shell("cat /run/loaded").splitlines() == ["-u -c 0"]
    # Who needs no unified memory does without.
    host.shell("rm /dev/nvidia-uvm")
    call = host.create(asking(f"{VISIBLE}0", f"{CAPABILITIES}utility"), {LOAD: False})
    assert "/dev/nvidia-uvm" not in call.nodes


def test_b075_podman_keep_id_and_control_nodes(hosts: Hosts) -> None:
    """A kernel without some DRM nodes is no fault; a spec that names one is told from it."""
    host = hosts("--gpus", "1", "--fault", "nonode dri/card*")
    keep_id = [
        {"containerID": 0, "hostID": 1, "size": 1000},
        {"containerID": 1000, "hostID": 0, "size": 1},
        {"containerID": 1001, "hostID": 1001, "size": 64536},
    ]
    linux = {**MAPPED, "uidMappings": keep_id, "gidMappings": keep_id}
    document = asking(ALL, linux=linux)
    document["process"]["user"] = {"uid": 1000, "gid": 1000}
    call = host.create(document)
    assert call.gpus == [0]
    assert not any(path.startswith(("/dev/dri/card", "/dev/dri/control")) for path in call.nodes)
    assert call.config["linux"]["uidMappings"] == keep_id
    hooks = call.config.get("hooks", {})
    assert "prestart" not in hooks
    missing = "/dev/dri/controlD69"
    device = {"name": "0", "containerEdits": {"deviceNodes": [{"path": missing}]}}
    with_spec(host, {**SPEC, "devices": [device]})
    error = host.create(document | asking(f"{VISIBLE}nvidia.com/gpu=0")).error
    assert f'"{missing}"' in error
    assert '"gpuruntime cdi refresh --output ' in error
    observed(error.split("\n")[0])


def test_b076_no_hook_changes_modes(host: ShimHost) -> None:
    """Where /dev is the host's, and mapped, there is nothing that can fail."""
    dev = {"destination": "/dev", "source": "/dev", "options": ["rbind", "rslave"]}
    document = asking(ALL, mounts=[dev], linux=MAPPED)
    document["process"]["capabilities"] = PRIVILEGED
    call = host.create(document)
    assert call.gpus == [0, 1, 2, 3]
    hooks = [hook for stage in call.config["hooks"].values() for hook in stage]
    words = [word for hook in hooks for word in hook["args"]]
    assert "chmod" not in words
    assert "755" not in words
    observed(f"hooks: {', '.join(hook['args'][1] for hook in hooks)}")


def test_b077_an_engine_in_a_container_with_id_mappings(hosts: Hosts) -> None:
    """For its root and its users: the nodes that the outer container has; nothing is loaded."""
    host = hosts("--gpus", "2")
    host.shell("printf '#!/bin/sh\\necho $* >> /run/loaded' > /usr/bin/nvidia-modprobe")
    host.shell("chmod 755 /usr/bin/nvidia-modprobe")
    calls = []
    for uid in (0, 1000):
        document = asking(ALL)
        document["process"]["user"] = {"uid": uid, "gid": uid}
        call = host.create(document, prefix=IN_USER_NAMESPACE)
        assert call.gpus == [0, 1]
        assert call.nodes.items() <= numbers(host).items()
        calls.append(call)
    host.shell("rm /dev/nvidia-uvm")
    error = host.create(document, prefix=IN_USER_NAMESPACE).error
    assert '"/dev/nvidia-uvm"' in error
    assert host.run("cat", "/run/loaded").stdout == ""
    observed(error.split("\n")[0])
    # A group that is not mapped is shown as this one, and cannot be had.
    for call in calls:
        assert 65534 not in call.config["process"]["user"].get("additionalGids", [])
        assert all(node.get("gid") != 65534 for node in call.config["linux"]["devices"])


def test_b079_images_that_ask_start_without(host: ShimHost) -> None:
    """With the safe setting and no allocation: no GPU, a line in the log, and no failure."""
    call = host.create(asking(ALL), ONLY_MOUNTS)
    assert call.after == call.before
    (warning,) = call.said("warning")
    assert "unprivileged" in warning
    assert BY_VARIABLE in warning
    observed(warning)
    privileged = asking(ALL)
    privileged["process"]["capabilities"] = PRIVILEGED
    assert host.create(privileged, ONLY_MOUNTS).gpus == [0, 1, 2, 3]


def test_b080_one_way_to_ask_counts(host: ShimHost) -> None:
    """Annotations, else mounts, else variables; never what two of them say together."""
    mounts = mount_request("2", "3")
    for config in (ONLY_MOUNTS, {BY_MOUNTS: True}):
        call = host.create(asking(f"{VISIBLE}0,1", mounts=mounts), config)
        assert call.gpus == [2, 3]
        assert any('NVIDIA_VISIBLE_DEVICES "0", "1"' in line for line in call.said("warning"))
    annotations = {"cdi.k8s.io/plugin": "nvidia.com/gpu=1"}
    for mode in ("cdi", "auto"):
        document = asking(f"{VISIBLE}0", mounts=mounts, annotations=annotations)
        call = host.create(document, {BY_MOUNTS: True, MODE: mode})
        assert call.gpus == [1]
        assert len(call.said("warning")) == 2
    observed(call.said("warning")[0])


def test_b081_a_misspelt_key_is_told(host: ShimHost) -> None:
    """By the container's log, by `config check`, and by what `config show` has in force."""
    typo = "accept-nvidia-visible-devices-as-volume-mount"
    document = asking(f"{VISIBLE}0", mounts=mount_request("1"))
    call = host.create(document, {typo: True, BY_VARIABLE: False})
    assert call.gpus == []
    (warning,) = [line for line in call.said("warning") if typo in line.split('"')]
    assert f'"{BY_MOUNTS}"' in warning
    observed(re.sub(r'^"[^"]*" ', "", warning))
    environment = {"GPURUNTIME_CONFIG": str(host.place / "config.toml")}
    checked = host.run(PROGRAM, "config", "check", **environment)
    assert checked.returncode == 1
    assert f'"{BY_MOUNTS}"' in checked.stdout
    shown = host.run(PROGRAM, "config", "show", **environment).stdout.splitlines()
    assert f"{BY_MOUNTS} = false  # default" in shown
    assert f"{BY_VARIABLE} = false  # file" in shown


def test_b082_privileged_containers_have_every_gpu(host: ShimHost) -> None:
    """They can open what they make; that is told, unless they ask for every GPU."""
    open_to_all = {"resources": {"devices": [{"allow": True, "access": "rwm"}]}}
    document = asking(f"{VISIBLE}1", linux=open_to_all)
    document["process"]["capabilities"] = PRIVILEGED
    call = host.create(document)
    assert call.gpus == [1]
    (warning,) = call.said("warning")
    assert "privileged" in warning
    observed(warning)
    document["process"]["env"][-1] = ALL
    assert host.create(document).said("warning") == []
    closed = {"resources": {"devices": [{"allow": False, "access": "rwm"}]}}
    document = asking(f"{VISIBLE}1", linux=closed)
    document["process"]["capabilities"] = PRIVILEGED
    assert host.create(document).said("warning") == []


def test_b084_none_is_the_driver_without_a_gpu(host: ShimHost) -> None:
    """Files by capability, and control nodes only."""
    for mode in ("auto", "jit-cdi"):
        call = host.create(asking(f"{VISIBLE}none"), {MODE: mode})
        assert set(call.nodes) == CONTROL
        assert any(name.startswith("libcuda.so.") for name in call.mounted)
        assert f"{VISIBLE}void" in call.environment
    observed(f"devices: {', '.join(sorted(call.nodes))}; mounts: {len(call.mounted)}")


def test_b085_void_is_nothing(host: ShimHost) -> None:
    """As an engine sets it for no GPUs: over the image's `all`, which comes before."""
    for env in ([f"{VISIBLE}void"], [ALL, f"{VISIBLE}void"], [f"{VISIBLE}0,void"], [VISIBLE]):
        call = host.create(asking(*env))
        assert call.after == call.before
        assert call.records == []
    observed("config.json: unchanged")


def test_b086_who_injected_leaves_a_mark(host: ShimHost) -> None:
    """The variable is replaced, wherever it is repeated the last counts, and twice is once."""
    once = host.create(asking(ALL, f"{VISIBLE}1"))
    assert once.gpus == [1]
    assert [entry for entry in once.environment if VISIBLE in entry][-1] == f"{VISIBLE}void"
    twice = host.create(once.config)
    assert twice.after == twice.before == json.dumps(once.config).encode()

    # In the legacy mode the mark would be the hook's own request; the devices are there once.
    legacy = {MODE: "legacy", f"{RUNTIME}-hook.path": "/usr/bin/true"}
    once = host.create(asking(f"{VISIBLE}1"), legacy)
    assert once.gpus == [1]
    assert host.create(once.config, legacy).config == once.config
    # What has denied them since does not count twice.
    denied = once.config
    denied["linux"]["resources"]["devices"].append({"allow": False, "access": "rwm"})
    assert len(rules(host.create(denied, legacy))) > len(rules(once)) + 1

    # An engine has added GPU 0 by CDI, and the image asks for all.
    devices = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]
    document = asking(
        ALL,
        f"{VISIBLE}void",
        linux={"devices": devices},
        annotations={"cdi.k8s.io/plugin": "nvidia.com/gpu=1"},
        mounts=mount_request("2"),
    )
    call = host.create(document, {BY_MOUNTS: True, MODE: "cdi"})
    assert call.gpus == [0]
    assert call.after == call.before
    observed(call.said("warning")[0])


def test_b087_words_for_driver_capabilities(host: ShimHost) -> None:
    """Unset and empty are the default; a word that is none is told with those that there are."""
    mounted = {}
    for value in (None, "", "compute,utility", " compute , utility ", "utilities", "ALL", "all"):
        env = [] if value is None else [CAPABILITIES + value]
        call = host.create(asking(f"{VISIBLE}0", *env))
        mounted[value] = call.mounted
        unknown = [line for line in call.said("warning") if "not a supported capability" in line]
        assert len(unknown) == (value in ("utilities", "ALL")), value
        if unknown:
            assert unknown[0].endswith("compat32, compute, display, graphics, ngx, utility, video")
            told = unknown[0]
    default = mounted.pop("compute,utility")
    every = mounted.pop("all")
    assert set(every) > set(default)
    assert {"libcuda.so.550.163.01", "nvidia-smi"} <= set(default)
    assert all(names == default for names in mounted.values())
    config = {"supported-driver-capabilities": "compute,utility"}
    assert host.create(asking(ALL, f"{CAPABILITIES}all"), config).mounted == default
    error = host.create(asking(ALL, f"{CAPABILITIES}utilities"), {MODE: "legacy"}).error
    assert '"utilities"' in error
    assert "compat32,compute,display,graphics,ngx,utility,video" in error
    observed(told)


def test_b089_encoders_need_video(host: ShimHost) -> None:
    """Without it, the log says what brings the files that were left out."""
    wanted = {"libnvidia-encode.so.550.163.01", "libnvcuvid.so.550.163.01"}
    call = host.create(asking(f"{VISIBLE}0"))
    assert not wanted & set(call.mounted)
    (told,) = [line for line in call.said("info") if "left out" in line]
    assert "video" in told
    assert "NVIDIA_DRIVER_CAPABILITIES" in told
    observed(told)
    call = host.create(asking(f"{VISIBLE}0", f"{CAPABILITIES}video"))
    assert wanted | {"libcuda.so.550.163.01"} <= set(call.mounted)
    call = host.create(
        asking(f"{VISIBLE}0"), {f"{RUNTIME}.modes.jit-cdi.driver-capabilities": "all"}
    )
    assert wanted <= set(call.mounted)


def test_b090_two_resources_of_mig_devices(hosts: Hosts) -> None:
    """One value for each variable is all that there is; mounts and CDI names add up."""
    host = hosts("--gpus", "2", "--mig", "0:2", "--mig", "1:1")
    uuids = re.findall(r"\(UUID: (MIG-\S+)\)", host.run("nvidia-smi", "-L").stdout)
    mounts = mount_request(uuids[0], uuids[2])
    call = host.create(asking(mounts=mounts), {BY_MOUNTS: True})
    assert call.gpus == [0, 1]
    caps = [path for path in call.nodes if path.startswith("/dev/nvidia-caps/")]
    assert len(caps) == 4
    observed(", ".join(caps))
    host.shell(f"'{PROGRAM}' cdi generate --output /etc/cdi/nvidia.json 2>/run/told")
    annotations = {
        "cdi.k8s.io/first": f"nvidia.com/gpu={uuids[0]}",
        "cdi.k8s.io/second": f"nvidia.com/gpu={uuids[2]}",
    }
    call = host.create(asking(annotations=annotations))
    assert set(caps) <= set(call.nodes)
    assert call.gpus == [0, 1]


def test_b091_an_index_is_not_a_minor_number(hosts: Hosts) -> None:
    """The node is that of the minor number, by whatever name the GPU is asked for."""
    host = hosts("--gpus", "4")
    # GPU 0 has minor 3, GPU 1 minor 0, GPU 2 minor 1, GPU 3 minor 2.
    host.shell(
        "for gpu in 0 1 2 3; do minor=$(((gpu + 3) % 4)); "
        'sed -i "s/^\\(gpu GPU-5f1e000$gpu[^ ]*\\) [0-9]*/\\1 $minor/" "$SIMHOST_CONF"; '
        "file=$(grep -l GPU-5f1e000$gpu /proc/driver/nvidia/gpus/*/information); "
        'sed "s/^\\(Device Minor:.*\\)[0-9]/\\1$minor/" "$file" > /run/information; '
        'cp /run/information "$file"; done'
    )
    (uuid,) = re.findall(r"GPU 0: .*\(UUID: (\S+)\)", host.run("nvidia-smi", "-L").stdout)
    for name in ("0", uuid, "GPU-5f1e0000", uuid.lower(), "0000:1a:00.0"):
        call = host.create(asking(VISIBLE + name))
        assert call.nodes["/dev/nvidia3"] == (195, 3)
        assert call.gpus == [3], name
    assert host.create(asking(f"{VISIBLE}1,3")).gpus == [0, 2]
    assert "prefix of several UUIDs" in host.create(asking(f"{VISIBLE}GPU-5f1e000")).error
    observed(f"{VISIBLE}0: /dev/nvidia3")


def test_b092_pci_addresses_stay_the_same(hosts: Hosts) -> None:
    """In every spelling; an index is another GPU when the driver counts in another order."""
    host = hosts("--gpus", "4")
    spellings = ("0000:8a:00.0", "00000000:8A:00.0", "0000:8A:00.0", "8a:00.0")
    host.shell("sed -i s/0000:4a:00.0/0000:8a:00.0/ $SIMHOST_CONF")
    first = {name: host.create(asking(VISIBLE + name)).gpus for name in (*spellings, "2")}
    assert all(gpus == [2] for gpus in first.values())
    # The next boot: another order, and nothing is remembered.
    host.shell(
        'grep ^gpu "$SIMHOST_CONF" | tac > /run/gpus; sed -i /^gpu/d "$SIMHOST_CONF"; '
        'cat /run/gpus >> "$SIMHOST_CONF"; rm -r /run/gpuruntime/*'
    )
    second = {name: host.create(asking(VISIBLE + name)).gpus for name in (*spellings, "2")}
    assert second.pop("2") == [1]
    assert all(gpus == [2] for gpus in second.values())
    observed(f"{VISIBLE}{spellings[1]}: GPUs {second[spellings[1]]}, in either order")


def test_b051_parts_that_are_missing_and_drivers_of_other_names(hosts: Hosts) -> None:
    """The container starts with what exists, and the log says what does not."""
    host = hosts("--gpus", "1", "--feature", "mofed", "--feature", "gdrcopy")
    features = ["NVIDIA_MOFED=enabled", "NVIDIA_GDRCOPY=enabled", "NVIDIA_GDS=enabled"]
    call = host.create(asking(ALL, *features))
    nodes = {"/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0", "/dev/gdrdrv"}
    assert nodes <= set(call.nodes)
    assert "NVIDIA_GDS=enabled adds nothing" in " ".join(call.said("info"))
    assert call.said("warning") == []
    host.shell(
        "rm /dev/infiniband/rdma_cm; sed 's/ gdrdrv$/ gdrdrv-next/' /proc/devices > /run/devices; "
        "mount --bind /run/devices /proc/devices"
    )
    call = host.create(asking(ALL, *features))
    assert nodes & set(call.nodes) == {"/dev/infiniband/uverbs0", "/dev/gdrdrv"}
    assert 'no device node "/dev/infiniband/rdma_cm"' in " ".join(call.said("info"))
    (warning,) = call.said("warning")
    assert 'of the driver "gdrdrv-next", which is not known to have it' in warning
    host.shell(
        "sed 's/ gdrdrv-next$/ hidraw/' /run/devices > /run/next; cat /run/next > /run/devices"
    )
    error = host.create(asking(ALL, *features)).error
    assert '"/dev/gdrdrv"' in error
    assert "does not match its name" in error


def test_b094_channels_only_where_they_are_asked_for(host: ShimHost, hosts: Hosts) -> None:
    """A host without them is no fault, nor is the value of the other variable."""
    imex = "NVIDIA_IMEX_CHANNELS="
    for env in ([], [f"{imex}all"], [imex], [f"{imex}void"]):
        assert host.create(asking(ALL, *env)).gpus == [0, 1, 2, 3]
    (told,) = host.create(asking(ALL, f"{imex}all")).said("warning")
    assert "NVIDIA_IMEX_CHANNELS" in told
    error = host.create(asking(ALL, f"{imex}0,1")).error
    assert '"/dev/nvidia-caps-imex-channels/channel0"' in error
    assert "invalid channel ID" in host.create(asking(ALL, f"{imex}x")).error
    observed(told)
    with_channels = hosts("--gpus", "1", "--feature", "imex")
    directory = "/dev/nvidia-caps-imex-channels"
    for mode in ("auto", "jit-cdi", "legacy"):
        config = {MODE: mode, f"{RUNTIME}-hook.path": "/usr/bin/hook"}
        call = with_channels.create(asking(ALL, f"{imex}0,channel2"), config)
        found = {path for path in call.nodes if path.startswith(f"{directory}/")}
        assert found == {f"{directory}/channel0", f"{directory}/channel2"}
    call = with_channels.create(asking(ALL))
    assert not any(path.startswith(f"{directory}/") for path in call.nodes)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (("--root", "/r", "create", "--bundle", "{bundle}", "--pid-file", "/p", "id"), True),
        (("create", "--bundle={bundle}", "id"), True),
        (("create", "-b", "{bundle}", "create"), True),
        (("--systemd-cgroup", "--root", "create", "create", "id", "-bundle", "{bundle}"), True),
        (("run", "-b", "{bundle}", "id"), True),
        (("run", "--bundle", "{bundle}", "create"), True),
        (("--systemd-cgroup", "state", "create"), False),
        (("--root", "create", "delete", "create"), False),
        (("exec", "--cwd", "{bundle}", "id", "create"), False),
        (("delete", "--force", "id"), False),
        (("start", "create"), False),
        (("create", "--help"), False),
    ],
)
def test_b105_create_and_what_looks_like_it(
    host: ShimHost, arguments: tuple[str, ...], changes: bool
) -> None:
    """Only create and run change config.json; the low-level runtime has every word as it came."""
    call = host.create(asking(ALL), arguments=arguments)
    assert (call.after != call.before) == changes
    assert call.gpus == ([0, 1, 2, 3] if changes else [])
    assert call.arguments is not None
    bundle = str(host.place / "bundle")
    words = [word.replace("{bundle}", bundle) for word in arguments]
    assert [re.sub(rf"{bundle}\d+", bundle, word) for word in call.arguments[4:]] == words
    observed(f"{' '.join(arguments)}: config.json {'changed' if changes else 'unchanged'}")


def test_b106_a_value_that_is_set_is_written(host: ShimHost) -> None:
    """Also that which the file shows, commented out, as the default."""
    file = host.place / "set.toml"
    file.write_text(host.run(PROGRAM, "config", "default").stdout)
    line = 'debug = "/var/log/nvidia-container-runtime.log"'
    assert f"#{line}" in file.read_text().splitlines()
    assignment = f"{RUNTIME}.debug=/var/log/nvidia-container-runtime.log"
    options = ("--config-file", str(file), "--in-place", "--set", assignment)
    done = host.run(PROGRAM, "config", *options)
    assert done.returncode == 0, done.stderr
    assert line in file.read_text().splitlines()
    shown = host.run(PROGRAM, "config", "show", "--config-file", str(file)).stdout
    assert f"{RUNTIME}.{line}  # file" in shown.splitlines()
    observed(line)


def test_b107_which_file_is_in_force(hosts: Hosts) -> None:
    """The first that exists, whole; none is the defaults; a wrong type is an error with a line."""
    host = hosts("--gpus", "2")
    host.shell(f"cp {host.recorder} /usr/bin/runc")
    document = asking(mounts=mount_request("1"))
    no_file = {"GPURUNTIME_CONFIG": ""}
    assert host.create(document, **no_file).gpus == []
    shown = host.run(PROGRAM, "config", "show").stdout.splitlines()
    assert shown[0] == "# no config file"

    host.shell(
        f"mkdir -p /etc/{RUNTIME} /run/home/{RUNTIME}; "
        f"echo '{BY_MOUNTS} = true' > /etc/{RUNTIME}/config.toml; "
        f"echo 'no-such-key = 1' > /run/home/{RUNTIME}/config.toml"
    )
    assert host.create(document, **no_file).gpus == [1]
    call = host.create(document, **no_file, XDG_CONFIG_HOME="/run/home")
    assert call.gpus == []
    assert any('"no-such-key"' in line for line in call.said("warning"))
    shown = host.run(PROGRAM, "config", "show", XDG_CONFIG_HOME="/run/home").stdout.splitlines()
    assert shown[0] == f"# /run/home/{RUNTIME}/config.toml"
    observed(shown[0])

    host.shell(f"echo '{BY_MOUNTS} = \"yes\"' > /etc/{RUNTIME}/config.toml")
    error = host.create(document, **no_file).error
    assert error.startswith(f'configuration: "/etc/{RUNTIME}/config.toml" line 1: ')
    assert BY_MOUNTS in error


def test_b109_other_low_level_runtimes(hosts: Hosts) -> None:
    """By name or by path; what they get is OCI's, with the hook left out where they have none."""
    host = hosts("--gpus", "1")
    host.shell(f"cp {host.recorder} /usr/bin/runsc-wrapper")
    config = {RUNTIMES: ["runsc-wrapper"]}
    call = host.create(asking(ALL), config)
    assert call.gpus == [0]
    assert list(call.config["hooks"]) == ["createContainer"]
    without = {f"{RUNTIME}.modes.jit-cdi.nvcdi-disable-hooks": ["all"]}
    call = host.create(asking(ALL), {**config, **without})
    assert call.gpus == [0]
    assert "hooks" not in call.config
    # A runtime that is this program itself would call it for ever.
    host.shell(f"ln -s '{LAUNCHER}' /run/myself")
    call = host.create(asking(ALL), {RUNTIMES: ["/run/myself", "runsc-wrapper"]})
    assert call.gpus == [0]
    (warning,) = call.said("warning")
    assert "is this program itself" in warning
    observed(warning)


def test_b122_no_program_of_others_is_needed(host: ShimHost) -> None:
    """Also with a PATH on which there is nothing."""
    call = host.create(asking(ALL), PATH="/nowhere")
    assert call.gpus == [0, 1, 2, 3]
    assert any(name.startswith("libcuda.so.") for name in call.mounted)
    observed(f"PATH=/nowhere: {len(call.nodes)} devices, {len(call.mounted)} mounts")


def test_b126_none_and_void_where_there_is_no_gpu(hosts: Hosts) -> None:
    """None is the driver's files, void is nothing; a GPU that is asked for is an error."""
    host = hosts("--gpus", "1")
    host.shell("sed -i '/^gpu /d; /^arch /d; /^brand /d' $SIMHOST_CONF; rm -r /dev/nvidia0")
    call = host.create(asking(f"{VISIBLE}none"))
    assert set(call.nodes) == CONTROL
    assert any(name.startswith("libcuda.so.") for name in call.mounted)
    observed(f"NVIDIA_VISIBLE_DEVICES=none: {len(call.mounted)} mounts, GPUs {call.gpus}")
    call = host.create(asking(f"{VISIBLE}void"))
    assert call.after == call.before
    assert '"0"' in host.create(asking(f"{VISIBLE}0")).error
    assert host.create(asking(ALL)).error.startswith(("device: ", "detection: "))


def test_b127_variables_of_cuda_are_not_ours(host: ShimHost) -> None:
    """A privileged container has the nodes it asks for; CUDA's variable stays as it is."""
    for env in ([], ["CUDA_VISIBLE_DEVICES=7"]):
        document = asking(f"{VISIBLE}1,3", *env)
        document["process"]["capabilities"] = PRIVILEGED
        call = host.create(document)
        assert call.gpus == [1, 3]
        assert [entry for entry in call.environment if entry.startswith("CUDA_")] == env
    observed("devices: /dev/nvidia1, /dev/nvidia3; CUDA_VISIBLE_DEVICES=7")


def test_b131_groups_that_the_image_does_not_name(host: ShimHost) -> None:
    """Without them a user could not open the nodes; there are two ways to do without."""
    video = int(host.shell("stat -c %g /dev/dri/card*").split()[0])
    assert video != 0
    call = host.create(asking(ALL))
    assert call.config["process"]["user"]["additionalGids"] == [video]
    observed(f"additionalGids: [{video}]; with the feature: none")
    flag = "no-additional-gids-for-device-nodes"
    for config in (
        {f"features.{flag}": True},
        {f"{RUNTIME}.modes.jit-cdi.nvcdi-feature-flags": [flag]},
    ):
        call = host.create(asking(ALL), config)
        assert call.gpus == [0, 1, 2, 3]
        assert "additionalGids" not in call.config["process"]["user"]


def test_b135_a_headless_host_has_no_warnings(hosts: Hosts) -> None:
    """Files that are not there, and need not be, are not spoken of; the end is a summary."""
    host = hosts("--gpus", "2")
    host.shell(
        "rm -r /dev/dri; rm -rf /usr/share/vulkan /usr/share/glvnd /usr/share/egl /etc/OpenCL; "
        "cd /usr/lib/$(uname -m)-linux-gnu; rm -f libGL*_nvidia* libEGL_nvidia* libnvidia-egl* "
        "libnvidia-gl* libnvidia-fbc* libnvoptix* libnvidia-ngx*; rm -rf gbm vdpau nvidia"
    )
    done = host.run(PROGRAM, "cdi", "generate", "--output", "/run/spec.json")
    assert done.returncode == 0, done.stderr
    (summary,) = [line for line in done.stderr.splitlines() if not line.startswith("wrote ")]
    assert summary.startswith("2 GPUs, 0 MIG devices, ")
    assert summary.endswith("required and missing: none")
    observed(summary)
    call = host.create(asking(ALL))
    assert call.gpus == [0, 1]
    assert call.said("warning") == []
