# SPDX-License-Identifier: Apache-2.0
"""Make the root directory of the image of `make image`: what Python needs of a distribution.

`image_root.py sources` prints apt's sources of this machine. `image_root.py fill PACKAGES TREE`
copies from PACKAGES, into which mmdebstrap has unpacked packages and left their archives, what
the programs and modules in TREE need; TREE.packages then lists the packages, as scripts/sbom.py
reads them.
"""

from __future__ import annotations

import fnmatch
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from elftools.elf.elffile import ELFFile

PROGRAMS = ("chroot", "mount", "unshare")
MERGED = ("bin", "lib", "lib64", "sbin")
# Modules of the standard library that gpu-node does not import, or that need large libraries.
LEFT_OUT = (
    *("config-*", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tests"),
    *("tkinter", "turtledemo", "venv", "__pycache__", "*.pyc"),
    *("_curses*.so", "_dbm*.so", "_gdbm*.so", "_sqlite3*.so", "nis*.so", "ossaudiodev*.so"),
    *("readline*.so", "_test*.so", "_xxtestfuzz*.so", "_ctypes_test*.so", "xxlimited*.so"),
)
# Parts of glibc that libraries of the driver need by their old names.
OF_DRIVER = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1")
FILES = {
    "etc/passwd": "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# Mount points; those in the directories of the kubelet and of CDI are the engine's work.
DIRECTORIES = ("dev", "etc/cdi", "proc", "root", "run", "sys", "tmp", "var/lib")


def fail(problem: str, hint: str) -> NoReturn:
    """Print *problem* and *hint*, and exit."""
    sys.exit(f"image: {problem}\nhint: {hint}")


def sources() -> str:
    """Return the sources of packages of this machine, in one of apt's two formats."""
    directory = Path("/etc/apt")
    paths = sorted(directory.glob("sources.list.d/*.sources"))
    if not paths:
        paths = [directory / "sources.list", *sorted(directory.glob("sources.list.d/*.list"))]
    text = "\n".join(path.read_text() for path in paths if path.is_file())
    if not text.strip():
        fail("apt has no sources of packages", "add the distribution's own to /etc/apt")
    return text


class Packages:
    """The unpacked packages below *top*, and which file is of which package."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.used: set[Path] = set()
        self._archives: dict[str, Path] = {}
        for archive in sorted(top.glob("var/cache/apt/archives/*.deb")):
            listing = subprocess.run(
                ["dpkg-deb", "--fsys-tarfile", archive], capture_output=True, check=True
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(listing)) as tar:
                for member in tar:
                    if not member.isdir():
                        self._archives[merged(member.name.removeprefix("./"))] = archive

    def copy(self, path: Path, tree: Path) -> Path:
        """Copy the file *path* to its place in *tree*, with what its symlinks lead to."""
        name = merged(str(path.relative_to(self.top)))
        copied = tree / name
        self.used.add(self._archives[name])
        copied.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target = os.readlink(path)
            if not copied.is_symlink():
                copied.symlink_to(target)
            of_target = self.top / target[1:] if target[0] == "/" else path.parent / target
            self.copy(Path(os.path.normpath(of_target)), tree)
        elif not copied.exists():
            shutil.copy2(path, copied)
        return copied

    def library(self, name: str) -> Path:
        """Return the path of the library *name*, or of the loader, whose name is a path."""
        places = ("", "usr") if name.startswith("/") else ("lib/*-linux-*/", "usr/lib/*-linux-*/")
        for place in places:
            for path in sorted(self.top.glob(f"{place}{name}".lstrip("/"))):
                return path
        fail(f'no package has "{name}"', "add its package to scripts/image")

    def control(self, archive: Path) -> str:
        """Return the control file of the package in *archive*."""
        return output("dpkg-deb", "--field", str(archive))

    def line(self, archive: Path) -> str:
        """Return the line of *archive*, as scripts/sbom.py reads it."""
        form = "${source:Package} ${source:Version} ${Package}:${Architecture} ${Version}\n"
        return output("dpkg-deb", f"--showformat={form}", "--show", str(archive))


def output(*command: str) -> str:
    """Return what *command* prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def merged(name: str) -> str:
    """Return the path *name* below /usr, where /bin, /lib, /lib64 and /sbin lead."""
    return f"usr/{name}" if name.partition("/")[0] in MERGED else name


def needed(tree: Path) -> Iterator[str]:
    """Yield the names of the libraries, and the paths of loaders, that files of *tree* need."""
    for path in sorted(tree.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as stream:
            if stream.read(4) != b"\x7fELF":
                continue
            for segment in ELFFile(stream).iter_segments():
                if segment.header.p_type == "PT_INTERP":
                    yield segment.get_interp_name()
                elif segment.header.p_type == "PT_DYNAMIC":
                    tags = segment.iter_tags()
                    yield from (tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED")


def fill(packages: Packages, tree: Path) -> None:
    """Copy to *tree* what its programs and modules need of *packages*."""
    for name in MERGED:
        (tree / "usr" / name).mkdir(parents=True, exist_ok=True)
        (tree / name).symlink_to(f"usr/{name}")
    for name in DIRECTORIES:
        (tree / name).mkdir(parents=True, exist_ok=True)
    # As the hosts do; a mount on the one is then a mount on the other.
    (tree / "var/run").symlink_to("/run")
    for name, text in FILES.items():
        (tree / name).write_text(text)
    (interpreter,) = packages.top.glob("usr/bin/python3.*")
    programs = [packages.top / "usr/bin/python3", interpreter]
    for name in PROGRAMS:
        programs += [path for path in packages.top.glob(f"**/*bin/{name}") if path.is_file()]
    for path in (*programs, packages.top / "etc/os-release"):
        packages.copy(path, tree)
    standard = packages.top / "usr/lib" / interpreter.name
    for directory, directories, names in os.walk(standard):
        directories[:] = [name for name in directories if not is_left_out(name)]
        for name in names:
            if not is_left_out(name):
                packages.copy(Path(directory, name), tree)
    for name in OF_DRIVER:
        packages.copy(packages.library(name), tree)
    copied: set[str] = set()
    while missing := {*needed(tree)} - copied:
        for name in sorted(missing):
            packages.copy(packages.library(name), tree)
        copied |= missing
    describe(packages, tree)


def is_left_out(name: str) -> bool:
    """Return whether the file or directory *name* of the standard library is not needed."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT)


def describe(packages: Packages, tree: Path) -> None:
    """Write the licences and the records of the packages used, as scanners read them."""
    lines = []
    records = tree / "var/lib/dpkg/status.d"
    records.mkdir(parents=True)
    for archive in sorted(packages.used):
        line = packages.line(archive)
        name = line.split()[2].partition(":")[0]
        lines.append(line)
        (records / name).write_text(packages.control(archive))
        documents = packages.top / "usr/share/doc" / name / "copyright"
        if documents.exists():
            target = tree / "usr/share/doc" / name / "copyright"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(documents, target)
    Path(f"{tree}.packages").write_text("".join(lines))


if __name__ == "__main__":
    if sys.argv[1] == "sources":
        sys.stdout.write(sources())
    else:
        fill(Packages(Path(sys.argv[2])), Path(sys.argv[3]))
