# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of a checkout on a simulated host, and writes what comes of them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normal import Normaliser

# The simulated host's own /run: the same path in each recording, seen by no other.
WORK = Path("/run/record")
# A copy, so that a recording does not tell where these tests are.
DATA = WORK / "data"
BUNDLE = WORK / "bundle"
KEPT = Path("/run/gpuruntime")
PATH = f"{WORK}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEADLINE_S = 120
LOWLEVEL = """#!/bin/sh
{ printf '%s\\n' "$0" "$@"; echo "in $(pwd)"; env | grep -v ^_= | sort; } > "$RECORD"
"""
# Name of a program → what it is in the checkout. By these the incumbent's programs are called.
PROGRAMS = {
    "gpuruntime": ".venv/bin/gpuruntime",
    "nvidia-ctk": ".venv/bin/gpuruntime",
    "nvidia-container-cli": ".venv/bin/gpuruntime",
}
LAUNCHED = (
    *("nvidia-container-runtime", "nvidia-container-runtime.cdi"),
    *("nvidia-container-runtime.legacy", "nvidia-container-runtime-hook"),
    *("nvidia-container-toolkit", "nvidia-cdi-hook", "unknown-name"),
)
RUNTIMES = "nvidia-container-runtime.runtimes"


class Recorder:
    """Runs commands, and writes what comes of them below *out*."""

    def __init__(self, checkout: Path, out: Path) -> None:
        self.checkout = checkout
        self.out = out
        self.normal = Normaliser(str(checkout))
        self.launcher = (checkout / ".venv/bin/gpu-container-runtime").resolve()
        shutil.rmtree(WORK, ignore_errors=True)
        for directory in ("bin", "home", "launched"):
            (WORK / directory).mkdir(parents=True)
        shutil.copytree(Path(__file__).resolve().parents[1] / "data", DATA)
        for name in ("runc", "crun"):
            program = WORK / "bin" / name
            program.write_text(LOWLEVEL)
            program.chmod(0o755)
        for name, target in PROGRAMS.items():
            (WORK / "bin" / name).symlink_to(checkout / target)
        for name in LAUNCHED:
            (WORK / "bin" / name).symlink_to(self.launcher)
        # As `make install` has it: this name is the launcher's.
        (WORK / "launched/nvidia-ctk").symlink_to(self.launcher)
        self.config()

    def program(self, name: str) -> str:
        """Return the path of a program in the checkout."""
        return str(self.checkout / ".venv/bin" / name)

    def config(self, text: str | None = None, **values: Any) -> None:
        """Have config.toml say *values* by key, or be *text*."""
        if text is None:
            text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        path = WORK / "config.toml"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)

    def call(
        self,
        case: str,
        *words: object,
        stdin: bytes | str = b"",
        files: Mapping[str, Path] | None = None,
        cwd: Path = WORK,
        **environment: str,
    ) -> int:
        """Run a command, and record it as *case* with *files*, by their names there.

        A directory is recorded as a tree. A word without a slash is a program of WORK/bin.
        """
        command = [str(word) for word in words]
        done = subprocess.run(
            command,
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            check=False,
            timeout=DEADLINE_S,
            cwd=cwd,
            env={
                "PATH": PATH,
                "HOME": str(WORK / "home"),
                "GPURUNTIME_CONFIG": str(WORK / "config.toml"),
                "GPURUNTIME_STATE_DIRECTORY": str(WORK / "state"),
                "RECORD": str(WORK / "lowlevel"),
                **environment,
            },
        )
        more = "".join(f"{name}={value}\n" for name, value in sorted(environment.items()))
        self.write(case, "call", f"{shlex.join(command)}\n{more}exit {done.returncode}\n".encode())
        for name, content in (("stdout", done.stdout), ("stderr", done.stderr)):
            if content:
                self.write(case, name, content)
        for name, path in (files or {}).items():
            self.keep(case, name, path)
        return done.returncode

    def keep(self, case: str, name: str, path: Path) -> None:
        """Record a file, or a tree of which the modes and links are listed."""
        if path.is_dir():
            for place in path.rglob("*"):
                if stat.S_ISREG(place.lstat().st_mode) and place.stat().st_size:
                    self.write(case, f"{name}/{place.relative_to(path)}", place.read_bytes())
            self.write(case, f"{name}.list", listing(path))
        elif path.exists():
            self.write(case, name, path.read_bytes())
        else:
            self.write(case, f"{name}.absent", b"")

    def write(self, case: str, name: str, content: bytes) -> None:
        """Record *content* as a file of *case*."""
        path = self.out / case / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.normal(name, content))

    def create(
        self,
        case: str,
        document: Mapping[str, Any] | bytes,
        *,
        program: str = "",
        prefix: Sequence[str] = (),
        options: Sequence[str] = ("--log", "{log}", "--log-format", "json"),
        arguments: Sequence[str] = ("create", "--bundle", "{bundle}", "id"),
        rootfs: bool = False,
        **environment: str,
    ) -> None:
        """Have the runtime create a container of *document*, and record its config.json.

        What is there is config.json as the low-level runtime finds it, what the low-level runtime
        was called with, and the engine's log.
        """
        shutil.rmtree(BUNDLE, ignore_errors=True)
        BUNDLE.mkdir()
        if rootfs:
            for name in ("etc", "proc", "dev", "usr/lib"):
                (BUNDLE / "rootfs" / name).mkdir(parents=True)
        before = document if isinstance(document, bytes) else json.dumps(document).encode()
        path, log, lowlevel = BUNDLE / "config.json", WORK / "log", WORK / "lowlevel"
        path.write_bytes(before)
        for old in (log, lowlevel):
            old.unlink(missing_ok=True)
        filled = [
            word.replace("{bundle}", str(BUNDLE)).replace("{log}", str(log))
            for word in (*options, *arguments)
        ]
        self.call(
            case, *prefix, program or self.program("gpu-container-runtime"), *filled, **environment
        )
        for name, file in (("log", log), ("lowlevel", lowlevel)):
            if file.exists():
                self.keep(case, name, file)
        after = path.read_bytes()
        self.write(case, "config.json", b"unchanged\n" if after == before else after)
        if rootfs:
            self.keep(case, "rootfs", BUNDLE / "rootfs")

    def cold(self, case: str, document: Mapping[str, Any], **options: Any) -> None:
        """Record a create that knows nothing, and what it keeps for the next ones.

        They are the same by Python, by the launcher, and by who can.
        """
        self.forget()
        self.create(f"{case}/cold", document, **options)
        self.keep(f"{case}/cold", "run", KEPT)
        self.write(f"{case}/cold", "bundle.list", listing(BUNDLE))
        self.create(f"{case}/warm", document, **options, GPURUNTIME_FAST="off")
        self.create(f"{case}/replay", document, **options, GPURUNTIME_FAST="only")
        self.create(f"{case}/again", document, **options)

    def forget(self) -> None:
        """Remove all that the programs keep."""
        for path in KEPT.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def listing(directory: Path) -> bytes:
    """Return the modes, owners and paths below *directory*, and where links lead."""
    rows = []
    for place in sorted(directory.rglob("*")):
        status = place.lstat()
        target = f" -> {os.readlink(place)}" if place.is_symlink() else ""
        if stat.S_ISCHR(status.st_mode):
            target = f" {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        owner = f"{status.st_uid}:{status.st_gid}"
        inner = place.relative_to(directory)
        rows.append(f"{stat.filemode(status.st_mode)} {owner} {inner}{target}\n")
    return "".join(rows).encode()
