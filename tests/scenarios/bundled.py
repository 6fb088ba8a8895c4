# SPDX-License-Identifier: Apache-2.0
"""Use a bundle in a root that has no Python, and moved; print what was seen.

The root is that of a driver container's host: busybox, runc with its libraries, and the driver in
a directory of its own. Called with the archive and the recording program of tests/fakes/runtime.
Standard output is one JSON object: step → result.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import scenario

# A directory of every system, empty on most; here it is a file system of its own.
PLACE = Path("/srv")
ROOT = PLACE / "root"
FIRST, SECOND = "/opt/gpuruntime", "/usr/local/else where"
SHOW = """
echo nodes: $(busybox ls /dev | busybox grep nvidia)
busybox grep ModifyDeviceFiles /proc/driver/nvidia/params
for name in libcuda.so.1 libnvidia-ml.so.1 libcuda.so; do
  for path in /usr/lib/x86_64-linux-gnu/$name; do test -e $path && echo file: $name; done
done
busybox grep -q -a libcuda.so.1 /etc/ld.so.cache && echo cached
"""
CONFIG = '[nvidia-container-cli]\nroot = "{}"\n'
CONTAINER = """
{programs}/gpu-container-runtime create --bundle /bundle {name} || exit
{programs}/gpu-container-runtime start {name}
for i in $(seq 100); do
  {programs}/gpu-container-runtime state {name} | grep -q stopped && break
  sleep 0.05
done
{programs}/gpu-container-runtime delete --force {name}
"""


def inside(script: str) -> list[object]:
    """Run the shell *script* in the root; return its status and output."""
    mounts = [f"mount --rbind /{name} {ROOT}/{name}" for name in ("dev", "proc", "sys", "run")]
    enter = [f"mount --rbind {ROOT} {ROOT}", *mounts, f"cd {ROOT}", "pivot_root . old"]
    shell = "exec /bin/busybox env -i PATH=/bin:/usr/bin /bin/sh -c"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c",
         f'{" && ".join(enter)} && {shell} "$0"', f"umount -l /old; {script}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    return [done.returncode, done.stdout]


def make_host(archive: str) -> None:
    """Make the root: a shell and the unpacked bundle, nothing else that could be executed."""
    for name in (
        "bin",
        "dev",
        "proc",
        "sys",
        "run",
        "old",
        "tmp",
        "etc/cdi",
        "etc/gpuruntime",
        "opt",
        "usr/local",
    ):
        (ROOT / name).mkdir(parents=True)
    shutil.copy(scenario.BUSYBOX, ROOT / "bin")
    for name in scenario.run("/bin/busybox", "--list").stdout.split():
        if not (ROOT / "bin" / name).exists():
            (ROOT / "bin" / name).symlink_to("busybox")
    scenario.run("tar", "-C", ROOT / "opt", "-xf", archive)
    (unpacked,) = (ROOT / "opt").iterdir()
    unpacked.rename(f"{ROOT}{FIRST}")


def copy_runtime() -> None:
    """Put runc and the libraries that it needs into the root."""
    program = shutil.which("runc", path="/usr/bin:/usr/sbin") or ""
    needed = [word for word in scenario.run("ldd", program).stdout.split() if word[0] == "/"]
    for path in [program, *needed]:
        target = Path(f"{ROOT}{path}") if path != program else ROOT / "bin" / "runc"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def python_of_root() -> list[str]:
    """Return what in the root has to do with Python and is not of the bundle."""
    return [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if "python" in path.name
        and not f"{path}".startswith((f"{ROOT}{FIRST}", f"{ROOT}{SECOND}"))
    ]


def make_bundle(target: Path) -> None:
    """Put a container's bundle into the root, with what it needs of this machine."""
    made = scenario.make_bundle(PLACE / "work", "0,3")
    config = json.loads((made / "config.json").read_text())
    config["process"]["args"][-1] = SHOW
    (made / "config.json").write_text(json.dumps(config))
    for hook in config["hooks"]["createRuntime"]:
        path = Path(f"{ROOT}{hook['path']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(hook["path"], path)
    made.rename(target)


def container(programs: str, name: str, config: str, env: str) -> dict[str, object]:
    """Run the container that asks by *env*; return what it printed and what it was given."""
    document = json.loads(config)
    document["process"]["env"] = ["PATH=/bin", env]
    (ROOT / "bundle" / "config.json").write_text(json.dumps(document))
    rootfs = ROOT / "bundle" / "rootfs"
    for made in (rootfs / "etc" / "ld.so.cache", rootfs / "usr" / "lib"):
        # A container's root is fresh.
        if made.is_dir():
            shutil.rmtree(made)
        else:
            made.unlink(missing_ok=True)
    status, output = inside(CONTAINER.format(programs=shlex.quote(programs), name=name))
    stored = json.loads((ROOT / "bundle" / "config.json").read_text())
    hooks = [hook["path"] for hook in stored["hooks"].get("createContainer", [])]
    return {"status": status, "output": output, "hooks": hooks}


def passed_on(programs: str, recorder: str, config: str) -> dict[str, object]:
    """Return the environment that the low-level runtime gets by Python, and the engine's."""
    (ROOT / "bundle" / "config.json").write_text(config)
    shutil.copy(recorder, ROOT / "bin" / "recorder")
    (ROOT / "etc" / "recorder.toml").write_text(
        '[nvidia-container-runtime]\nruntimes = ["/bin/recorder"]\n'
        + CONFIG.format(os.environ["SIMHOST_ROOT"])
    )
    # A loader that follows the caller's variable would use what is there.
    broken = ROOT / "broken"
    broken.mkdir()
    for library in (Path(f"{ROOT}{FIRST}") / "lib/gpuruntime/python/lib").glob("*.so*"):
        (broken / library.name).write_text("no library\n")
    variables = [
        *("LD_LIBRARY_PATH=/broken", "PYTHONHOME=/broken", "PYTHONPATH=/broken", "ODD=a=b\nc"),
        *("GPURUNTIME_CONFIG=/etc/recorder.toml", "GPURUNTIME_FAST=off", "RECORDER_OUT=/record"),
    ]
    runtime = f"{programs}/gpu-container-runtime create --bundle /bundle one"
    outcome = inside(f"exec busybox env -i {shlex.join(variables)} {runtime}")
    data = (ROOT / "record").read_bytes()
    head, _, rest = data[data.index(b"@environ ") :].partition(b"\n")
    length = int(head.split()[1])
    return {
        "came": outcome,
        "environment": rest[:length].decode().split("\0")[:-1],
        "given": variables,
        # The control: a program that the variable does concern.
        "control": inside("LD_LIBRARY_PATH=/broken runc --version"),
    }


def main() -> None:
    """Make the root, use the bundle there, move it, use it again."""
    archive, recorder = sys.argv[1:]
    scenario.run("mount", "-t", "tmpfs", "tmpfs", PLACE)
    (PLACE / "work").mkdir()
    make_host(archive)
    (ROOT / "etc/gpuruntime/config.toml").write_text(CONFIG.format(os.environ["SIMHOST_ROOT"]))
    programs = f"{FIRST}/bin"
    roots = f"--driver-root {os.environ['SIMHOST_ROOT']} --dev-root /"
    generate = f"cdi generate {roots} --output /etc/cdi/nvidia.json"
    results: dict[str, object] = {
        "python of the root": python_of_root(),
        "libraries of the root": [str(path) for path in ROOT.glob("lib*")],
        "info": inside(f"{programs}/gpuruntime info"),
        "by a link": inside(f"ln -s {programs}/gpuruntime /bin/gpuruntime; gpuruntime --version"),
        "generate": inside(f"{programs}/gpuruntime {generate}"),
        "validate": inside(f"{programs}/gpuruntime cdi validate /etc/cdi/nvidia.json"),
        "configure": inside(f"{programs}/gpuruntime runtime configure --runtime docker --dry-run"),
        "hook version": inside(f"{programs}/gpu-cdi-hook --version"),
    }
    copy_runtime()
    make_bundle(ROOT / "bundle")
    config = (ROOT / "bundle" / "config.json").read_text()
    request = "NVIDIA_VISIBLE_DEVICES=0,3"
    results["container"] = container(programs, "one", config, request)
    results["by a spec"] = container(
        programs, "two", config, "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=3"
    )
    results["passed on"] = passed_on(programs, recorder, config)
    os.rename(f"{ROOT}{FIRST}", f"{ROOT}{SECOND}")
    programs = f"{SECOND}/bin"
    results["moved"] = container(programs, "three", config, request)
    results["moved command"] = inside(f"{shlex.quote(programs)}/gpuruntime --version")
    results["without it"] = container(f"{FIRST}/bin", "four", config, request)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
