# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime explain` says what the runtime then does, and changes nothing; simulated hosts."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdi.edits import apply
from gpuruntime.errors import GpuRuntimeError

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
PROGRAMS = tuple(
    str(TREE / ".venv/bin" / name) for name in ("gpuruntime", "gpu-container-runtime")
)
HOST = ("--gpus", "4", "--mig", "3:2")
# Runs inside: explains and creates each of the cases on stdin, and prints what came of it.
PROGRAM = """
import hashlib, json, os, pathlib, subprocess, sys

def run(*command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)

def tree():
    found = {}
    for top in ("/run", "/etc"):
        for directory, below, names in os.walk(top):
            if directory == "/run":
                # A view of /proc is in it.
                below.remove("simhost")
            for name in (*names, "."):
                path = os.path.join(directory, name)
                status = os.lstat(path)
                found[path] = [status.st_ino, status.st_size, status.st_mtime_ns]
    return found

def explain(*words):
    return forked_cli.run("explain", *words, "--bundle", "/run/explained/bundle")

work = pathlib.Path("/run/explained")
(work / "bundle").mkdir(parents=True)
tests, gpuruntime, runtime = sys.argv[1:]
sys.path.append(tests)
import forked_cli
os.makedirs("/run/specs")
run(gpuruntime, "cdi", "generate", "--output", "/run/specs/nvidia.json", check=True)
pathlib.Path("/run/specs/broken.json").write_text("{")
pathlib.Path("/run/stale").mkdir()
spec = json.loads(pathlib.Path("/run/specs/nvidia.json").read_text())
spec["containerEdits"]["mounts"][0]["hostPath"] = "/gone/libcuda.so.1"
pathlib.Path("/run/stale/nvidia.json").write_text(json.dumps(spec))
lowlevel = work / "lowlevel"
lowlevel.write_text("#!/bin/sh\\necho started >> /run/explained/started\\n")
lowlevel.chmod(0o755)
os.environ["GPURUNTIME_CONFIG"] = "/run/explained/config.toml"
results = []
for text, toml, is_told in json.load(sys.stdin):
    data = text.encode("utf-8", "surrogateescape")
    (work / "config.toml").write_text(toml)
    config = work / "bundle" / "config.json"
    config.write_bytes(data)
    (work / "started").unlink(missing_ok=True)
    before = tree()
    told = explain("--json")
    said = explain() if is_told else None
    after = tree()
    made = run(runtime, "create", "--bundle", "/run/explained/bundle", "id", cwd=work)
    results.append({
        "told": told.stdout, "status": told.returncode, "said": said and said.stdout,
        "told_error": told.stderr, "said_error": said.stderr if said else told.stderr,
        "changed": sorted(p for p in {**before, **after} if before.get(p) != after.get(p)),
        "config": config.read_bytes().decode("utf-8", "surrogateescape"),
        "made": made.returncode, "made_error": made.stderr,
        "started": (work / "started").exists(),
    })
json.dump(results, sys.stdout)
"""


def config(*more: str, top: str = "", mode: str = "auto", specs: str = "/run/specs") -> str:
    """Return a config.toml: *top* before the tables, *more* after them."""
    return f"""{top}
[nvidia-container-runtime]
runtimes = ["/run/explained/lowlevel"]
mode = "{mode}"
[nvidia-container-runtime.modes.cdi]
spec-dirs = ["{specs}"]
[nvidia-container-runtime-hook]
path = "/usr/bin/some-hook"
""" + "".join(more)


MOUNTS_ONLY = (
    "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    "accept-nvidia-visible-devices-as-volume-mounts = true\n"
)
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
HOOK = {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}
ADMIN = {"bounding": ["CAP_SYS_ADMIN"]}
EVERY = [{"allow": True, "access": "rwm"}]

pytestmark = pytest.mark.system


def oci(*env: str, **members: Any) -> dict[str, Any]:
    """Return an OCI config with some things in it that have to stay as they are."""
    process: dict[str, Any] = {"env": ["PATH=/bin", *env], "user": {"uid": 0, "gid": 0}}
    if "capabilities" in members:
        process["capabilities"] = members.pop("capabilities")
    linux = {"namespaces": [{"type": "mount"}], **members.pop("linux", {})}
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts += members.pop("mounts", [])
    return {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": "rootfs"},
        "mounts": mounts,
        "linux": linux,
        "x-unknown": {"stays": True},
        **members,
    }


def mount(name: str) -> dict[str, Any]:
    """Return the mount that asks for *name*."""
    return {"destination": f"/var/run/nvidia-container-devices/{name}", "source": "/dev/null"}


CASES: list[tuple[str, dict[str, Any] | str, str]] = [
    ("nothing", oci(), config()),
    ("all", oci(f"{VISIBLE}=all"), config()),
    ("two, one of them twice", oci(f"{VISIBLE}=0, 2,0"), config()),
    ("none", oci(f"{VISIBLE}=none"), config()),
    ("void", oci(f"{VISIBLE}=void"), config()),
    ("empty", oci(f"{VISIBLE}="), config()),
    ("mig", oci(f"{VISIBLE}=3:1"), config()),
    ("qualified, automatic", oci(f"{VISIBLE}=runtime.nvidia.com/gpu=1"), config()),
    ("qualified", oci(f"{VISIBLE}=nvidia.com/gpu=1"), config()),
    ("mixed", oci(f"{VISIBLE}=1,nvidia.com/gpu=1"), config()),
    ("cdi", oci(f"{VISIBLE}=0,1"), config(mode="cdi")),
    ("cdi none", oci(f"{VISIBLE}=none"), config(mode="cdi")),
    ("cdi, not there", oci(f"{VISIBLE}=9"), config(mode="cdi")),
    ("cdi, stale", oci(f"{VISIBLE}=0"), config(mode="cdi", specs="/run/stale")),
    ("annotation", oci(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=2"}), config()),
    ("annotation, not in this mode", oci(annotations={"cdi.k8s.io/x": "0"}), config()),
    ("legacy", oci(f"{VISIBLE}=0"), config(mode="legacy")),
    (
        "legacy, hook of the engine",
        oci(f"{VISIBLE}=0", hooks={"prestart": [HOOK]}),
        config(mode="legacy"),
    ),
    (
        "legacy, bad capability",
        oci(f"{VISIBLE}=0", "NVIDIA_DRIVER_CAPABILITIES=x"),
        config(mode="legacy"),
    ),
    ("hook of the engine", oci(f"{VISIBLE}=0", hooks={"prestart": [HOOK]}), config()),
    ("hook of the engine alone", oci(hooks={"prestart": [HOOK, {"path": "/x"}]}), config()),
    ("capabilities", oci(f"{VISIBLE}=0", "NVIDIA_DRIVER_CAPABILITIES=video,what"), config()),
    ("all capabilities", oci(f"{VISIBLE}=0", "NVIDIA_DRIVER_CAPABILITIES=all"), config()),
    ("requirement met", oci(f"{VISIBLE}=0", "NVIDIA_REQUIRE_CUDA=cuda>=12.0"), config()),
    ("requirement not met", oci(f"{VISIBLE}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99.1"), config()),
    ("requirement malformed", oci(f"{VISIBLE}=0", "NVIDIA_REQUIRE_CUDA=cuda"), config()),
    ("old image", oci("CUDA_VERSION=8.0.61"), config()),
    ("swarm", oci("RES=GPU-5f1e0001", f"{VISIBLE}=all"), config(top='swarm-resource = "RES"')),
    ("mount", oci(f"{VISIBLE}=all", mounts=[mount("2")]), config(top=MOUNTS_ONLY)),
    ("mount, not accepted", oci(f"{VISIBLE}=0", mounts=[mount("2")]), config()),
    ("unprivileged", oci(f"{VISIBLE}=all"), config(top=MOUNTS_ONLY)),
    (
        "privileged",
        oci(f"{VISIBLE}=1", capabilities=ADMIN, linux={"resources": {"devices": EVERY}}),
        config(top=MOUNTS_ONLY),
    ),
    ("user namespace", oci(f"{VISIBLE}=1", linux={"namespaces": [{"type": "user"}]}), config()),
    ("no such GPU", oci(f"{VISIBLE}=7"), config()),
    ("no such GPU, warn", oci(f"{VISIBLE}=7"), config(top='missing-gpu = "warn"')),
    ("no id", oci(f"{VISIBLE}=../etc"), config()),
    ("imex", oci(f"{VISIBLE}=0", "NVIDIA_IMEX_CHANNELS=5000"), config()),
    ("imex, no number", oci(f"{VISIBLE}=0", "NVIDIA_IMEX_CHANNELS=x"), config()),
    ("features", oci(f"{VISIBLE}=0", "NVIDIA_GDS=enabled", "NVIDIA_MOFED=1"), config()),
    ("mig config", oci(f"{VISIBLE}=0", "NVIDIA_MIG_CONFIG_DEVICES=all"), config()),
    ("management", oci(f"{VISIBLE}=management.nvidia.com/gpu=all"), config()),
    ("csv", oci(f"{VISIBLE}=0"), config(mode="csv")),
    ("malformed variable", oci(f"{VISIBLE}=0", "WHAT"), config()),
    ("no JSON", f'{{"process": {{"env": ["{VISIBLE}=0"]}}', config()),
    ("not an object", f'["{VISIBLE}=0"]', config()),
    ("repeated", f'{{"process": {{"env": ["{VISIBLE}=0"]}}, "process": null}}', config()),
    ("other shape", f'{{"process": {{"env": "{VISIBLE}=0"}}}}', config()),
    ("no UTF-8", f'{{"process": {{"env": ["{VISIBLE}=0", "X=\udcff"]}}}}', config()),
    ("a lone surrogate", f'{{"process": {{"env": ["{VISIBLE}=0", "X=\\ud800"]}}}}', config()),
    ("deep", f'{{"process": {{"env": ["{VISIBLE}=0"]}}, "x": {"[" * 99}{"]" * 99}}}', config()),
    ("deeper", f'{{"process": {{"env": ["{VISIBLE}=0"]}}, "x": {"[" * 99999}', config()),
    ("wrong config", oci(f"{VISIBLE}=0"), config(top="swarm-resource = 7")),
]
# Those that are explained as text too.
TOLD = {
    *("two, one of them twice", "unprivileged", "requirement met", "requirement not met"),
    *("privileged", "cdi", "hook of the engine", "no such GPU", "no JSON"),
}


def on_host(*command: str, given: str = "", options: tuple[str, ...] = HOST) -> str:
    """Return what *command* prints on a simulated host with *options*."""
    done = subprocess.run(
        [sys.executable, str(SIMHOST), "run", *options, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        input=given,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Return what came of each case, by its name."""
    cases = [
        (given if isinstance(given, str) else json.dumps(given), toml, name in TOLD)
        for name, given, toml in CASES
    ]
    words = (str(TREE / "tests"), *PROGRAMS)
    told = on_host(sys.executable, "-c", PROGRAM, *words, given=json.dumps(cases))
    found = json.loads(told)
    assert len(found) == len(CASES) == len({name for name, _, _ in CASES})
    return {name: one for (name, _, _), one in zip(CASES, found, strict=True)}


@pytest.mark.parametrize(("name", "given"), [case[:2] for case in CASES])
def test_it_says_what_the_runtime_does(
    name: str, given: dict[str, Any] | str, results: dict[str, dict[str, Any]]
) -> None:
    """The same edits, the same error: what is explained is what happens."""
    found = results[name]
    assert found["changed"] == []
    told = json.loads(found["told"])
    error = told["error"]
    if error is not None:
        assert (found["status"], found["made"], found["started"]) == (1, 1, False)
        assert told["edits"] == {}
        if isinstance(given, dict):
            assert found["config"] == json.dumps(given)
        failed = GpuRuntimeError(error["message"], error["hint"])
        failed.phase = error["phase"]
        assert found["told_error"] == found["said_error"] == f"error: {failed.lines()}\n"
        assert found["made_error"] == f"gpu-container-runtime: {failed.lines()}\n"
        return
    assert (found["status"], found["made"], found["started"]) == (0, 0, True), found["made_error"]
    assert found["told_error"] == found["said_error"] == ""
    assert isinstance(given, dict)
    assert json.loads(found["config"]) == applied(told, given)


def applied(told: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the OCI config *given* with what is *told* done to it."""
    result = copy.deepcopy(given)
    hooks = result.get("hooks", {})
    if told["removed"]:
        hooks["prestart"] = [h for h in hooks["prestart"] if h["path"] not in told["removed"]]
        if not hooks["prestart"]:
            del hooks["prestart"]
    apply(told["edits"], result)
    return result


def test_every_thing_has_its_reason(results: dict[str, dict[str, Any]]) -> None:
    """What is in the edits is in the reasons, and a file of the driver is there or left out."""
    told = {name: json.loads(found["told"]) for name, found in results.items()}
    for name, one in told.items():
        things = [
            item for key, items in one["edits"].items() if key != "intelRdt" for item in items
        ]
        added = [
            reason
            for reason in one["reasons"]
            if reason["kind"] in ("env", "device", "mount", "hook", "group")
        ]
        assert len(added) == len(things), name
        assert all(reason["why"] for reason in one["reasons"]), name
    some, every = (
        {
            kind: {r["what"] for r in told[name]["reasons"] if r["kind"] == kind}
            for kind in ("mount", "left out")
        }
        for name in ("two, one of them twice", "all capabilities")
    )
    paths = {what.split(" on ")[1] for what in every["mount"]}
    left_out = {what for what in some["left out"] if what.startswith("/")}
    assert left_out == paths - {what.split(" on ")[1] for what in some["mount"]}
    assert any(what.endswith("/libnvcuvid.so.550.163.01") for what in left_out)


def test_the_text_answers_questions(results: dict[str, dict[str, Any]]) -> None:
    """Why that GPU, why not this library, what of the request does not count."""
    two = results["two, one of them twice"]["said"]
    assert re.search('^gpu +2 GPU-5f1e0002-.*: requested as "2"$', two, re.MULTILINE)
    assert re.search("^left out +GPU 1, MIG device 3:0, .*: not requested$", two, re.MULTILINE)
    assert re.search(r"^left out .*libnvcuvid.*: for video: add \"video\" to", two, re.MULTILINE)
    assert re.search("^device +/dev/nvidia2 c 195:2 rw: node of GPU 2$", two, re.MULTILINE)
    assert re.search("^runtime +/run/explained/lowlevel$", two, re.MULTILINE)
    policy = "accept-nvidia-visible-devices-envvar-when-unprivileged"
    assert re.search(f"^ignored .*{policy}", results["unprivileged"]["said"], re.MULTILINE)
    met = '^requirement +"cuda>=12.0" is met: this host has CUDA 12.4 and driver 550.163.01$'
    assert re.search(met, results["requirement met"]["said"], re.MULTILINE)
    unmet = r'^requirement +"cuda>=99.1" is not met: .*\(cuda=12.4\)'
    assert re.search(unmet, results["requirement not met"]["said"], re.MULTILINE)
    assert re.search("^warning .*privileged$", results["privileged"]["said"], re.MULTILINE)
    assert "broken.json" in results["cdi"]["said"]
    assert re.search(
        "^removed .*toolkit|^removed .*-hook:", results["hook of the engine"]["said"], re.MULTILINE
    )


def test_a_missing_node_is_not_made() -> None:
    """The runtime runs nvidia-modprobe then; explaining does not, and says so."""
    script = f"""
    printf '#!/bin/sh\\necho run >> /run/modprobe\\n' > /usr/bin/nvidia-modprobe
    chmod 755 /usr/bin/nvidia-modprobe; rm /dev/nvidia-uvm
    '{PROGRAMS[0]}' explain --env {VISIBLE}=0 2>&1; echo "exit $?"
    test ! -e /run/modprobe && echo not run
    """
    told = on_host("sh", "-uc", script)
    assert "exit 1\nnot run\n" in told
    assert re.search("^warning .*nvidia-modprobe", told, re.MULTILINE)
    assert (
        'error: device: cannot give a device to the container: device node "/dev/nvidia-uvm"'
        in told
    )


@pytest.mark.parametrize(
    ("fault", "device", "reason", "hint"),
    [
        ("lost 1", "1", "GPU 1 is left out: GPU is lost", 'NVRM and Xid lines in "dmesg"'),
        ("lost 1", "GPU-5f1e0001", "GPU 1 is left out: GPU is lost", '"nvidia-smi -r"'),
        (
            "bound 3 vfio-pci",
            "0000:4b:00.0",
            'GPU 0000:4b:00.0 is left out: the kernel driver "vfio-pci" has it',
            "take the GPUs out of the options of vfio-pci",
        ),
        (
            "bound 3 nouveau",
            "3",
            'left out: GPU 0000:4b:00.0 (the kernel driver "nouveau" has it)',
            "nvidia-smi -L",
        ),
        (
            "nonode nvidia1",
            "1",
            'device node "/dev/nvidia1"',
            'run "gpuruntime system create-device-nodes',
        ),
    ],
)
def test_why_a_gpu_is_missing(fault: str, device: str, reason: str, hint: str) -> None:
    """The runtime and `explain` say the same, which is about this GPU."""
    data = json.dumps(oci(f"{VISIBLE}={device}"))
    script = f"""
    mkdir /run/bundle; cat > /run/bundle/config.json
    '{PROGRAMS[0]}' explain --bundle /run/bundle 2>&1 >/dev/null | sed 's/^error: //'
    '{PROGRAMS[1]}' create --bundle /run/bundle id 2>&1 | sed 's/^gpu-container-runtime: //'
    """
    lines = on_host(
        "sh", "-uc", script, given=data, options=("--gpus", "4", "--fault", fault)
    ).splitlines()
    assert lines[:2] == lines[2:]
    assert lines[0].startswith("device: ")
    assert reason in lines[0]
    assert hint in lines[1]


def test_devices_that_the_engine_adds() -> None:
    """With --device an engine reads the spec itself, which tells the runtime to add nothing."""
    script = f"""
    '{PROGRAMS[0]}' cdi generate --output /etc/cdi/nvidia.yaml 2>/dev/null
    '{PROGRAMS[0]}' explain --json --device nvidia.com/gpu=1 --image-env {VISIBLE}=all
    """
    told = json.loads(on_host("sh", "-uc", script))
    assert (told["edits"], told["devices"], told["error"]) == ({}, [], None)
    assert 'the engine itself adds "nvidia.com/gpu=1"' in " ".join(told["notes"])
    reasons = {(one["kind"], one["what"].split()[0]): one["why"] for one in told["reasons"]}
    assert ("has gpu", "1") in reasons
    assert ("has gpu", "0") not in reasons
    assert 'for "nvidia.com/gpu=1", by the CDI spec' in reasons["has device", "/dev/nvidia1"]
    assert "the devices have been added already" in told["reasons"][-1]["why"]


def test_a_gpu_that_was_left_out_when_the_spec_was_written() -> None:
    """The spec does not say why; the driver does."""
    script = f"""
    '{PROGRAMS[0]}' cdi generate --output /etc/cdi/nvidia.yaml 2>/dev/null
    '{PROGRAMS[0]}' explain --device nvidia.com/gpu=1
    '{PROGRAMS[0]}' explain -e {VISIBLE}=nvidia.com/gpu=1
    true
    """
    text = on_host(
        "sh", "-uc", f"{{ {script}\n}} 2>&1", options=("--gpus", "2", "--fault", "lost 1")
    )
    engine, runtime = text.split("error: ")[1:]
    assert "; GPU 1 is left out: GPU is lost\nhint: look for NVRM" in engine
    assert "note          GPU 1 is left out: GPU is lost\n" in engine
    assert runtime.startswith("device: no CDI spec in ")


@pytest.mark.parametrize("mode", ["jit-cdi", "cdi"])
def test_a_config_json_that_has_been_edited(mode: str) -> None:
    """What the container has already: the bundle of one that runs, or that an engine edited."""
    data = json.dumps(oci(f"{VISIBLE}=1"))
    toml = config(mode=mode, specs="/etc/cdi")
    script = f"""
    mkdir -p /run/explained/bundle; cat > /run/explained/bundle/config.json
    printf '%s' '{toml}' > /run/explained/config.toml
    export GPURUNTIME_CONFIG=/run/explained/config.toml
    printf '#!/bin/sh\n' > /run/explained/lowlevel; chmod 755 /run/explained/lowlevel
    '{PROGRAMS[0]}' cdi generate --output /etc/cdi/nvidia.yaml 2>/dev/null
    '{PROGRAMS[1]}' create --bundle /run/explained/bundle id
    '{PROGRAMS[0]}' explain --bundle /run/explained/bundle
    """
    text = on_host("sh", "-euc", script, given=data, options=("--gpus", "2"))
    assert re.search("^has gpu +1 GPU-5f1e0001-", text, re.MULTILINE)
    assert not re.search("^has gpu +0 ", text, re.MULTILINE)
    assert re.search("^has device +/dev/nvidia1 c 195:1$", text, re.MULTILINE)
    assert re.search("^has mount .*libcuda.so.550.163.01", text, re.MULTILINE)
    assert re.search("^has hook .*gpu-cdi-hook: makes links", text, re.MULTILINE)
    assert re.search("^nothing .*the devices have been added already$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("before", "capability", "said"),
    [
        ("rm /usr/bin/nvidia-smi", "utility", True),
        ("rm /usr/bin/nvidia-smi", "compute", False),
        ("true", "utility", False),
    ],
)
def test_a_host_without_nvidia_smi(before: str, capability: str, said: bool) -> None:
    """Where it is asked for; users take its absence for that of the GPU."""
    script = f"""
    {before}
    '{PROGRAMS[0]}' explain --json -e {VISIBLE}=0 -e NVIDIA_DRIVER_CAPABILITIES={capability}
    """
    told = json.loads(on_host("sh", "-euc", script))
    note = 'no "nvidia-smi" on PATH or beside the driver\'s libraries: containers have none'
    assert (told["error"], note in told["notes"]) == (None, said)
