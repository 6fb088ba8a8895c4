# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D103 (the name of an attack says what it is)
"""Start containers of hostile images through us on the simulated host; print what came of each.

Standard output is one JSON object: attack → variant → what was seen. The variants are our hook
with the environment that its spec gives (`set`); with none (`absent`), as a Go reader of the spec
loses it, in attacks by environment or descriptors; and a weak hook (`control`) that the attack
must beat.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scenario

HERE = Path(__file__).parent
SPEC = Path("/etc/cdi/nvidia.json")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
CUDA_FILE = f"{LIBRARIES}/libcuda.so.550.163.01"
CUDA_LINK = f"{LIBRARIES}/libcuda.so.1"
DEADLINE_S = 20
# In the place of this path, with which the library is compiled, an image has that of its mark.
ANY_MARK = b"/" + 250 * b"m"


@functools.cache
def _marker() -> bytes:
    """Return the library that leaves the mark ANY_MARK, which is compiled once."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "marker.so")
        define = f'-DMARK="{ANY_MARK.decode()}"'
        words = ("gcc", "-shared", "-fPIC", "-nostartfiles", define, "-o", path)
        scenario.run(*words, HERE / "marker.c")
        data = path.read_bytes()
    assert data.count(ANY_MARK) == 1
    return data


class Attack:
    """One hostile image: its bundle, a canary outside of it, a mark that only its code leaves."""

    def __init__(self, work: Path, pristine: Path) -> None:
        self.work = work
        self.bundle = work / "bundle"
        shutil.copytree(pristine, self.bundle, symlinks=True)
        self.root = self.bundle / "rootfs"
        self.mark = work / "mark"
        self.ran = work / "control-ran"
        self.recorder = work.parent / "recorder"
        self.canary = work / "canary"
        (self.canary / "deep").mkdir(parents=True)
        self.victim = self.canary / "victim"
        self.victim.write_text("must stay as it is\n")
        self.victim.chmod(0o640)
        self.environment: dict[str, str] = {}
        self.config = json.loads((self.bundle / "config.json").read_text())

    def library(self, name: str) -> Path:
        """Ship the library that leaves the mark as *name* in the image."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = os.fsencode(self.mark).ljust(len(ANY_MARK), b"\0")
        path.write_bytes(_marker().replace(ANY_MARK, mark))
        path.chmod(0o755)
        return path

    def module(self, name: str) -> Path:
        """Ship a Python module that leaves the mark."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(self.mark)!r}, 'w').close()\n")
        return path

    def escape_to(self, path: Path) -> str:
        """Return a relative link target that climbs out of any root to *path*."""
        return "../" * 24 + str(path).lstrip("/")

    def use_hook(self, path: str, args: list[str], env: list[str] | None) -> None:
        """Have *path* as the hook in place of ours.

        Without an *env* it is the engine that has added it, as one that resolves specs by itself:
        our runtime would give it one.
        """
        spec = json.loads(SPEC.read_text())
        hook: dict[str, object] = {"path": path, "args": args}
        if env is not None:
            hook["env"] = env
        spec["containerEdits"]["hooks"] = [{"hookName": "createContainer", **hook}] if env else []
        SPEC.write_text(json.dumps(spec))
        hooks = self.config.setdefault("hooks", {})
        hooks["createContainer"] = [] if env else [hook]

    def hook(self) -> dict[str, Any]:
        """Return the hook of the spec or, without one there, of the engine."""
        hooks = json.loads(SPEC.read_text())["containerEdits"]["hooks"]
        found: dict[str, Any] = (hooks or self.config["hooks"]["createContainer"])[0]
        return found

    def digest(self) -> dict[str, list[object]]:
        """Return content, mode, times and identity of what is outside the bundle."""
        seen = {}
        for path in sorted(self.work.rglob("*")):
            if self.bundle in (path, *path.parents) or path in (self.mark, self.ran):
                continue
            status = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            # Not st_nlink: to replace a hard link in the image is what we do.
            seen[str(path.relative_to(self.work))] = [
                content, status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns
                if path.is_file() else 0,
            ]  # fmt: skip
        return seen


def python_hook(attack: Attack, *flags: str) -> None:
    """Use a plain Python script as hook, without an environment of its own."""
    script = attack.work.parent / "hook.py"
    script.write_text(f"import json\nopen({str(attack.ran)!r}, 'w').close()\n")
    attack.use_hook("/usr/bin/python3", ["python3", *flags, str(script)], None)


def shebang_hook(attack: Attack) -> None:
    """Use a script with `#!/usr/bin/env python3` as hook."""
    script = attack.work.parent / "hook"
    script.write_text(f"#!/usr/bin/env python3\nopen({str(attack.ran)!r}, 'w').close()\n")
    script.chmod(0o755)
    attack.use_hook(str(script), ["hook"], None)


def module_hook(attack: Attack) -> None:
    """Use `python3 -m` as hook, which has the working directory on its path."""
    attack.use_hook("/usr/bin/python3", ["python3", "-m", "json.tool", "/dev/null"], ["A=b"])


def converter_hook(attack: Attack) -> None:
    """Use a C program as hook that keeps its environment and converts text."""
    program = attack.work.parent / "converter"
    define = f'-DRAN="{attack.ran}"'
    scenario.run("gcc", define, "-o", program, HERE / "converter.c")
    attack.use_hook(str(program), ["converter"], None)


def weak_hook(attack: Attack) -> None:
    """Use the hook that does our work by path strings."""
    attack.use_hook("/usr/bin/python3", ["python3", "-I", str(HERE / "weak_hook.py")], ["A=b"])


def host_ldconfig(attack: Attack) -> None:
    """Use the host's ldconfig as hook, which writes to a fixed temporary name."""
    arguments = ["ldconfig", "-r", str(attack.root)]
    attack.use_hook("/sbin/ldconfig", arguments, ["A=b"])


def env_01_preload(attack: Attack) -> None:
    attack.library("m.so")
    attack.environment = {"LD_PRELOAD": "./m.so"}


def env_01_preload_by_proc(attack: Attack) -> None:
    attack.library("m.so")
    attack.environment = {"LD_PRELOAD": "/proc/self/cwd/m.so"}


def env_02_audit(attack: Attack) -> None:
    attack.library("a.so")
    attack.environment = {"LD_AUDIT": "./a.so", "LD_PROFILE": "libc.so.6"}


def env_02_library_path(attack: Attack) -> None:
    for name in ("libm.so.6", "libz.so.1", "libexpat.so.1"):
        attack.library(f"fake/{name}")
    attack.environment = {"LD_LIBRARY_PATH": "/proc/self/cwd/fake"}


def env_02_debug_output(attack: Attack) -> None:
    output = str(attack.canary / "debug")
    attack.environment = {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": output}


def env_03_trace(attack: Attack) -> None:
    attack.environment = {"LD_TRACE_LOADED_OBJECTS": "1"}


PYTHON_VARIABLES = {
    "PYTHONPATH": "/proc/self/cwd/py",
    "PYTHONHOME": "/proc/self/cwd/py",
    "PYTHONUSERBASE": "/proc/self/cwd/py",
    "HOME": "/proc/self/cwd/py",
    "PYTHONSTARTUP": "/proc/self/cwd/py/sitecustomize.py",
    "PYTHONINSPECT": "1",
    "PYTHONWARNINGS": "error",
    "PYTHONPLATLIBDIR": "py",
    "PYTHONPYCACHEPREFIX": "/proc/self/cwd/py",
    "PYTHONBREAKPOINT": "sitecustomize.x",
    "PYTHONMALLOC": "debug",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONEXECUTABLE": "/proc/self/cwd/py/python",
}


def _ship_modules(attack: Attack) -> None:
    user = "py/.local/lib/python3.11/site-packages"
    for directory in ("py", user, "py/lib/python3.11/site-packages"):
        for name in ("sitecustomize.py", "usercustomize.py", "json.py"):
            attack.module(f"{directory}/{name}")


def env_04_python_together(attack: Attack) -> None:
    _ship_modules(attack)
    attack.environment = dict(PYTHON_VARIABLES)


def _one_python_variable(name: str) -> Callable[[Attack], None]:
    def prepare(attack: Attack) -> None:
        _ship_modules(attack)
        attack.environment = {name: PYTHON_VARIABLES[name]}

    prepare.__name__ = f"env_04_{name.lower()}"
    return prepare


def env_05_character_set(attack: Attack) -> None:
    attack.library("gconv/MARKED.so")
    modules = "module INTERNAL MARKED// MARKED 1\nmodule MARKED// INTERNAL MARKED 1\n"
    (attack.root / "gconv" / "gconv-modules").write_text(modules)
    attack.environment = {
        "LC_ALL": "xx_XX.MARKED",
        "LOCPATH": "/proc/self/cwd/loc",
        "GCONV_PATH": "/proc/self/cwd/gconv",
    }


def env_06_everything_else(attack: Attack) -> None:
    can = str(attack.canary)
    attack.library("m.so")
    attack.environment = {
        "GLIBC_TUNABLES": "glibc.malloc.check=3", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "7",
        "OPENSSL_CONF": f"{can}/o", "SSL_CERT_FILE": f"{can}/s", "RES_OPTIONS": "debug",
        "HOSTALIASES": f"{can}/h", "TZ": f":{can}/tz", "TMPDIR": can, "NLSPATH": f"{can}/%N",
        "BASH_ENV": f"{can}/b", "ENV": f"{can}/e", "IFS": "/", "SHELLOPTS": "xtrace",
        "LD_PRELOAD": "./m.so",
    }  # fmt: skip


def env_07_path(attack: Attack) -> None:
    for name in ("python3", "bin/python3", "ldconfig", "sbin/ldconfig"):
        path = attack.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n: > {attack.mark}\n")
        path.chmod(0o755)
    attack.environment = {"PATH": "bin:."}


def env_08_modules_in_the_way(attack: Attack) -> None:
    names = ("json.py", "json/__init__.py", "ctypes.py", "sitecustomize.py", "hooks/entry.py")
    for name in (*names, "encodings/__init__.py", "gpuruntime/__init__.py", "struct.py"):
        attack.module(name)
    (attack.root / "pyvenv.cfg").write_text("home = .\ninclude-system-site-packages = true\n")
    (attack.root / "python311.zip").write_bytes(b"PK\x05\x06" + bytes(18))


PROGRAMS = (
    *("sbin/ldconfig", "sbin/ldconfig.real", "usr/sbin/ldconfig", "usr/bin/python3", "bin/sh"),
    *("usr/bin/env", "usr/bin/nvidia-smi", "usr/bin/nvidia-modprobe", "bin/python3"),
)


def exec_01_programs_of_the_image(attack: Attack) -> None:
    for name in PROGRAMS:
        path = attack.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n: > {attack.mark}\n")
        path.chmod(0o755)
    attack.library("lib/libnss_files.so.2")
    attack.library("usr/lib/x86_64-linux-gnu/gconv/UTF-16.so")
    (attack.root / "etc" / "nsswitch.conf").write_text("passwd: x files\n")


def image_hook(attack: Attack) -> None:
    """Run the image's ldconfig on the host."""
    attack.use_hook(str(attack.root / "sbin" / "ldconfig"), ["ldconfig"], ["A=b"])


def fd_01_what_the_hook_has(attack: Attack) -> None:
    """Have a recorder in the interpreter's place: it writes down how it was started."""
    env_06_everything_else(attack)
    build_recorder(attack)
    launcher = attack.work.parent / "gpu-cdi-hook"
    constants = {"LIBDIR": "/", "PYTHON": attack.recorder, "CLI_PYTHON": "/", "VERSION": "0"}
    scenario.run(
        "gcc", "-std=c11", "-Os", "-nostdlib", "-static", "-ffreestanding", "-fno-pie", "-no-pie",
        "-fno-stack-protector", "-fno-tree-loop-distribute-patterns",
        *(f'-D{name}="{value}"' for name, value in constants.items()),
        "-o", launcher, scenario.TREE / "gpuruntime" / "launcher" / "launcher.c",
    )  # fmt: skip
    ours = attack.hook()
    attack.use_hook(str(launcher), ours["args"], ours.get("env"))


def recorder_hook(attack: Attack) -> None:
    """Use the recorder as hook by itself, without the launcher."""
    build_recorder(attack)
    attack.use_hook(str(attack.recorder), ["gpu-cdi-hook"], None)


def build_recorder(attack: Attack) -> None:
    """Build the program that writes down how it was started."""
    source = scenario.TREE / "tests" / "fakes" / "runtime" / "recorder.c"
    scenario.run("gcc", "-static", "-O1", "-o", attack.recorder, source)


def _link_instead(attack: Attack, name: str, target: str) -> None:
    path = attack.root / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def link_01_usr_lib_absolute(attack: Attack) -> None:
    _link_instead(attack, "usr/lib", str(attack.canary))


def link_02_library_directory_climbs(attack: Attack) -> None:
    _link_instead(attack, LIBRARIES, attack.escape_to(attack.canary))


def link_03_etc_is_a_link(attack: Attack) -> None:
    _link_instead(attack, "etc", attack.escape_to(attack.canary))


def link_03_conf_directory_is_a_link(attack: Attack) -> None:
    _link_instead(attack, "etc/ld.so.conf.d", attack.escape_to(attack.canary))


def link_04_cache(attack: Attack) -> None:
    _link_instead(attack, "etc/ld.so.cache", str(attack.victim))


def link_04_cache_climbs(attack: Attack) -> None:
    _link_instead(attack, "etc/ld.so.cache", attack.escape_to(attack.victim))


def link_04_temporary_name(attack: Attack) -> None:
    _link_instead(attack, "etc/ld.so.cache~", attack.escape_to(attack.victim))


def link_06_link_target_is_a_link(attack: Attack) -> None:
    _link_instead(attack, CUDA_LINK, attack.escape_to(attack.victim))


def link_06_mount_target_is_a_link(attack: Attack) -> None:
    _link_instead(attack, CUDA_FILE, attack.escape_to(attack.victim))
    _link_instead(attack, CUDA_LINK, attack.escape_to(attack.victim))


def link_06_dangling(attack: Attack) -> None:
    _link_instead(attack, CUDA_LINK, attack.escape_to(attack.canary / "new"))


def link_06_to_itself(attack: Attack) -> None:
    _link_instead(attack, CUDA_LINK, "libcuda.so.1")
    _link_instead(attack, "etc/ld.so.cache", attack.escape_to(attack.victim))


def link_06_to_proc(attack: Attack) -> None:
    _link_instead(attack, CUDA_LINK, f"/proc/self/root{attack.victim}")
    _link_instead(attack, "etc/ld.so.cache", f"/proc/1/root{attack.victim}")


def _hard_link(name: str) -> Callable[[Attack], None]:
    def prepare(attack: Attack) -> None:
        path = attack.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.link(attack.victim, path)

    prepare.__name__ = f"link_09_{Path(name).name}"
    return prepare


def special_cache_is_a_fifo(attack: Attack) -> None:
    os.mkfifo(attack.root / "etc" / "ld.so.cache")


def special_cache_is_a_directory(attack: Attack) -> None:
    (attack.root / "etc" / "ld.so.cache").mkdir()


def special_cache_is_sparse(attack: Attack) -> None:
    with (attack.root / "etc" / "ld.so.cache").open("wb") as stream:
        stream.truncate(1 << 40)


def special_no_etc(attack: Attack) -> None:
    shutil.rmtree(attack.root / "etc")


# Attack → the weak hook that it must beat; None: only that ours holds.
ATTACKS: tuple[tuple[Callable[[Attack], None], Callable[[Attack], None] | None], ...] = (
    (env_01_preload, lambda a: python_hook(a, "-E")),
    (env_01_preload_by_proc, lambda a: python_hook(a, "-I", "-S")),
    (env_02_audit, lambda a: python_hook(a, "-E")),
    (env_02_library_path, python_hook),
    (env_02_debug_output, python_hook),
    (env_03_trace, lambda a: python_hook(a, "-I")),
    (env_04_python_together, python_hook),
    *(
        (_one_python_variable(name), python_hook if name == "PYTHONPATH" else None)
        for name in PYTHON_VARIABLES
    ),
    (env_05_character_set, converter_hook),
    (env_06_everything_else, python_hook),
    (env_07_path, shebang_hook),
    (env_08_modules_in_the_way, module_hook),
    (exec_01_programs_of_the_image, image_hook),
    (fd_01_what_the_hook_has, recorder_hook),
    (link_01_usr_lib_absolute, weak_hook),
    (link_02_library_directory_climbs, weak_hook),
    (link_03_etc_is_a_link, weak_hook),
    (link_03_conf_directory_is_a_link, weak_hook),
    (link_04_cache, weak_hook),
    (link_04_cache_climbs, weak_hook),
    (link_04_temporary_name, weak_hook),
    (link_06_link_target_is_a_link, weak_hook),
    (link_06_mount_target_is_a_link, weak_hook),
    (link_06_dangling, weak_hook),
    (link_06_to_itself, weak_hook),
    (link_06_to_proc, weak_hook),
    (_hard_link("etc/ld.so.cache"), weak_hook),
    (_hard_link("etc/ld.so.cache~"), host_ldconfig),
    (_hard_link("etc/ld.so.conf.d/00-gpuruntime.conf"), weak_hook),
    (_hard_link(CUDA_LINK), weak_hook),
    (special_cache_is_a_fifo, None),
    (special_cache_is_a_directory, None),
    (special_cache_is_sparse, None),
    (special_no_etc, None),
)  # fmt: skip


# Of each variable alone, environ.py shows that the hook does not have it.
ALONE = {f"env_04_{name.lower()}" for name in PYTHON_VARIABLES} - {"env_04_pythonpath"}


def variants(name: str) -> tuple[str, ...]:
    """Return the variants in which the attack *name* is played here.

    What the hook's own environment is makes a difference to those that use the image's.
    """
    if name in ALONE:
        return ()
    return ("set", "absent", "control") if name.startswith(("env", "fd")) else ("set", "control")


def observe(attack: Attack) -> dict[str, object]:
    """Run the container; return what it came to."""
    environment = {
        "NVIDIA_VISIBLE_DEVICES": "nvidia.com/gpu=0",
        "PATH": "/bin",
        **attack.environment,
    }
    attack.config["process"]["env"] = [f"{k}={v}" for k, v in environment.items()]
    (attack.bundle / "config.json").write_text(json.dumps(attack.config))
    before = attack.digest()
    mounts = Path("/proc/self/mountinfo").read_text()
    name = f"hostile-{os.getpid()}"
    start = time.monotonic()
    status, out = scenario.create(attack.bundle, name, DEADLINE_S)
    seconds = time.monotonic() - start
    if status == 0:
        scenario.finish(name)
    after = attack.digest()
    return {
        "status": status,
        "output": out.read_text(errors="replace"),
        "seconds": seconds,
        "marked": attack.mark.exists(),
        "control_ran": attack.ran.exists(),
        "changed": sorted(
            k for k in before.keys() | after.keys() if before.get(k) != after.get(k)
        ),
        "mounts_changed": mounts != Path("/proc/self/mountinfo").read_text(),
        "work_done": work_done(attack),
        "linked": (attack.root / CUDA_LINK).is_symlink(),
        "record": record(attack),
    }


def record(attack: Attack) -> dict[str, str] | None:
    """Return what the recorder wrote, by part, or None."""
    path = Path(f"{attack.recorder}.record")
    if not path.exists():
        return None
    parts = {}
    data = path.read_bytes()
    while data:
        head, _, rest = data.partition(b"\n")
        name, length = head.removeprefix(b"@").decode().split()
        parts[name] = rest[: int(length)].decode(errors="replace")
        data = rest[int(length) + 1 :]
    return parts


def work_done(attack: Attack) -> bool:
    """Return whether the hook's effects are in the root: a link and a cache with our library."""
    cache = attack.root / "etc" / "ld.so.cache"
    link = attack.root / CUDA_LINK
    if not link.is_symlink() or os.readlink(link) != Path(CUDA_FILE).name:
        return False
    if cache.is_symlink() or not cache.is_file():
        return False
    with cache.open("rb") as stream:
        return b"libcuda.so.1\0" in stream.read(1 << 20)


def main() -> None:
    """Run every attack in every variant and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-hostile-"))
    results: dict[str, dict[str, object]] = {}
    try:
        scenario.generate()
        spec = SPEC.read_text()
        pristine = scenario.make_bundle(top / "pristine", "0")
        (ours,) = json.loads(spec)["containerEdits"]["hooks"]
        for prepare, control in ATTACKS:
            seen = results[prepare.__name__] = {}
            for variant in variants(prepare.__name__):
                if variant == "control" and control is None:
                    continue
                SPEC.write_text(spec)
                work = top / f"{prepare.__name__}-{variant}" / "work"
                work.mkdir(parents=True)
                attack = Attack(work, pristine)
                if variant == "absent":
                    attack.use_hook(ours["path"], ours["args"], None)
                prepare(attack)
                if variant == "control" and control is not None:
                    control(attack)
                seen[variant] = observe(attack)
        json.dump(results, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
