# SPDX-License-Identifier: Apache-2.0
"""`python -m gpunode.validation.trial`: create one container with GPUs, and print what it gets.

Runs as the first process of mount and PID namespaces of its own, so that nothing of the container
remains when it ends, however it ends. The container's root is an overlay of this program's own
file system, whose upper layer is in a tmpfs: hooks write there, and the host is unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from gpuruntime.errors import GpuRuntimeError

# Directories that are seldom used, one of which the tmpfs hides in this mount namespace.
_PLACES = ("/mnt", "/media", "/srv", "/tmp")  # noqa: S108 (a mount point)
# Parts of the root file system that may be mounts of their own.
_LAYERS = ("/", "/usr")
_CALL_S, _PROGRAM_S, _DELETE_S, _STEP_S = 30.0, 20.0, 10.0, 0.02
_DEVICE = re.compile(r"nvidia[0-9]+\Z")
_DOCTOR = 'run "gpuruntime doctor" on the host'
_NVML = "/libnvidia-ml.so."
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Calls cuInit through the libcuda that the loader finds, and prints which file that is.
_CUDA_PROGRAM = """
import ctypes, json
try:
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    maps = [line.split(None, 5) for line in open("/proc/self/maps")]
    names = {words[5].strip() for words in maps if len(words) == 6}
    mounts = {line.split(" ")[4] for line in open("/proc/self/mountinfo")}
    library = next((name for name in sorted(names) if "/libcuda.so" in name), "")
    print(json.dumps({"code": code, "library": library, "injected": library in mounts}))
except OSError as error:
    print(json.dumps({"problem": str(error)}))
"""


class TrialError(GpuRuntimeError):
    """The container cannot be prepared, created or started."""

    phase = "trial-container"


def main() -> None:
    """Read what to do from the command line, and print the result as one JSON object."""
    settings = json.loads(sys.argv[1])
    container = _Container(**settings)
    try:
        result = container.run()
    except TrialError as error:
        result = {"problem": error.message, "action": error.hint}
    except (OSError, ValueError) as error:
        result = {"problem": f"cannot prepare a container: {error}", "action": _DOCTOR}
    sys.stdout.write(json.dumps(result))


class _Container:
    """A container *name* of the OCI runtime *runtime*, a path below *host_root*.

    With *calls_cuda* it is started, and calls cuInit.
    """

    def __init__(self, name: str, runtime: str, host_root: str, *, calls_cuda: bool) -> None:
        self.name = name
        self.runtime = runtime
        self.host_root = host_root.rstrip("/")
        self.calls_cuda = calls_cuda
        # The same directory, as the runtime and as this program sees it.
        self.place = next(
            (path for path in _PLACES if os.path.isdir(f"{self.host_root}{path}")), _PLACES[-1]
        )
        self.work = f"{self.host_root}{self.place}"

    def run(self) -> dict[str, Any]:
        """Return the nodes and mounts of the container, and what its program prints."""
        self._prepare()
        try:
            self._call(
                "create", "--bundle", f"{self.place}/bundle", "--pid-file", f"{self.place}/pid"
            )
            result = self._seen()
            if self.calls_cuda:
                self._call("start")
                result["cuda"] = self._output()
        finally:
            self._delete()
        return result

    def _prepare(self) -> None:
        """Mount the container's root and write its bundle."""
        if self.host_root:
            # The runtime looks for its own processes there, which are those of this namespace.
            _command("mount", "-t", "proc", "proc", f"{self.host_root}/proc")
        _command("mount", "-t", "tmpfs", "-o", "mode=755,size=64m", "trial", self.work)
        os.mkdir(f"{self.work}/bundle")
        rootfs = f"{self.work}/bundle/rootfs"
        os.mkdir(rootfs)
        layers = [path for path in _LAYERS if path == "/" or os.path.ismount(path)]
        for number, layer in enumerate(layers):
            for name in ("upper", "work"):
                os.mkdir(f"{self.work}/{name}{number}")
            _command(
                *("mount", "-t", "overlay", "-o"),
                f"lowerdir={layer},upperdir={self.work}/upper{number},"
                f"workdir={self.work}/work{number}",
                *("overlay", rootfs if layer == "/" else f"{rootfs}{layer}"),
            )
        with open(f"{self.work}/bundle/config.json", "w", encoding="utf-8") as file:
            json.dump(self._config(layers), file)

    def _config(self, layers: Sequence[str]) -> dict[str, Any]:
        interpreter = os.path.realpath(sys.executable)
        devices = {os.stat(layer).st_dev for layer in layers}
        # An interpreter outside these file systems is mounted.
        mounts = [
            {"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]}
            for path in sorted({sys.base_prefix, os.path.dirname(interpreter)})
            if os.stat(path).st_dev not in devices
        ]
        namespaces = ("pid", "mount", "ipc", "uts", "network")
        return {
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs"},
            "hostname": "trial",
            "process": {
                "args": [interpreter, "-I", "-S", "-c", _CUDA_PROGRAM],
                "cwd": "/",
                "env": [
                    *(_PATH, "NVIDIA_VISIBLE_DEVICES=all"),
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
                ],
                "user": {"uid": 0, "gid": 0},
                "noNewPrivileges": True,
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {
                    "destination": "/dev",
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
                },
                *mounts,
            ],
            "linux": {
                "namespaces": [{"type": name} for name in namespaces],
                "cgroupsPath": f"/{self.name}",
                "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            },
        }

    def _call(self, verb: str, *options: str) -> None:
        """Call the runtime for the container; raise TrialError with the end of what it says."""
        # The container keeps these files open.
        with (
            open(f"{self.work}/output", "ab") as output,
            open(f"{self.work}/errors", "w+b") as errors,
        ):
            try:
                done = subprocess.run(
                    [*self._runtime(), verb, *options, self.name],
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    timeout=_CALL_S,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise TrialError(
                    f'cannot {verb} a container by "{self.runtime}": {error}',
                    _DOCTOR,
                ) from error
            if done.returncode != 0:
                errors.seek(0)
                lines = errors.read().decode("utf-8", "replace").strip().splitlines()
                reason = lines[0] if lines else f"exit status {done.returncode}"
                raise TrialError(
                    f'"{self.runtime}" cannot {verb} a container with GPUs: {reason}',
                    _hint(lines) or _DOCTOR,
                )

    def _runtime(self) -> list[str]:
        words = [self.runtime, "--root", f"{self.place}/state"]
        return ["chroot", self.host_root, *words] if self.host_root else words

    def _seen(self) -> dict[str, Any]:
        """Return the device nodes and the files of the driver in the created container."""
        with open(f"{self.work}/pid", encoding="ascii") as file:
            pid = int(file.read())
        try:
            names = os.listdir(f"/proc/{pid}/root/dev")
            with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
                points = [line.split(" ")[4] for line in file]
        except OSError as error:
            raise TrialError(
                f"the container has ended before it was started: {error.strerror}",
                "look at the log of the runtime",
            ) from error
        return {
            "nodes": sorted(name for name in names if _DEVICE.match(name)),
            "nvml": next((point for point in points if _NVML in point), ""),
        }

    def _output(self) -> dict[str, Any]:
        """Return what the program prints; raise TrialError if it prints nothing in time."""
        deadline = time.monotonic() + _PROGRAM_S
        while time.monotonic() < deadline:
            with open(f"{self.work}/output", "rb") as file:
                text = file.read()
            if text.endswith(b"}\n"):
                output: dict[str, Any] = json.loads(text)
                return output
            time.sleep(_STEP_S)
        raise TrialError(
            f"cuInit does not return in {_PROGRAM_S:g} s in a container",
            "look at the kernel's log for errors of the driver (dmesg | grep NVRM)",
        )

    def _delete(self) -> None:
        # What a runtime that hangs leaves behind ends with the namespaces.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*self._runtime(), "delete", "--force", self.name],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_DELETE_S,
            )


def _hint(lines: Sequence[str]) -> str:
    hints = [line.partition("hint: ")[2] for line in lines]
    return next((hint for hint in hints if hint), "")


def _command(*words: str) -> None:
    """Run *words*; raise TrialError if they fail."""
    try:
        done = subprocess.run(
            words, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise TrialError(
            f'cannot run "{words[0]}": {error.strerror}', f"install {words[0]}"
        ) from error
    if done.returncode != 0:
        raise TrialError(
            f"cannot prepare the root of a container: {done.stderr.strip()}",
            "run this as root, in a pod that is privileged",
        )


if __name__ == "__main__":
    main()
