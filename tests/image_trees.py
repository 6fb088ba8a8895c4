# SPDX-License-Identifier: Apache-2.0
"""Root file systems of images, of ELF files as gcc makes them: as small as can be, never run.

The C library of such a tree is a library of its name that defines the symbol versions of some
glibc, which is all that the loader compares; with the real packages' layout.
"""

from __future__ import annotations

import atexit
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

MULTIARCH = f"/usr/lib/{platform.machine()}-linux-gnu"
ABI = {"x86_64": "x86-64", "aarch64": "aarch64"}.get(platform.machine(), platform.machine())
LOADER = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}[
    platform.machine()
]
MUSL_LOADER = f"/lib/ld-musl-{platform.machine()}.so.1"
# The symbol versions of glibc, of which it has had one for nearly each release.
GLIBC = ("2.2.5", "2.2.6", "2.3", "2.3.2", "2.3.3", "2.3.4", *(f"2.{n}" for n in range(4, 43)))


def glibc(newest: str) -> tuple[str, ...]:
    """Return the symbol versions of the glibc *newest*."""
    return tuple(f"GLIBC_{version}" for version in GLIBC[: GLIBC.index(newest) + 1])


def elf_file(
    path: Path,
    *,
    soname: str = "",
    needed: Sequence[str] = (),
    opens: Sequence[str] = (),
    search: str = "",
    interpreter: str = "",
    requires: Mapping[str, Sequence[str]] | None = None,
    provides: Iterable[str] = (),
) -> Path:
    """Write a program, if it has an *interpreter*, or else a library, and return *path*.

    *requires* are symbol versions by SONAME, *provides* those that it defines itself; *opens* are
    names in its .rodata.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: tuple((requires or {}).get(name, ())) for name in needed}
    used = [symbol(version) for wanted in versions.values() for version in wanted]
    names = "".join(f'"{name}\\0"' for name in opens)
    source = [f"extern void {name}(void);" for name in used]
    source += [f"void {symbol(version)}(void) {{}}" for version in provides]
    source += [f"__attribute__((used)) const char names[] = {names or '0'};" if names else ""]
    source += ["void work(void) {", *(f"{name}();" for name in used), "}"]
    flags = ["-nostdlib", "-fPIC", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
    if interpreter:
        flags += ["-pie", "-Wl,-e,work", f"-Wl,--dynamic-linker={interpreter}"]
    else:
        flags += ["-shared", *([f"-Wl,-soname,{soname}"] if soname else [])]
    if search:
        flags.append(f"-Wl,-rpath,{search}")
    if provides:
        script = _work() / f"{path.name}.map"
        script.write_text("".join(f"{v} {{ {symbol(v)}; }};\n" for v in provides))
        flags.append(f"-Wl,--version-script={script}")
    stubs = [str(_stub(name, wanted)) for name, wanted in versions.items()]
    gcc = ["gcc", "-O1", "-x", "c", "-", "-x", "none", "-o", str(path), *flags, *stubs]
    subprocess.run(gcc, input="\n".join(source).encode(), check=True, capture_output=True)
    return path


def symbol(version: str) -> str:
    """Return the name of the one symbol that has the version."""
    return re.sub(r"\W", "_", f"of_{version}")


@cache
def _work() -> Path:
    path = Path(mkdtemp(prefix="image-trees-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def _stub(soname: str, versions: tuple[str, ...]) -> Path:
    """Return a library to link against."""
    name = re.sub(r"\W", "_", "-".join((soname, *versions)))
    return elf_file(_work() / f"{name}.so", soname=soname, provides=versions)


class Image:
    """A root file system at *path*; paths of its methods are those in the image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("bin", "etc", "tmp", MULTIARCH[1:]):
            (path / name).mkdir(parents=True, exist_ok=True)

    def at(self, path: str) -> Path:
        """Return where *path* is on the host."""
        return self.path / path.lstrip("/")

    def glibc(self, newest: str, directory: str = MULTIARCH) -> Image:
        """Add the C library of a distribution with this glibc."""
        elf_file(self.at(LOADER), soname=Path(LOADER).name)
        libc = f"{directory}/libc-{newest}.so"
        elf_file(self.at(libc), soname="libc.so.6", provides=glibc(newest))
        self.link(f"{directory}/libc.so.6", Path(libc).name)
        return self

    def musl(self) -> Image:
        """Add musl, as Alpine has it."""
        elf_file(self.at(MUSL_LOADER), soname="libc.so")
        self.link(f"/lib/libc.musl-{platform.machine()}.so.1", Path(MUSL_LOADER).name)
        return self

    def program(self, path: str, *needed: str, interpreter: str = LOADER, **more: object) -> Image:
        """Add a program."""
        elf_file(self.at(path), needed=needed, interpreter=interpreter, **more)  # type: ignore[arg-type]
        return self

    def library(self, path: str, soname: str = "", **more: object) -> Image:
        """Add a library."""
        elf_file(self.at(path), soname=soname or Path(path).name, **more)  # type: ignore[arg-type]
        return self

    def link(self, path: str, target: str) -> Image:
        """Add a link."""
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).symlink_to(target)
        return self


def of_the_page(directory: Path) -> None:
    """Make the images of docs/reference/explain.md below *directory*."""
    app = Image(directory / "app").glibc(GLIBC[-1])
    app.program("/usr/bin/transcode", "libc.so.6", "libcudart.so.12", "libnvcuvid.so.1")
    cuda = "/usr/local/cuda-12.8/lib64"
    app.library(f"{cuda}/libcudart.so.12.8.90", "libcudart.so.12", opens=["libcuda.so.1"])
    app.link(f"{cuda}/libcudart.so.12", "libcudart.so.12.8.90")
    app.library(f"{cuda}/stubs/libcuda.so", "libcuda.so.1")
    app.link(f"{cuda}/stubs/libcuda.so.1", "libcuda.so")
    app.link("/usr/local/cuda", "cuda-12.8")
    alpine = Image(directory / "alpine").musl()
    libc = f"libc.musl-{platform.machine()}.so.1"
    alpine.program("/usr/bin/app", libc, opens=["libcuda.so.1"], interpreter=MUSL_LOADER)
