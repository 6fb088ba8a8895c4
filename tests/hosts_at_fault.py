# SPDX-License-Identifier: Apache-2.0
"""Hosts as trees of files: one that is well, and what to do to it so that something is wrong.

Device nodes are real, so root is needed to build them. Nothing here is this machine's.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from driver_roots import VERSION, Tree

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
MAJORS = {"nvidia": 195, "nvidia-uvm": 511, "nvidia-caps": 236}
BOOT_S = 1_700_000_000
BUS_IDS = ("0000:1a:00.0", "0000:1b:00.0")
MODEL = "NVIDIA H100 80GB HBM3"
LAUNCHER = b"\x7fELF gpuruntime-launcher 1\nconfig "
RUNTIME = "/usr/bin/gpu-container-runtime"
SPEC = "/etc/cdi/nvidia.json"
CONTROL = {
    "nvidiactl": (195, 255),
    "nvidia-modeset": (195, 254),
    "nvidia-uvm": (511, 0),
    "nvidia-uvm-tools": (511, 1),
}
# 2: with one MIG device, of the GPU instance 7.
MIG = {"gpu0/gi7/access": 66, "gpu0/gi7/ci0/access": 67}


class Host(Tree):
    """The tree of a host with two GPUs, of which all is well."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.driver()
        self.kernel()
        self.nodes()
        self.links()
        self.programs_of_ours()
        self.spec()

    def driver(self) -> None:
        """Install the driver's user space."""
        self.libraries(LIBRARIES)
        self.programs()
        self.configs()
        self.firmware()

    def kernel(self) -> None:
        """Load the driver's modules, for two GPUs."""
        self.module(VERSION)
        self.file("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
        self.file("/proc/self/uid_map", "         0          0 4294967295\n")
        self.link("/proc/self/ns/mnt", "mnt:[4026531841]")
        self.file("/proc/stat", f"cpu 1 2 3\nbtime {BOOT_S}\n")
        self.file("/proc/net/unix", "Num RefCount Protocol Flags Type St Inode Path\n")
        lines = "".join(f"{number:3d} {name}\n" for name, number in MAJORS.items())
        self.file("/proc/devices", f"Character devices:\n{lines}\nBlock devices:\n  8 sd\n")
        self.params(ModifyDeviceFiles="1")
        for minor, bus_id in enumerate(BUS_IDS):
            self.gpu(minor, bus_id)
        minors = ["config 1", "monitor 2", *(f"{name} {minor}" for name, minor in MIG.items())]
        self.file("/proc/driver/nvidia-caps/mig-minors", "\n".join(minors) + "\n")

    def params(self, **values: str) -> None:
        """Have the driver tell its parameters."""
        parameters = {
            "DeviceFileUID": "0",
            "DeviceFileGID": "0",
            "DeviceFileMode": "438",
            **values,
        }
        lines = "".join(f"{name}: {value}\n" for name, value in parameters.items())
        self.file("/proc/driver/nvidia/params", lines)

    def gpu(self, minor: int, bus_id: str, model: str = MODEL) -> None:
        """Put a GPU on the bus, and into the driver."""
        self.file(f"/sys/bus/pci/devices/{bus_id}/vendor", "0x10de\n")
        self.file(f"/sys/bus/pci/devices/{bus_id}/class", "0x030200\n")
        self.remove(f"/sys/bus/pci/devices/{bus_id}/driver")
        self.link(f"/sys/bus/pci/devices/{bus_id}/driver", "../../../../bus/pci/drivers/nvidia")
        self.file(
            f"/proc/driver/nvidia/gpus/{bus_id}/information",
            f"Model: \t\t {model}\nGPU UUID: \t GPU-5f1e000{minor}-9a3c\n"
            f"Device Minor: \t {minor}\n",
        )

    def nodes(self) -> None:
        """Make the device nodes."""
        gpus = {f"nvidia{minor}": (195, minor) for minor in range(len(BUS_IDS))}
        for name, (major, minor) in {**CONTROL, **gpus}.items():
            self.node(f"/dev/{name}", major, minor)

    def node(self, path: str, major: int, minor: int, mode: int = 0o666) -> None:
        """Make a device node in place of what is there."""
        self.remove(path)
        self.directory(os.path.dirname(path))
        os.mknod(self.at(path), stat.S_IFCHR | mode, os.makedev(major, minor))
        self.at(path).chmod(mode)

    def links(self) -> None:
        """Make the links by which systemd finds the nodes."""
        for place in self.at("/dev").iterdir():
            status = place.lstat()
            if stat.S_ISCHR(status.st_mode):
                numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
                self.link(f"/dev/char/{numbers}", f"../{place.name}")

    def programs_of_ours(self) -> None:
        """Install us, and a low-level runtime."""
        for name in ("gpu-container-runtime", "gpu-container-runtime-hook", "gpu-cdi-hook"):
            self.file(f"/usr/bin/{name}", LAUNCHER, 0o755)
        self.file("/usr/bin/runc", "runc", 0o755)

    def spec(self, path: str = SPEC, version: str = VERSION, **members: Any) -> dict[str, Any]:
        """Write a CDI spec for the driver *version*, and return it; *members* are its own."""
        library = f"{LIBRARIES}/libcuda.so.{version}"
        mount = {"hostPath": library, "containerPath": library, "options": ["ro", "bind"]}
        devices = [
            {"name": str(n), "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{n}"}]}}
            for n in range(len(BUS_IDS))
        ]
        hook = {
            "hookName": "createContainer",
            "path": "/usr/bin/gpu-cdi-hook",
            "args": ["gpu-cdi-hook", "update-container"],
            "env": ["PATH=/usr/bin"],
        }
        edits: dict[str, Any] = {"mounts": [mount], "hooks": [hook]}
        document = {
            "cdiVersion": "0.5.0",
            "kind": "nvidia.com/gpu",
            "devices": devices,
            "containerEdits": edits,
            **members,
        }
        self.file(path, json.dumps(document))
        return document

    def process(
        self, pid: int, *words: str, started_s: float = 100, uid: int = 0, files: str = "1048576"
    ) -> None:
        """Let a process run whose command is *words*, since *started_s* after the boot."""
        directory = f"/proc/{pid}"
        name = os.path.basename(words[0])[:15]
        rest = " ".join(["S", "1", *["0"] * 17, str(int(started_s * 100)), "0"])
        self.file(f"{directory}/stat", f"{pid} ({name}) {rest}\n")
        self.file(f"{directory}/comm", f"{name}\n")
        self.file(f"{directory}/cmdline", "\0".join([*words, ""]))
        self.file(f"{directory}/status", f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        self.file(
            f"{directory}/limits", f"Max open files            {files}   {files}     files\n"
        )
        self.file(f"{directory}/environ", "PATH=/bin\0")
        self.remove(f"{directory}/ns/mnt")
        self.link(f"{directory}/ns/mnt", "mnt:[4026531841]" if not uid else "mnt:[4026532000]")

    def package(self, name: str, version: str) -> None:
        """Have dpkg know a package."""
        path = "/var/lib/dpkg/status"
        old = self.at(path).read_text() if self.at(path).exists() else ""
        text = f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n\n"
        self.file(path, old + text)

    def config(self, text: str) -> None:
        """Write config.toml."""
        self.file("/etc/gpuruntime/config.toml", text)

    def written(self, path: str, seconds: float) -> None:
        """Have *path* be written *seconds* after the boot."""
        os.utime(self.at(path), (BOOT_S + seconds, BOOT_S + seconds))

    def docker(self, document: Any = None, *, written_s: float = 50, **process: Any) -> None:
        """Install docker with the config *document*, and let it run."""
        self.file("/usr/bin/dockerd", "dockerd", 0o755)
        settings = {"runtimes": {"gpuruntime": {"path": RUNTIME, "args": []}}}
        self.file(
            "/etc/docker/daemon.json", json.dumps(settings if document is None else document)
        )
        self.written("/etc/docker/daemon.json", written_s)
        self.process(700, "/usr/bin/dockerd", "-H", "fd://", **process)

    def containerd(self, *, default: str = "runc", runtime: str = RUNTIME) -> None:
        """Install containerd, which knows our runtime."""
        self.file(
            "/etc/containerd/config.toml",
            'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n'
            f'default_runtime_name = "{default}"\n'
            '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpuruntime.options]\n'
            f'BinaryName = "{runtime}"\n',
        )

    def mig(self, *, nodes: bool = True) -> None:
        """Divide the first GPU."""
        for name, minor in MIG.items():
            gpu, _, rest = name.partition("/")
            self.file(
                f"/proc/driver/nvidia/capabilities/{gpu}/mig/{rest}",
                f"DeviceFileMinor: {minor}\n",
            )
            if nodes:
                self.node(f"/dev/nvidia-caps/nvidia-cap{minor}", 236, minor, 0o444)

    def socket(self, path: str) -> None:
        """Make a socket on which nobody listens."""
        self.directory(os.path.dirname(path))
        os.mknod(self.at(path), stat.S_IFSOCK | 0o666)

    def remove(self, path: str) -> None:
        """Remove a file, a link or a node, if it is there."""
        self.at(path).unlink(missing_ok=True)

    def without(self, directory: str) -> None:
        """Remove what is in a directory, and all below it."""
        for place in sorted(self.at(directory).rglob("*"), reverse=True):
            if place.is_dir() and not place.is_symlink():
                place.rmdir()
            else:
                place.unlink()


def listing(root: Path) -> list[tuple[object, ...]]:
    """Return all that can be seen of what is below *root*, but for times of access."""
    entries: list[tuple[object, ...]] = []
    for place in sorted(root.rglob("*")):
        status = place.lstat()
        content: object = place.readlink() if place.is_symlink() else None
        if stat.S_ISREG(status.st_mode):
            content = place.read_bytes()
        entries.append(
            (
                str(place),
                status.st_mode,
                status.st_ino,
                status.st_rdev,
                status.st_mtime_ns,
                content,
            )
        )
    return entries
