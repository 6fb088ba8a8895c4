# SPDX-License-Identifier: Apache-2.0
"""Creates: of every recorded config of an engine, in every mode; and those that are refused."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

from recorder import DATA, RUNTIMES, WORK, Recorder
from requested import CAPABILITIES, REQUESTS, VISIBLE

Document = dict[str, Any]
MODE = "nvidia-container-runtime.mode"
HOOK = "nvidia-container-runtime-hook"
AS_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
AS_ENV = "accept-nvidia-visible-devices-envvar-when-unprivileged"
# How long after its change a file is taken for settled.
SETTLE_S = 1.1
MODES = ("auto", "cdi", "jit-cdi", "legacy")
UUID = "GPU-5f1e0001"
ROOTLESS = ("unshare", "--user", "--map-root-user", "--")
ALL_RIGHTS = ["CAP_SYS_ADMIN", "CAP_CHOWN"]


def engine_configs() -> dict[str, Document]:
    """Return name → what an engine has written."""
    return {path.stem: json.loads(path.read_bytes()) for path in sorted(DATA.glob("configs/*"))}


def container(*env: str, **members: Any) -> Document:
    """Return a small config of a container with *env*."""
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["sh"],
            "env": ["PATH=/bin", *env],
            "cwd": "/",
        },
        "root": {"path": "rootfs"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": "mount"}], "resources": {"devices": []}},
        **members,
    }


def asking(document: Document, *env: str) -> Document:
    """Return a copy whose process has *env* in place of its own of these names."""
    changed = copy.deepcopy(document)
    names = tuple(f"{word.partition('=')[0]}=" for word in (*env, f"{VISIBLE}="))
    process = changed["process"]
    process["env"] = [word for word in process["env"] if not word.startswith(names)] + [*env]
    return changed


def spec(recorder: Recorder) -> None:
    """Write the CDI spec of the host, for the mode cdi."""
    recorder.call(
        "spec",
        *(recorder.program("gpuruntime"), "cdi", "generate", "--output", "/etc/cdi/nvidia.yaml"),
    )
    # A spec that has just been written may change again unseen: no grant of it is saved.
    time.sleep(SETTLE_S)


def by_engines(recorder: Recorder) -> None:
    """Each recorded config in each mode: as it is, with other devices, with none."""
    spec(recorder)
    for mode in MODES:
        recorder.config(**{MODE: mode, RUNTIMES: ["runc"]})
        for name, document in engine_configs().items():
            recorder.cold(f"{mode}/{name}", document)
            for word, env in (
                ("all", (f"{VISIBLE}=all", f"{CAPABILITIES}=all")),
                ("uuid", (f"{VISIBLE}={UUID}-9a3c-4d27-8b60-0c1d2e3f4a01",)),
                ("cdi-name", (f"{VISIBLE}=nvidia.com/gpu=1",)),
                ("driver-only", (f"{VISIBLE}=none", f"{CAPABILITIES}=utility")),
            ):
                recorder.create(f"{mode}/{name}/{word}", asking(document, *env))
    recorder.keep("after", "run", WORK.parent / "gpuruntime")


def with_rights(document: Document) -> Document:
    """Return *document* with the rights of a privileged container."""
    changed = copy.deepcopy(document)
    kinds = ("bounding", "effective", "permitted")
    changed["process"]["capabilities"] = dict.fromkeys(kinds, ALL_RIGHTS)
    return changed


def null_mount(name: str) -> Document:
    """Return the mount by which a container asks for the device *name*."""
    place = f"/var/run/nvidia-container-devices/{name}"
    return {"destination": place, "type": "bind", "source": "/dev/null", "options": ["bind"]}


def documents() -> dict[str, Document]:
    """Return name → configs of containers that ask in other ways, or are of another kind."""
    gpu = container(f"{VISIBLE}=0")
    prestart = {"path": f"/usr/bin/{HOOK}", "args": [HOOK, "prestart"]}
    mounted = [*container()["mounts"], null_mount("1")]
    in_mount = [*container()["mounts"], null_mount("cdi/nvidia.com/gpu/0")]
    user = [{"type": "mount"}, {"type": "user"}]
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    userns = {**gpu["linux"], "namespaces": user, "uidMappings": mapping, "gidMappings": mapping}
    node = {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}
    return {
        "annotation": container(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=1"}),
        "annotation-bad": container(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=77"}),
        "annotation-and-env": {**gpu, "annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=1"}},
        "mount": container(mounts=mounted),
        "mount-cdi": container(mounts=in_mount),
        "mount-and-env": {**gpu, "mounts": mounted},
        "engine-hook": {**gpu, "hooks": {"prestart": [prestart]}},
        "engine-hook-unasked": container(hooks={"prestart": [prestart]}),
        "hooks-of-others": {**gpu, "hooks": {"createContainer": [{"path": "/bin/true"}]}},
        "user-namespace": {**gpu, "linux": userns},
        "read-only": {**gpu, "root": {"path": "rootfs", "readonly": True}},
        "privileged": with_rights(gpu),
        "node-there": {**gpu, "linux": {**gpu["linux"], "devices": [node]}},
        "no-linux": {key: gpu[key] for key in ("ociVersion", "process", "root", "mounts")},
        "no-mounts": {key: gpu[key] for key in ("ociVersion", "process", "root", "linux")},
        "systemd-cgroup": {**gpu, "linux": {**gpu["linux"], "cgroupsPath": "a.slice:x:y"}},
        "other-user": {
            **gpu,
            "process": {**gpu["process"], "user": {"uid": 1, "gid": 1, "additionalGids": [7]}},
        },
        "cuda-image": container(f"{VISIBLE}=all", "CUDA_VERSION=12.4.1", "NVARCH=x86_64"),
        "unknown-members": {**gpu, "x": {"b": 1.5, "a": [None, True, "é\u2028\U0001f600"]}},
    }


def by_requests(recorder: Recorder) -> None:
    """Many requests, by environment, mounts and annotations."""
    spec(recorder)
    for mode in ("auto", "cdi", "legacy"):
        recorder.config(**{MODE: mode, AS_MOUNTS: True, RUNTIMES: ["runc"]})
        for name, env in REQUESTS.items():
            recorder.create(f"{mode}/{name}", container(*env))
        for name, document in documents().items():
            recorder.create(f"{mode}/{name}", document)
        recorder.keep(f"{mode}", "run", WORK.parent / "gpuruntime")


def by_configs(recorder: Recorder) -> None:
    """Options of config.toml; the low-level runtimes; the log; other ways of a call."""
    spec(recorder)
    gpu = container(f"{VISIBLE}=0")
    required = container(f"{VISIBLE}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99.0")
    jit, legacy = "nvidia-container-runtime.modes.jit-cdi", "nvidia-container-runtime.modes.legacy"
    cdi = "nvidia-container-runtime.modes.cdi"
    compat = container(f"{VISIBLE}=0", "CUDA_VERSION=12.6.0")
    options: dict[str, tuple[Document, dict[str, Any]]] = {
        "no-env": (gpu, {AS_ENV: False}),
        "no-env-privileged": (with_rights(gpu), {AS_ENV: False}),
        "disable-require": (required, {"disable-require": True}),
        "missing-warn": (container(f"{VISIBLE}=0,9"), {"missing-gpu": "warn"}),
        "require-warn": (required, {"missing-gpu": "warn"}),
        "health": (gpu, {"health": "nvml"}),
        "hook-deadline": (gpu, {"hook-deadline": 77}),
        "ldconfig-host": (gpu, {"ldconfig-mode": "host"}),
        "ldconfig-none": (gpu, {"ldconfig-mode": "none"}),
        "supported": (
            container(f"{VISIBLE}=0", f"{CAPABILITIES}=all"),
            {"supported-driver-capabilities": "compute,utility"},
        ),
        "swarm": (container("DOCKER_RESOURCE_GPU=0"), {"swarm-resource": "DOCKER_RESOURCE_GPU"}),
        "all-files": (gpu, {f"{jit}.driver-capabilities": "all"}),
        "disable-hooks": (gpu, {f"{jit}.nvcdi-disable-hooks": ["all"]}),
        "disable-links": (gpu, {f"{jit}.nvcdi-disable-hooks": ["create-symlinks"]}),
        "feature-flags": (gpu, {f"{jit}.nvcdi-feature-flags": ["disable-ipc-discoverer"]}),
        "no-gids": (gpu, {"features.no-additional-gids-for-device-nodes": True}),
        "no-imex": (
            container(f"{VISIBLE}=0", "NVIDIA_IMEX_CHANNELS=0"),
            {"features.ignore-imex-channel-requests": True},
        ),
        "compat-off": (compat, {"features.disable-cuda-compat-lib-hook": True}),
        "compat": (compat, {}),
        "compat-mount": (compat, {MODE: "legacy", f"{legacy}.cuda-compat-mode": "mount"}),
        "compat-hook": (compat, {MODE: "legacy", f"{legacy}.cuda-compat-mode": "hook"}),
        "hook-path": (gpu, {"nvidia-ctk.path": "/opt/x/nvidia-ctk"}),
        "prestart-path": (gpu, {MODE: "legacy", f"{HOOK}.path": "/opt/x/hook"}),
        "skip-detection": (gpu, {f"{HOOK}.skip-mode-detection": True}),
        "kind": (gpu, {MODE: "cdi", f"{cdi}.default-kind": "other.org/x"}),
        "prefixes": (
            container(annotations={"a.b/x": "nvidia.com/gpu=0"}),
            {f"{cdi}.annotation-prefixes": ["a.b/"]},
        ),
        "spec-dirs": (gpu, {MODE: "cdi", f"{cdi}.spec-dirs": ["/nowhere"]}),
        "csv": (gpu, {MODE: "csv"}),
        "mode-unknown": (gpu, {MODE: "other"}),
        "debug": (gpu, {"nvidia-container-runtime.log-level": "debug"}),
        "errors-only": (gpu, {"nvidia-container-runtime.log-level": "error"}),
        "unknown-key": (gpu, {"no-such-key": 1}),
        "bad-type": (gpu, {"disable-require": "perhaps"}),
        "bad-deadline": (gpu, {"hook-deadline": 0}),
        "no-driver-root": (gpu, {"nvidia-container-cli.root": "/nowhere"}),
        "no-runtime": (gpu, {RUNTIMES: ["/nowhere/runc"]}),
        "no-runtimes": (gpu, {RUNTIMES: []}),
    }
    for name, (document, values) in options.items():
        recorder.config(**{RUNTIMES: ["runc"], **values})
        recorder.create(f"options/{name}", document)
    recorder.config("this is = no TOML [\n")
    recorder.create("options/bad-toml", gpu)
    recorder.create("options/bad-toml-unasked", container())
    _by_runtimes(recorder, gpu)
    _by_calls(recorder, gpu)


def _by_runtimes(recorder: Recorder, gpu: Document) -> None:
    read_only = {**gpu, "root": {"path": "rootfs", "readonly": True}}
    for runtime in ("runc", "crun"):
        recorder.config(**{RUNTIMES: [runtime]})
        recorder.cold(f"{runtime}/usual", gpu)
        recorder.cold(f"{runtime}/read-only", read_only, rootfs=True)
        recorder.create(
            f"{runtime}/bundle-option", gpu, arguments=("create", "-b", "{bundle}", "id")
        )
        recorder.create(f"{runtime}/run", gpu, arguments=("run", "--bundle={bundle}", "id"))
        recorder.create(
            f"{runtime}/pid-file",
            gpu,
            options=("--root", "/run/x", "--systemd-cgroup"),
            arguments=("create", "--bundle", "{bundle}", "--pid-file", "/run/pid", "id"),
        )
        for word in ("state", "start", "kill", "delete", "list", "features", "unknown"):
            recorder.create(f"{runtime}/{word}", gpu, arguments=(word, "id"))
        recorder.create(f"{runtime}/version", gpu, arguments=("--version",))
        recorder.create(f"{runtime}/none", gpu, options=(), arguments=())
    recorder.config(**{RUNTIMES: ["/nowhere/runc", "crun", "runc"]})
    recorder.create("runc/second", gpu)


def _by_calls(recorder: Recorder, gpu: Document) -> None:
    bad = container(f"{VISIBLE}=99")
    recorder.config(**{RUNTIMES: ["runc"]})
    for name, options in (
        ("text", ("--log", "{log}", "--log-format", "text")),
        ("text-default", ("--log", "{log}")),
        ("none", ()),
        ("unknown-format", ("--log", "{log}", "--log-format", "xml")),
        ("debug", ("--debug", "--log", "{log}")),
        ("unwritable", ("--log", "/nowhere/log")),
        ("unknown-option", ("--no-such", "--log", "{log}")),
    ):
        recorder.create(f"log/{name}", gpu, options=options)
        recorder.create(f"log/{name}-failing", bad, options=options)
    for name, prefix, document in (
        ("rootless", ROOTLESS, gpu),
        ("rootless-failing", ROOTLESS, bad),
        ("umask", ("sh", "-c", 'umask 077; exec "$@"', "sh"), gpu),
    ):
        recorder.create(f"calls/{name}", document, prefix=prefix)
        recorder.create(f"calls/{name}-again", document, prefix=prefix)
    for program in (
        "nvidia-container-runtime",
        *(f"nvidia-container-runtime.{m}" for m in ("cdi", "legacy")),
    ):
        recorder.create(f"calls/{program}", gpu, program=str(WORK / "bin" / program))
        recorder.create(
            f"calls/{program}-version",
            gpu,
            program=str(WORK / "bin" / program),
            arguments=("--version",),
        )
    recorder.create("calls/no-bundle", gpu, arguments=("create", "id"))
    recorder.create("calls/bundle-missing", gpu, arguments=("create", "--bundle", "/no", "id"))
    for name, text in (
        ("empty", b""),
        ("no-json", b"{"),
        ("list", b"[]"),
        ("no-process", b'{"ociVersion":"1.0.2","root":{"path":"rootfs"}}'),
        ("twice", b'{"process":{"env":["NVIDIA_VISIBLE_DEVICES=0"],"env":[]}}'),
        ("no-utf8", b'{"process":{"env":["NVIDIA_VISIBLE_DEVICES=\xff"]}}'),
        ("env-odd", b'{"process":{"env":["NVIDIA_VISIBLE_DEVICES=0",1]}}'),
        ("indented", json.dumps(gpu, indent=2).encode()),
        ("escaped", json.dumps(gpu).replace("/", "\\/").encode()),
        ("floats", json.dumps({**gpu, "x": 1e3}).encode()),
    ):
        recorder.create(f"documents/{name}", text)


def hanging(recorder: Recorder) -> None:
    """Record what a driver that does not answer comes to; each create waits for it."""
    spec(recorder)
    for mode in ("auto", "cdi", "legacy"):
        recorder.config(**{MODE: mode, RUNTIMES: ["runc"], "discovery-timeout": 1})
        recorder.forget()
        recorder.create(mode, container(f"{VISIBLE}=1"))
    recorder.config(**{"missing-gpu": "warn", RUNTIMES: ["runc"], "discovery-timeout": 1})
    recorder.forget()
    recorder.create("warn", container(f"{VISIBLE}=all"))
    recorder.create("unasked", container())
    recorder.call("explain", recorder.program("gpuruntime"), "explain", "--gpus", "all")


def refused(recorder: Recorder) -> None:
    """Record what a host at fault says to a few containers, with and without a spec."""
    spec(recorder)
    for mode in ("auto", "cdi", "legacy"):
        recorder.config(**{MODE: mode, RUNTIMES: ["runc"], "discovery-timeout": 2})
        for name, env in (
            ("all", (f"{VISIBLE}=all",)),
            ("one", (f"{VISIBLE}=1",)),
            ("none", (f"{VISIBLE}=none",)),
            ("named", (f"{VISIBLE}=nvidia.com/gpu=1",)),
            ("unasked", ()),
        ):
            # A failure is kept for some seconds: the first is told at once, the second of it.
            recorder.forget()
            recorder.create(f"{mode}/{name}", container(*env))
            recorder.create(f"{mode}/{name}-again", container(*env))
    recorder.config(**{"missing-gpu": "warn", RUNTIMES: ["runc"], "discovery-timeout": 2})
    for name, value in (("all", "all"), ("one", "1")):
        recorder.forget()
        recorder.create(f"warn/{name}", container(f"{VISIBLE}={value}"))
    ours = recorder.program("gpuruntime")
    recorder.call("info", ours, "info", "--json")
    recorder.call("doctor", ours, "doctor", "--json")
    recorder.call("explain", ours, "explain", "--gpus", "all", "--json")
    recorder.call("explain-text", ours, "explain", "--gpus", "device=1")
    recorder.call("driver", ours, "driver", "list", "--json")
    recorder.call("cli-info", WORK / "bin/nvidia-container-cli", "info")
    recorder.call("cli-list", WORK / "bin/nvidia-container-cli", "list")
    recorder.call("nodes", ours, "system", "create-device-nodes", "--all", "--dry-run")
