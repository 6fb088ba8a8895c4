# SPDX-License-Identifier: Apache-2.0
"""A virtual machine under QEMU: boot, save, resume, and run jobs in it.

The processor is emulated (no KVM). A saved machine is its disk, its memory and its device state in
one directory; resuming it takes half a second and does not change it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vm.image import BUILD, VmError

MEMORY_MIB = 2048
# Of the sparse disk that carries files into the machine: part of a saved machine's state.
INPUT_BYTES = 4 << 30
BOOT_S = 600
BLOCK = "2048"
INPUT = "/dev/vdb"
KERNEL_OPTIONS = (
    "root=/dev/vda rw console=ttyS0 quiet loglevel=4 mitigations=off audit=0 apparmor=0 "
    "nowatchdog cryptomgr.notests no_timer_check tsc=reliable rcupdate.rcu_cpu_stall_suppress=1 "
    "random.trust_cpu=on transparent_hugepage=never systemd.unified_cgroup_hierarchy=1 "
    "systemd.show_status=0"
)


class JobTimeoutError(VmError):
    """A job did not end in its time."""


class Machine:
    """One running QEMU process in a directory of its own."""

    def __init__(self, directory: Path, image: Path, *, memory: Path, resume: bool) -> None:
        self.directory = directory
        shared = "off" if resume else "on"
        self._process = subprocess.Popen(
            [*_command(image, memory, shared), *(["-incoming", "defer"] if resume else [])],
            cwd=directory, stdin=subprocess.DEVNULL, stdout=(directory / "qemu.log").open("wb"),
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            self._monitor = self._connect("qmp.sock")
            self._monitor_lines = self._monitor.makefile("rb")
            self._monitor_lines.readline()
            self._command("qmp_capabilities")
            self._port = self._connect("job.sock")
        except VmError:
            self.end()
            raise

    # ---- jobs ----

    def run(
        self,
        command: Sequence[str],
        output: Callable[[bytes], None],
        *,
        limit_s: float,
    ) -> int:
        """Run *command* as root, give its output to *output* and return its exit status.

        Raise JobTimeoutError after *limit_s* seconds.
        """
        deadline = time.monotonic() + limit_s
        job = {
            "command": list(command),
            "time": time.time(),
            "seed": os.urandom(64).hex(),
        }
        self._send(b"J", json.dumps(job).encode())
        try:
            while True:
                kind, payload = self._frame(deadline)
                if kind in (b"O", b"E"):
                    output(payload)
                elif kind == b"X":
                    return int(payload)
        except TimeoutError:
            raise JobTimeoutError(f"no end after {limit_s:.0f} s") from None

    def copy_in(self) -> None:
        """Unpack the archive on the input disk below /."""
        command = ["tar", "-xf", INPUT, "-b", BLOCK, "-C", "/", "--no-overwrite-dir"]
        chunks: list[bytes] = []
        if self.run(command, chunks.append, limit_s=300) != 0:
            raise VmError(f"files were not copied: {b''.join(chunks).decode(errors='replace')}")

    def wait_ready(self) -> None:
        """Wait until the machine takes a job."""
        self._ready(lambda _: True)

    def reboot(self) -> None:
        """Reboot by systemd and wait until the machine takes a job again."""
        chunks: list[bytes] = []
        self.run(["cat", "/proc/sys/kernel/random/boot_id"], chunks.append, limit_s=60)
        old = b"".join(chunks).strip()
        self.run(["systemctl", "--no-block", "reboot"], lambda _: None, limit_s=60)
        self._ready(lambda boot_id: boot_id != old)

    def _ready(self, accept: Callable[[bytes], bool]) -> None:
        deadline = time.monotonic() + BOOT_S
        try:
            while True:
                kind, payload = self._frame(deadline)
                if kind == b"R" and accept(payload):
                    return
        except TimeoutError:
            console = (self.directory / "console.log").read_text(errors="replace")[-2000:]
            raise VmError(f"the virtual machine is not up after {BOOT_S} s:\n{console}") from None

    def _send(self, kind: bytes, payload: bytes) -> None:
        self._port.settimeout(30)
        self._port.sendall(struct.pack(">cI", kind, len(payload)) + payload)

    def _frame(self, deadline: float) -> tuple[bytes, bytes]:
        kind, size = struct.unpack(">cI", self._receive(5, deadline))
        return kind, self._receive(size, deadline)

    def _receive(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._port.settimeout(min(left, 1.0))
            try:
                part = self._port.recv(count - len(data))
            except TimeoutError:
                self._check_alive()
                continue
            if not part:
                raise VmError(f"QEMU has closed the port of jobs:\n{self._log()}")
            data += part
        return data

    # ---- saving ----

    def save(self) -> None:
        """Write the device state beside disk and memory and end QEMU."""
        self._command("stop")
        self._prepare_migration()
        self._command("migrate", uri="exec:cat >state")
        while (status := self._command("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled"):
                raise VmError(f"the virtual machine could not be saved: {status}")
            time.sleep(0.05)
        self._command("quit")
        self._process.wait(60)

    def resume(self, state: Path) -> None:
        """Continue a machine that save() has written."""
        self._prepare_migration()
        self._command("migrate-incoming", uri=f"exec:cat {state}")
        while self._command("query-status")["status"] not in ("paused", "running", "postmigrate"):
            time.sleep(0.01)
        self._command("cont")

    def _prepare_migration(self) -> None:
        # The memory is a file already.
        shared = [{"capability": "x-ignore-shared", "state": True}]
        self._command("migrate-set-capabilities", capabilities=shared)
        self._command("migrate-set-parameters", **{"max-bandwidth": 1 << 40})

    # ---- QEMU ----

    def _command(self, name: str, **arguments: object) -> dict:
        line = json.dumps({"execute": name, "arguments": arguments})
        with contextlib.suppress(OSError):
            self._monitor.sendall(line.encode() + b"\n")
        while text := self._monitor_lines.readline():
            answer = json.loads(text)
            if "error" in answer:
                raise VmError(f"QEMU refuses {name}: {answer['error'].get('desc')}")
            if "return" in answer:
                return answer["return"]
        raise VmError(f"QEMU has ended:\n{self._log()}")

    def _connect(self, name: str) -> socket.socket:
        deadline = time.monotonic() + 20
        while True:
            self._check_alive()
            # By a path in /proc: that of the directory may be too long for a socket's address.
            directory = os.open(self.directory, os.O_PATH | os.O_DIRECTORY)
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(f"/proc/self/fd/{directory}/{name}")
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise VmError(f"QEMU does not answer on {name}: {error}") from None
                time.sleep(0.02)
            else:
                return connection
            finally:
                os.close(directory)

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise VmError(f"QEMU has ended:\n{self._log()}")

    def _log(self) -> str:
        texts = [
            (self.directory / name).read_text(errors="replace")[-1500:]
            for name in ("qemu.log", "console.log")
            if (self.directory / name).exists()
        ]
        return "\n".join(texts)

    def end(self) -> None:
        """End QEMU."""
        self._process.kill()
        self._process.wait()


def _command(image: Path, memory: Path, shared: str) -> list[str]:
    command = [
        # QEMU ends with this process, however that ends.
        *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-name", "vm"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-nic", "none"),
        *("-rtc", "base=utc", "-serial", "file:console.log"),
        *("-machine", "pc,usb=off,vmport=off,memory-backend=memory"),
        *("-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max,la57=off", "-smp", "2"),
        *("-m", str(MEMORY_MIB)),
        *(
            "-object",
            f"memory-backend-file,id=memory,size={MEMORY_MIB}M,mem-path={memory},share={shared}",
        ),
        *("-kernel", str(image / "kernel"), "-initrd", str(image / "initrd.cpio")),
        *("-append", KERNEL_OPTIONS),
        *("-qmp", "unix:qmp.sock,server=on,wait=off"),
        *("-device", "virtio-serial-pci"),
        *("-chardev", "socket,id=job,path=job.sock,server=on,wait=off"),
        *("-device", "virtserialport,chardev=job,name=vm.job"),
    ]
    for name, file, kind in (("root", "disk.qcow2", "qcow2"), ("in", "in.img", "raw")):
        drive = f"if=none,id={name},file={file},format={kind}"
        drive += ",cache=unsafe,discard=unmap,file.locking=off"
        command += ["-drive", drive, "-device", f"virtio-blk-pci,drive={name},serial=vm{name}"]
    return command


# ---- saved machines ----


@contextlib.contextmanager
def booted(image: Path, files: Mapping[Path, str]) -> Iterator[Machine]:
    """Boot *image* and yield the machine with *files*. It can be saved by keep().

    *files* says below which directory of the machine each directory's content goes.
    """
    with _directory() as directory:
        _overlay(image / "root.img", "raw", directory)
        _pack(files, directory / "in.img")
        with (directory / "memory").open("wb"):
            os.truncate(directory / "memory", MEMORY_MIB << 20)
        machine = Machine(directory, image, memory=Path("memory"), resume=False)
        try:
            machine.wait_ready()
            machine.copy_in()
            yield machine
        finally:
            machine.end()


def keep(machine: Machine, place: Path) -> None:
    """Save *machine* as the directory *place* and end it."""
    machine.save()
    for name in ("in.img", "job.sock", "qmp.sock"):
        (machine.directory / name).unlink(missing_ok=True)
    subprocess.run(["fallocate", "--dig-holes", str(machine.directory / "memory")], check=False)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("disk.qcow2", "memory", "state"):
        (machine.directory / name).rename(place / name)


@contextlib.contextmanager
def resumed(image: Path, place: Path) -> Iterator[Machine]:
    """Resume the machine saved as *place* and yield it."""
    with _directory() as directory:
        _overlay(place / "disk.qcow2", "qcow2", directory)
        machine = Machine(directory, image, memory=place / "memory", resume=True)
        try:
            machine.resume(place / "state")
            yield machine
        finally:
            machine.end()


def _pack(files: Mapping[Path, str], disk: Path) -> None:
    """Write an archive of *files* at the start of the sparse *disk*."""
    with disk.open("wb") as archive:
        for number, (source, target) in enumerate(files.items()):
            subprocess.run(
                ["tar", "-b", BLOCK, "-f", str(disk), "-r" if number else "-c", "--owner=0",
                 "--group=0", "--exclude=__pycache__", "--transform",
                 rf"flags=rh;s,^\.,{target},", "-C", str(source), "."],
                check=True,
            )  # fmt: skip
        archive.truncate(INPUT_BYTES)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=".run-", dir=BUILD))
    try:
        (directory / "in.img").touch()
        os.truncate(directory / "in.img", INPUT_BYTES)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _overlay(backing: Path, kind: str, directory: Path) -> None:
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(backing), "-F", kind]
    subprocess.run(
        [*command, str(directory / "disk.qcow2")], check=True, stdout=subprocess.DEVNULL
    )
