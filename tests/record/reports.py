# SPDX-License-Identifier: Apache-2.0
"""Reports of the command line: `info`, `doctor`, `driver list`, `config`, `explain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from creates import container
from recorder import DATA, KEPT, WORK, Recorder
from requested import VISIBLE

CONFIG = """\
# A comment that stays.
disable-require = true
no-such-key = 1
[nvidia-container-cli]
ldconfig = "@/sbin/ldconfig.real"
[nvidia-container-runtime]
mode = "cdi" # another
runtimes = ["crun", "runc"]
[features]
allow-cuda-compat-libs-from-container = true
"""


def reports(recorder: Recorder) -> None:
    """`info`, `doctor`, `driver list`."""
    ours = recorder.program("gpuruntime")
    for name, words in (
        ("info", ("info",)),
        ("info-json", ("info", "--json")),
        ("info-no-driver", ("info", "--json", "--no-driver")),
        ("doctor", ("doctor",)),
        ("doctor-json", ("doctor", "--json")),
        ("doctor-one", ("doctor", "--json", "--check", "config")),
        ("driver", ("driver", "list")),
        ("driver-json", ("driver", "list", "--json")),
        ("driver-two", ("driver", "list", "--capability", "compute", "--capability", "utility")),
    ):
        recorder.call(f"reports/{name}", ours, *words)


def broken_hosts(recorder: Recorder) -> None:
    """`doctor --root` on hosts as trees of files, one well and others not."""
    tests = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests), str(tests.parent)]
    from hosts_at_fault import Host  # noqa: PLC0415

    def well(host: Host) -> None:
        del host

    faults = {
        "well": well,
        "mig": lambda host: host.mig(),
        "mig-no-nodes": lambda host: host.mig(nodes=False),
        "docker": lambda host: host.docker(),
        "docker-late": lambda host: host.docker(written_s=5000),
        "containerd": lambda host: host.containerd(),
        "containerd-default": lambda host: host.containerd(default="gpuruntime"),
        "no-nodes": lambda host: host.without("/dev"),
        "no-module": lambda host: host.without("/proc/driver"),
        "old-spec": lambda host: host.spec(version="535.261.03"),
        "bad-config": lambda host: host.config("x = [\n"),
        "unknown-key": lambda host: host.config("no-such = 1\n"),
        "params": lambda host: host.params(ModifyDeviceFiles="0"),
        "old-podman": lambda host: host.package("podman", "4.0.9"),
        "other-driver": lambda host: host.module("570.86.15"),
    }
    for name, fault in faults.items():
        host = Host(WORK / "hosts" / name)
        fault(host)
        words = ("doctor", "--root", host.path)
        recorder.call(f"doctor/{name}", recorder.program("gpuruntime"), *words)
        recorder.call(f"doctor/{name}-json", recorder.program("gpuruntime"), *words, "--json")


def configs(recorder: Recorder) -> None:
    """`config` and what it writes."""
    ours = recorder.program("gpuruntime")
    written = WORK / "written.toml"
    for name, text in (
        ("usual", ""),
        ("some", CONFIG),
        ("bad-toml", "a = [\n"),
        ("bad-value", 'disable-require = "x"\nhook-deadline = 0\n'),
        ("bad-mode", '[nvidia-container-runtime]\nmode = "x"\n'),
    ):
        for command in ("show", "show --json", "check", "compile", ""):
            recorder.config(text)
            recorder.forget()
            case = f"config/{name}/{command.replace(' ', '') or 'print'}"
            recorder.call(case, ours, "config", *command.split(), files={"run": KEPT})
        for number, words in enumerate(
            (
                ("--set", "disable-require=false"),
                ("--set", "nvidia-container-runtime.runtimes=crun:runc"),
                ("--set", "features.allow-ldconfig-from-container"),
                ("--set", "features.allow-cuda-compat-libs-from-container=nil"),
                ("--set", "missing-gpu=warn", "--set", "health=nvml"),
                ("--set", "no-such=1"),
            )
        ):
            recorder.config(text)
            recorder.call(f"config/{name}/set-{number}", ours, "config", *words)
            place = {"written": WORK / "config.toml"}
            recorder.call(
                f"config/{name}/in-place-{number}",
                *(ours, "config", "set", "--in-place", *words[1::2]),
                files=place,
            )
        written.unlink(missing_ok=True)
        recorder.config(text)
        recorder.call(
            f"config/{name}/output",
            *(ours, "config", "--set", "disable-require", "--output", written),
            files={"written": written},
        )
    recorder.config()
    recorder.call("config/default", ours, "config", "default")
    recorder.call("config/default-ctk", WORK / "bin/nvidia-ctk", "config", "default")
    for variable in ("GPURUNTIME_CONFIG", "NVIDIA_CTK_CONFIG_FILE_PATH"):
        more = {
            "GPURUNTIME_CONFIG": "",
            variable: str(DATA / "engines/k0s/before/containerd.toml"),
        }
        recorder.call(f"config/by-{variable}", ours, "config", "show", **more)
    recorder.call("config/none", ours, "config", "show", GPURUNTIME_CONFIG="")


def explanations(recorder: Recorder) -> None:
    """`explain`, of containers in every form."""
    ours = recorder.program("gpuruntime")
    for path in sorted((DATA / "configs").iterdir()):
        recorder.call(f"explain/{path.stem}", ours, "explain", "--json", path)
        recorder.call(f"explain/{path.stem}-text", ours, "explain", "--verbose", path)
    for name, words in (
        ("gpus-all", ("--gpus", "all")),
        ("gpus-one", ("--gpus", "1")),
        ("gpus-device", ("--gpus", "device=0")),
        ("gpus-mig", ("--gpus", "device=1:0")),
        ("gpus-bad", ("--gpus", "device=9")),
        ("env", ("-e", f"{VISIBLE}=0", "-e", "NVIDIA_DRIVER_CAPABILITIES=all")),
        ("image", ("--image-env", "CUDA_VERSION=9.0")),
        ("require", ("-e", f"{VISIBLE}=0", "--image-env", "NVIDIA_REQUIRE_CUDA=cuda>=99")),
        ("imex", ("-e", f"{VISIBLE}=0", "-e", "NVIDIA_IMEX_CHANNELS=0")),
        ("device", ("--device", "nvidia.com/gpu=0")),
        ("annotation", ("--annotation", "cdi.k8s.io/x=nvidia.com/gpu=0")),
        ("privileged", ("--privileged", "-e", f"{VISIBLE}=all")),
        ("userns", ("--userns", "auto", "--gpus", "all")),
        ("volume", ("-v", "/dev/null:/var/run/nvidia-container-devices/0")),
        ("legacy", ("--mode", "legacy", "--gpus", "all")),
        ("cdi", ("--mode", "cdi", "--gpus", "all")),
        ("nothing", ()),
    ):
        recorder.call(f"explain/{name}", ours, "explain", "--json", *words)
        recorder.call(f"explain/{name}-text", ours, "explain", *words)
    text = json.dumps(container(f"{VISIBLE}=0"))
    recorder.call("explain/stdin", ours, "explain", "-", stdin=text)
    for name, text in (("bad-empty", ""), ("bad-json", "{"), ("bad-list", "[]")):
        recorder.call(f"explain/{name}", ours, "explain", "--json", "-", stdin=text)
