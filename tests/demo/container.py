# SPDX-License-Identifier: Apache-2.0
"""`container.py NAME WORK simulated|real`: the part of the demo that runs on the GPU host.

Makes a bundle below the directory WORK, starts the container NAME through us, and shows what it
sees. Called by demo.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import driver

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
BIN = os.path.join(TREE, ".venv", "bin")
SIMHOST = os.path.join(TREE, "tests", "simhost", "simhost.py")
RUNTIME = os.path.join(BIN, "gpu-container-runtime")
BUSYBOX = "/bin/busybox"
GLIBC = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1")
ROUNDS = 11
SIMULATED_SCRIPT = """
b=/bin/busybox
for node in /dev/nvidia*; do [ -c $node ] &&
  echo "$node $($b stat -c '%t:%T' $node | { IFS=: read a i; echo $((0x$a)):$((0x$i)); })"; done
echo "open the granted /dev/nvidia1: $($b cat /dev/nvidia1 2>&1 | $b sed 's/.*: //')"
$b mknod /dev/other c 195 0
echo "open GPU 0, made by mknod: $($b cat /dev/other 2>&1 | $b sed 's/.*: //')"
/bin/hello-cuda
$b grep ModifyDeviceFiles /proc/driver/nvidia/params
"""
REAL_SCRIPT = "/bin/hello-cuda init; nvidia-smi -L | /bin/busybox sed 's/^/smi: /'"
EXPECTED_LINES = (
    "/dev/nvidia1 195:1",
    "/dev/nvidia3 195:3",
    "/dev/nvidiactl 195:255",
    "granted /dev/nvidia1: No such device or address",
    "made by mknod: Operation not permitted",
    "libcuda.so.1 is loaded",
    "ModifyDeviceFiles: 0",
)


def main() -> None:
    """Explain the request, start the container, check its output, and measure creates."""
    # demo.py tells what a signal of the terminal ended; a traceback here would say less.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    name, work, host = sys.argv[1:]
    demo = Demo(name, work, is_simulated=host == "simulated")
    demo.explain()
    demo.make_bundle()
    print(f"\nthe bundle asks for {demo.request}; as OCI runtime: us, then runc")
    output = demo.run_container()
    print("\ninside the container:")
    print("".join(f"  {line}\n" for line in output.splitlines()), end="")
    demo.check(output)
    demo.measure()


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


def read(path: str) -> str:
    """Return the text of *path*."""
    with open(path, encoding="utf-8") as stream:
        return stream.read()


def write(path: str, text: str) -> None:
    """Replace the content of *path* by *text*."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


@dataclass
class Demo:
    """One container, its bundle below *work*, and the environment of our programs."""

    name: str
    work: str
    is_simulated: bool

    def __post_init__(self) -> None:
        self.request = f"NVIDIA_VISIBLE_DEVICES={'1,3' if self.is_simulated else 'all'}"
        self.bundle = os.path.join(self.work, "bundle")
        self.config = os.path.join(self.bundle, "config.json")
        # Every option has its default, whatever config file the machine has.
        empty = os.path.join(self.work, "config.toml")
        write(empty, "")
        self.environment = {"GPURUNTIME_CONFIG": empty}
        # The machine's own directory of states is not used: nothing may remain there.
        self.root = ("--root", os.path.join(self.work, "states"))

    def explain(self) -> None:
        """Print which GPUs such a container gets, before there is one."""
        words = ["explain", "--env", self.request]
        print(f"+ gpuruntime {' '.join(words)}")
        text = run(os.path.join(BIN, "gpuruntime"), *words, env=self.environment)
        for line in text.splitlines():
            if line.startswith(("mode", "request", "capabilities", "gpu ")):
                print(f"  {line}")

    def make_bundle(self) -> None:
        """Make a bundle: the machine's own glibc and loader, busybox, and a small C program."""
        root = os.path.join(self.bundle, "rootfs")
        for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            os.makedirs(os.path.join(root, name))
        program = os.path.join(root, "bin", "hello-cuda")
        run("gcc", "-O1", "-o", program, os.path.join(HERE, "hello_cuda.c"))
        # `ldd` names the loader and the C library by the paths where they must be.
        files = [word for word in run("ldd", program).split() if word.startswith("/")]
        for file in files:
            os.makedirs(root + os.path.dirname(file), exist_ok=True)
            shutil.copy(file, root + file)
            # The files of a real driver need more of glibc, which lies beside its libc.
            for name in GLIBC if os.path.basename(file) == "libc.so.6" else ():
                directory = os.path.dirname(file)
                shutil.copy(f"{directory}/{name}", f"{root}{directory}/{name}")
        shutil.copy(BUSYBOX, os.path.join(root, "bin", "busybox"))
        run("runc", "spec", "--bundle", self.bundle)
        config = json.loads(read(self.config))
        script = SIMULATED_SCRIPT if self.is_simulated else REAL_SCRIPT
        config["process"]["terminal"] = False
        config["process"]["args"] = ["/bin/busybox", "sh", "-c", script]
        config["process"]["env"] = ["PATH=/bin:/usr/bin", self.request]
        config["root"]["readonly"] = False
        for capabilities in config["process"]["capabilities"].values():
            capabilities.append("CAP_MKNOD")
        write(self.config, json.dumps(config))
        if "SIMHOST" in os.environ:
            # What a kernel driver does by itself: its entries below /proc, in the container's too.
            run(sys.executable, SIMHOST, "fakeproc", self.bundle)

    def run_container(self) -> str:
        """Create, start and delete the container; return what it printed."""
        original = read(self.config)
        output = os.path.join(self.work, "output")
        with open(output, "w", encoding="utf-8") as stream:
            created = subprocess.run(
                [RUNTIME, *self.root, "create", "--bundle", self.bundle, self.name],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **self.environment},
            )
        if created.returncode != 0:
            sys.exit(f"demo: create failed: {read(output)}")
        runtime = (RUNTIME, *self.root)
        try:
            run(*runtime, "start", self.name, env=self.environment)
            for _ in range(300):
                state = json.loads(run(*runtime, "state", self.name, env=self.environment))
                if state["status"] == "stopped":
                    break
                time.sleep(0.1)
        finally:
            run(*runtime, "delete", "--force", self.name, env=self.environment)
        write(self.config, original)
        return read(output)

    def check(self, output: str) -> None:
        """Exit with an error unless *output* shows the granted GPUs and no other."""
        if not self.is_simulated:
            inside = [line[5:] for line in output.splitlines() if line.startswith("smi: ")]
            if inside != driver.list_gpus():
                sys.exit("demo: nvidia-smi -L differs inside and outside")
            if "cuInit succeeds" not in output:
                sys.exit("demo: cuInit does not succeed in the container")
            print("nvidia-smi -L inside equals outside")
            return
        for line in EXPECTED_LINES:
            if line not in output:
                sys.exit(f'demo: the container did not show "{line}"')
        print("ENXIO from the granted node: no driver is behind a simulated GPU.")
        print("EPERM from the other: the device cgroup refuses it.")

    def measure(self) -> None:
        """Print the cost of a create through us beside that of runc alone, interleaved."""
        original = read(self.config)
        config = json.loads(original)
        config["process"]["env"] = ["PATH=/bin:/usr/bin"]
        plain = json.dumps(config)
        cases = (("runc", "runc", plain), ("no GPU", RUNTIME, plain), ("GPUs", RUNTIME, original))
        times: dict[str, list[float]] = {case: [] for case, _, _ in cases}
        for index in range(ROUNDS):
            for case, program, text in cases:
                write(self.config, text)
                name = f"{self.name}-{index}"
                create = [program, *self.root, "create", "--bundle", self.bundle, name]
                start = time.perf_counter()
                done = subprocess.run(
                    create,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, **self.environment},
                )
                times[case].append(time.perf_counter() - start)
                if done.returncode != 0:
                    sys.exit(f"demo: {' '.join(create)}: status {done.returncode}")
                run("runc", *self.root, "delete", "--force", name)
        bare = statistics.median(times["runc"])
        no_gpu, gpus = (statistics.median(times[case]) / bare for case in ("no GPU", "GPUs"))
        print(
            f"\nrunc's own create = 1; through us without a GPU {no_gpu:.2f}, "
            f"with GPUs {gpus:.2f} (medians of {ROUNDS}, one run, interleaved)"
        )


if __name__ == "__main__":
    main()
