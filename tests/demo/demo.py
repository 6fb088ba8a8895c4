# SPDX-License-Identifier: Apache-2.0
"""`make demo`: two of eight GPUs in a real container, by a real runc, through us.

On a machine without a GPU, or with SIMULATED=1, on the simulated GPU host. Leaves nothing behind,
and shows that it does not.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
BIN = os.path.join(TREE, ".venv", "bin")
SIMHOST = os.path.join(TREE, "tests", "simhost", "simhost.py")
RUNTIME = os.path.join(BIN, "gpu-container-runtime")
BUSYBOX = "/bin/busybox"
ROUNDS = 11
SETTLE_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run the demo, inside the simulated host or on the real one, and compare the machine."""
    if sys.argv[1:] == ["--inside"]:
        show_container()
        return
    if os.geteuid() != 0:
        sys.exit("demo: containers need root: run it as root, for example with sudo make demo")
    if shutil.which("runc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
        sys.exit("demo: runc is missing: run make setup as root, or install the package runc")
    # Whatever of ours outlives its parent becomes our child, and is seen.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = machine()
    inside = [sys.executable, os.path.abspath(__file__), "--inside"]
    if is_real():
        print("demo: a real GPU is here")
    else:
        print("demo: no GPU here, so on the simulated host: eight GPUs, driver 550")
        inside = [sys.executable, SIMHOST, "run", "--", *inside]
    sys.stdout.flush()
    # What tests watch the launcher with costs time.
    environment = {**os.environ, "SIMHOST_WATCHED": "off"}
    status = subprocess.run(inside, env=environment, check=False).returncode
    if status != 0:
        sys.exit(f"demo: failed, status {status}")
    compare(before)
    print("demo: ok")


def is_real() -> bool:
    """Return whether to use a real GPU."""
    return not os.environ.get("SIMULATED") and os.path.exists("/dev/nvidiactl")


def machine() -> dict[str, frozenset[str]]:
    """Return what a container could leave behind: names in /dev, mounts, cgroups."""
    nodes = set()
    for directory, children, names in os.walk("/dev"):
        if directory == "/dev":
            children[:] = [name for name in children if name not in ("pts", "shm", "mqueue")]
        nodes.update(os.path.join(directory, name) for name in names)
    cgroups = {directory for directory, _, _ in os.walk("/sys/fs/cgroup")}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        mounts = {line.split(maxsplit=2)[2] for line in lines}
    return {
        "/dev": frozenset(nodes),
        "mounts": frozenset(mounts),
        "cgroups": frozenset(cgroups),
    }


def children() -> list[int]:
    """Return our children that still run."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if pid == 0:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as stream:
                return [int(word) for word in stream.read().split()]


def compare(before: dict[str, frozenset[str]]) -> None:
    """Print that the machine is as before; exit if it is not so after a while."""
    end = time.monotonic() + SETTLE_S
    while True:
        after = machine()
        left = [
            f"{what}: {item}"
            for what in before
            for item in sorted(after[what] - before[what]) + sorted(before[what] - after[what])
        ]
        left += [f"process: {pid}" for pid in children()]
        if not left:
            break
        if time.monotonic() > end:
            sys.exit("demo: left on the machine: " + "; ".join(left))
        time.sleep(0.1)
    print("afterwards: /dev, mounts, cgroups and processes are as before")


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Return what *command* prints; exit with its errors if it fails."""
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )
    if done.returncode != 0:
        sys.exit(f"demo: {' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout


def show_container() -> None:
    """Make a bundle, start it through us, and show what its container sees."""
    with tempfile.TemporaryDirectory(prefix="gpuruntime-demo-") as work:
        os.chmod(work, 0o755)
        environment = defaults(work)
        explain(environment)
        bundle = make_bundle(work)
        original = read(os.path.join(bundle, "config.json"))
        output = run_container(bundle, work, environment)
        print("\ninside the container:")
        print("".join(f"  {line}\n" for line in output.splitlines()), end="")
        check(output)
        with open(os.path.join(bundle, "config.json"), "w", encoding="utf-8") as stream:
            stream.write(original)
        measure(bundle, original, environment)


def defaults(work: str) -> dict[str, str]:
    """Return an environment in which every option has its default, whatever the machine has."""
    config = os.path.join(work, "config.toml")
    with open(config, "w", encoding="utf-8"):
        pass
    return {"GPURUNTIME_CONFIG": config}


def asked() -> str:
    """Return what the container asks for."""
    return f"NVIDIA_VISIBLE_DEVICES={'1,3' if os.environ.get('SIMHOST') else 'all'}"


def explain(environment: dict[str, str]) -> None:
    """Print which GPUs such a container gets, before there is one."""
    words = ["explain", "--env", asked()]
    print(f"$ gpuruntime {' '.join(words)}")
    for line in run(os.path.join(BIN, "gpuruntime"), *words, env=environment).splitlines():
        if line.startswith(("mode", "request", "capabilities", "gpu ")):
            print(f"  {line}")


def read(path: str) -> str:
    """Return the text of *path*."""
    with open(path, encoding="utf-8") as stream:
        return stream.read()


def make_bundle(work: str) -> str:
    """Make a bundle: the machine's own glibc and loader, busybox, and a small C program."""
    bundle = os.path.join(work, "bundle")
    root = os.path.join(bundle, "rootfs")
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        os.makedirs(os.path.join(root, name))
    program = os.path.join(root, "bin", "hello-cuda")
    run("gcc", "-O1", "-o", program, os.path.join(HERE, "hello_cuda.c"))
    # `ldd` names the loader and the C library by the paths where they must be.
    for word in run("ldd", program).split():
        if word.startswith("/"):
            os.makedirs(root + os.path.dirname(word), exist_ok=True)
            shutil.copy(word, root + word)
    shutil.copy(BUSYBOX, os.path.join(root, "bin", "busybox"))
    run("runc", "spec", "--bundle", bundle)
    path = os.path.join(bundle, "config.json")
    config = json.loads(read(path))
    config["process"]["terminal"] = False
    config["process"]["args"] = ["/bin/busybox", "sh", "-c", script()]
    config["process"]["env"] = ["PATH=/bin:/usr/bin", asked()]
    config["root"]["readonly"] = False
    for capabilities in config["process"]["capabilities"].values():
        capabilities.append("CAP_MKNOD")
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(config, stream)
    if os.environ.get("SIMHOST"):
        # What a kernel driver does by itself: its entries below /proc, in the container's too.
        run(sys.executable, SIMHOST, "fakeproc", bundle)
    print(f"\nthe bundle asks for {asked()}; as OCI runtime: us, then runc")
    return bundle


def script() -> str:
    """Return what the container runs, with busybox alone."""
    if not os.environ.get("SIMHOST"):
        return "/bin/hello-cuda; nvidia-smi -L | /bin/busybox sed 's/^/smi: /'"
    return """
b=/bin/busybox
for node in /dev/nvidia*; do [ -c $node ] &&
  echo "$node $($b stat -c '%t:%T' $node | { IFS=: read a i; echo $((0x$a)):$((0x$i)); })"; done
echo "open the granted /dev/nvidia1: $($b cat /dev/nvidia1 2>&1 | $b sed 's/.*: //')"
$b mknod /dev/other c 195 0
echo "open GPU 0, made by mknod: $($b cat /dev/other 2>&1 | $b sed 's/.*: //')"
/bin/hello-cuda
$b grep ModifyDeviceFiles /proc/driver/nvidia/params
"""


def run_container(bundle: str, work: str, environment: dict[str, str]) -> str:
    """Create, start and delete the container; return what it printed."""
    name = f"gpuruntime-demo-{os.getpid()}"
    out = os.path.join(work, "output")
    with open(out, "w", encoding="utf-8") as stream:
        created = subprocess.run(
            [RUNTIME, "create", "--bundle", bundle, name],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, **environment},
        )
    if created.returncode != 0:
        sys.exit(f"demo: create failed: {read(out)}")
    try:
        run(RUNTIME, "start", name, env=environment)
        for _ in range(300):
            state = json.loads(run(RUNTIME, "state", name, env=environment))
            if state["status"] == "stopped":
                break
            time.sleep(0.1)
    finally:
        run(RUNTIME, "delete", "--force", name, env=environment)
    return read(out)


def check(output: str) -> None:
    """Exit if the container did not see what it was to see."""
    if not os.environ.get("SIMHOST"):
        inside = [line[5:] for line in output.splitlines() if line.startswith("smi: ")]
        if inside != run("nvidia-smi", "-L").splitlines():
            sys.exit("demo: nvidia-smi -L differs inside and outside")
        print("nvidia-smi -L inside equals outside")
        return
    for wanted in (
        "/dev/nvidia1 195:1",
        "/dev/nvidia3 195:3",
        "/dev/nvidiactl 195:255",
        "granted /dev/nvidia1: No such device or address",
        "made by mknod: Operation not permitted",
        "libcuda.so.1 is loaded",
        "ModifyDeviceFiles: 0",
    ):
        if wanted not in output:
            sys.exit(f'demo: the container did not show "{wanted}"')
    print("ENXIO from the granted node: no driver is behind a simulated GPU.")
    print("EPERM from the other: the device cgroup refuses it.")


def measure(bundle: str, original: str, environment: dict[str, str]) -> None:
    """Print the cost of a create through us beside that of runc alone, in one interleaved run."""
    path = os.path.join(bundle, "config.json")
    config = json.loads(original)
    config["process"]["env"] = ["PATH=/bin:/usr/bin"]
    plain = json.dumps(config)
    times: dict[str, list[float]] = {"runc": [], "no GPU": [], "GPUs": []}
    runc = shutil.which("runc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "runc"
    cases = (("runc", runc, plain), ("no GPU", RUNTIME, plain), ("GPUs", RUNTIME, original))
    for index in range(ROUNDS):
        for what, program, text in cases:
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
            name = f"gpuruntime-demo-{os.getpid()}-{index}"
            start = time.perf_counter()
            create = [program, "create", "--bundle", bundle, name]
            done = subprocess.run(
                create,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )
            times[what].append(time.perf_counter() - start)
            if done.returncode != 0:
                sys.exit(f"demo: {' '.join(create)}: status {done.returncode}")
            run(runc, "delete", "--force", name)
    bare = statistics.median(times["runc"])
    print(
        f"\nrunc's own create = 1; through us without a GPU "
        f"{statistics.median(times['no GPU']) / bare:.2f}, with GPUs "
        f"{statistics.median(times['GPUs']) / bare:.2f} "
        f"(medians of {ROUNDS}, one run, interleaved)"
    )


if __name__ == "__main__":
    main()
