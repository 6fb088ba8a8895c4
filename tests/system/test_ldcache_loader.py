# SPDX-License-Identifier: Apache-2.0
"""The machine's own loader reads merged caches: in a root of its own, and privately on /etc.

Each test asks a ten-line program what dlopen brings; the loader itself is the judge.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuruntime.formats import elf
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry, merge, parse

if TYPE_CHECKING:
    from collections.abc import Callable

GCC = shutil.which("gcc")
LDCONFIG = shutil.which("ldconfig", path="/usr/sbin:/sbin")
CHROOT = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin") or "chroot"
CACHE = Path("/etc/ld.so.cache")
HOST_ABI = elf.read(Path("/proc/self/exe").read_bytes()).abi
LAYOUTS = ("new", "compat", "old")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: chroot and unshare"),
    pytest.mark.skipif(GCC is None, reason="needs gcc, to build libraries that no cache knows"),
    pytest.mark.skipif(LDCONFIG is None, reason="needs ldconfig, to write the image's cache"),
]

PROBE = """
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv)
{
	void *library = dlopen(argv[argc - 1], RTLD_NOW);
	const char *(*origin)(void) = library ? (const char *(*)(void))dlsym(library, "origin") : 0;
	puts(!library ? dlerror() : origin ? origin() : "loaded");
	return 0;
}
"""
LINKED = """
#include <stdio.h>
const char *origin(void);
int main(void) { puts(origin()); return 0; }
"""
NOT_FOUND = "cannot open shared object file"


class Root:
    """A directory with a loader, a C library and two programs, to chroot into."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = path
        self.options = options
        (path / "etc").mkdir(parents=True)
        (path / "bin").mkdir()

    def compile(self, source: str, output: Path, *options: str) -> None:
        """Compile the C text *source*."""
        assert GCC is not None
        output.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [GCC, *self.options, "-x", "c", "-", "-x", "none", "-o", output, *options],
            input=source,
            text=True,
            check=True,
        )

    def library(self, file: str, origin: str = "", soname: str | None = None) -> None:
        """Make a library whose origin() says *origin*, or else the directory of *file*.

        An empty *soname* is none: ldconfig then takes the file's name.
        """
        text = f'const char *origin(void) {{ return "{origin or os.path.dirname(file)}"; }}'
        name = os.path.basename(file) if soname is None else soname
        named = (f"-Wl,-soname,{name}",) if name else ()
        self.compile(text, self.path / file[1:], "-shared", "-nostdlib", "-fPIC", *named)

    def programs(self) -> None:
        """Make /bin/probe and /bin/linked, with the loader and the C library that they need."""
        self.compile(PROBE, self.path / "bin" / "probe")
        self.library("/stubs/libgpu.so.1")
        stubs = self.path / "stubs"
        self.compile(LINKED, self.path / "bin" / "linked", str(stubs / "libgpu.so.1"))
        shutil.rmtree(stubs)
        shown = subprocess.run(
            ["ldd", self.path / "bin" / "probe"], capture_output=True, text=True, check=True
        ).stdout
        for file in re.findall(r"(/\S+) \(0x", shown):
            target = self.path / file[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)

    def image_cache(self, layout: str, *directories: str) -> bytes:
        """Return the cache that ldconfig makes of *directories*."""
        assert LDCONFIG is not None
        (self.path / "etc" / "ld.so.conf").write_text("".join(f"{d}\n" for d in directories))
        subprocess.run([LDCONFIG, "-X", "-c", layout, "-r", self.path], check=True)
        return (self.path / "etc" / "ld.so.cache").read_bytes()

    def run(self, cache: bytes | None, *command: str) -> str:
        """Run *command* in the root with *cache* as its /etc/ld.so.cache."""
        file = self.path / "etc" / "ld.so.cache"
        file.unlink(missing_ok=True)
        if cache is not None:
            file.write_bytes(cache)
        done = subprocess.run(
            [CHROOT, self.path, *command], capture_output=True, text=True, check=False, env={}
        )
        return (done.stdout + done.stderr).strip()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Return a root with libraries of an image, and of a driver in unusual directories."""
    root = Root(tmp_path_factory.mktemp("loader") / "root")
    root.programs()
    root.library("/opt/gpu/libgpu.so.1")
    root.library("/opt/gpu/libgpu-ml.so.550.1", soname="libgpu-ml.so.1")
    for name in ("libimage.so.1", "libboth.so.1", "libtwo.so.1"):
        root.library(f"/opt/image/{name}")
        root.library(f"/opt/image/glibc-hwcaps/x86-64-v2/{name}", origin="v2")
    for name in ("libboth.so.1", "libtwo.so.1"):
        root.library(f"/opt/gpu/{name}")
    return root


def ours(*names: str, directory: str = "/opt/gpu", abi: str = HOST_ABI) -> list[CacheEntry]:
    """Return entries for *names* in *directory*."""
    return [CacheEntry(name, f"{directory}/{name}", ABI_FLAGS[abi]) for name in names]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_library_is_found_only_through_the_merged_cache(root: Root, layout: str) -> None:
    """By dlopen and by DT_NEEDED; and the image's own library is chosen as it was before."""
    image = root.image_cache(layout, "/opt/image")
    merged = merge(image, ours("libgpu.so.1"))
    assert NOT_FOUND in root.run(image, "/bin/probe", "libgpu.so.1")
    assert NOT_FOUND in root.run(image, "/bin/linked")
    assert root.run(merged, "/bin/probe", "libgpu.so.1") == "/opt/gpu"
    assert root.run(merged, "/bin/linked") == "/opt/gpu"
    before = root.run(image, "/bin/probe", "libimage.so.1")
    assert root.run(merged, "/bin/probe", "libimage.so.1") == before
    if HOST_ABI == "x86-64":
        # Behind an old table the loader never found the names of hwcaps; in one it has none.
        assert before == {"new": "v2", "compat": "/opt/image", "old": before}[layout]


def test_a_cache_of_our_entries_alone_is_complete(root: Root) -> None:
    """Distroless images have no cache: libc comes from the loader's own directories."""
    assert NOT_FOUND in root.run(None, "/bin/probe", "libgpu.so.1")
    for image in (None, b"", b"garbage", root.image_cache("new", "/opt/image")[:100]):
        merged = merge(image, ours("libgpu.so.1"))
        assert root.run(merged, "/bin/linked") == "/opt/gpu"
        assert root.run(merged, "/bin/probe", "libm-none.so").endswith("No such file or directory")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_library_wins_over_the_images_variants(root: Root, layout: str) -> None:
    """Images bring libcuda.so.1, as a stub or of an older driver, even in hwcaps directories."""
    image = root.image_cache(layout, "/opt/image")
    assert root.run(image, "/bin/probe", "libboth.so.1") != "/opt/gpu"
    merged = merge(image, ours("libboth.so.1"))
    assert root.run(merged, "/bin/probe", "libboth.so.1") == "/opt/gpu"
    undone = merge(merged, [])
    assert root.run(undone, "/bin/probe", "libboth.so.1") != "/opt/gpu"


def test_directories_that_stay_first_win_over_ours(root: Root) -> None:
    """CUDA's forward compatibility: the image's newer library on the host's older driver."""
    image = root.image_cache("new", "/opt/image")
    kept = ["/opt/image", "/opt/image/glibc-hwcaps/x86-64-v2"]
    merged = merge(image, ours("libboth.so.1", "libgpu.so.1"), keep_first=kept)
    before = root.run(image, "/bin/probe", "libboth.so.1")
    assert before in ("/opt/image", "v2")
    assert root.run(merged, "/bin/probe", "libboth.so.1") == before
    assert root.run(merged, "/bin/probe", "libgpu.so.1") == "/opt/gpu"


def test_a_value_may_name_a_file_without_a_link(root: Root) -> None:
    """Where links cannot be made, the cache alone is enough."""
    entry = CacheEntry("libgpu-ml.so.1", "/opt/gpu/libgpu-ml.so.550.1", ABI_FLAGS[HOST_ABI])
    merged = merge(root.image_cache("new", "/opt/image"), [entry])
    assert root.run(merged, "/bin/probe", "libgpu-ml.so.1") == "/opt/gpu"


def test_an_entry_for_another_abi_is_passed_over(root: Root) -> None:
    """The loader goes on to the image's own; nothing tries to load a foreign library."""
    foreign = "aarch64" if HOST_ABI == "x86-64" else "x86-64"
    image = root.image_cache("new", "/opt/image")
    merged = merge(image, ours("libtwo.so.1", abi=foreign))
    before = root.run(image, "/bin/probe", "libtwo.so.1")
    assert before in ("/opt/image", "v2")
    assert root.run(merged, "/bin/probe", "libtwo.so.1") == before
    assert any(path == "/opt/gpu/libtwo.so.1" for _, path, *_ in parse(merged))


def test_names_with_numbers_are_all_found(root: Root) -> None:
    """The order is ours, the search is the loader's: 63 names, a third of them ours."""
    stems = ["libn1.so", "libn01a.so", "libn10.so", "libn9.so", "libn.so", "libn-.so", "libn_.so"]
    names = [f"{stem}.{n}" for stem in stems for n in (1, 2, 9, 10, 11, 99, 100, "1.9", "1.10")]
    for directory, some in (("/opt/many", names), ("/opt/ours", names[::3])):
        root.library(f"{directory}/original", soname="")
        for name in some:
            shutil.copy(root.path / directory[1:] / "original", root.path / directory[1:] / name)
    merged = merge(root.image_cache("new", "/opt/many"), ours(*names[::3], directory="/opt/ours"))
    found = {name: root.run(merged, "/bin/probe", name) for name in names}
    assert {name for name, where in found.items() if where == "/opt/ours"} == set(names[::3])
    assert {name for name, where in found.items() if where == "/opt/many"} == (
        set(names) - set(names[::3])
    )


def test_the_machines_own_cache_takes_a_library_in_private(tmp_path: Path) -> None:
    """Hundreds of real entries; the file is seen by one process tree only and then gone."""
    if not CACHE.exists():
        pytest.skip("this machine has no /etc/ld.so.cache")
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not on this machine")
    before = CACHE.read_bytes()
    place = Root(tmp_path / "here")
    place.compile(PROBE, place.path / "probe")
    place.library("/unusual/libgpuruntime-marker.so.1")
    unusual = str(place.path / "unusual")
    merged = tmp_path / "ld.so.cache"
    merged.write_bytes(merge(before, ours("libgpuruntime-marker.so.1", directory=unusual)))
    merged.chmod(0o644)

    def probe(cache: Path, name: str) -> str:
        script = 'mount --bind "$1" /etc/ld.so.cache && exec "$2" "$3"'
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        return subprocess.run(
            [*command, cache, place.path / "probe", name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    copy = tmp_path / "image"
    copy.write_bytes(before)
    assert NOT_FOUND in probe(copy, "libgpuruntime-marker.so.1")
    assert probe(merged, "libgpuruntime-marker.so.1") == "/unusual"
    usual = {"libz.so.1", "libgcc_s.so.1", "libstdc++.so.6", "libcrypto.so.3", "libcrypt.so.1"}
    names = usual.intersection(name for name, *_ in parse(before))
    assert names
    assert {probe(merged, name) for name in names} == {"loaded"}
    assert CACHE.read_bytes() == before


@pytest.fixture(scope="module")
def both_bits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Root]:
    """Return a function that makes a root for 32-bit programs."""

    def make() -> Root:
        root = Root(tmp_path_factory.mktemp("i386") / "root", "-m32")
        try:
            root.programs()
        except subprocess.CalledProcessError:
            pytest.skip("i386: gcc -m32 cannot link a program (gcc-multilib, libc6-dev-i386)")
        return root

    return make


def test_a_32_bit_program_gets_its_own_of_two_libraries(
    root: Root, both_bits: Callable[[], Root]
) -> None:
    """Both have the same SONAME, and the caches of both loaders are one file."""
    small = both_bits()
    small.library("/opt/gpu32/libgpu.so.1")
    shutil.copytree(
        small.path, root.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("bin")
    )
    shutil.copy(small.path / "bin" / "probe", root.path / "bin" / "probe32")
    with (root.path / "opt/gpu32/libgpu.so.1").open("rb") as file:
        assert elf.read(file).abi == "i386"
    image = root.image_cache("new", "/opt/image")
    entries = ours("libgpu.so.1") + ours("libgpu.so.1", directory="/opt/gpu32", abi="i386")
    merged = merge(image, entries)
    assert NOT_FOUND in root.run(image, "/bin/probe32", "libgpu.so.1")
    assert root.run(merged, "/bin/probe32", "libgpu.so.1") == "/opt/gpu32"
    assert root.run(merged, "/bin/probe", "libgpu.so.1") == "/opt/gpu"
