# SPDX-License-Identifier: Apache-2.0
"""What is said of an image and a driver: each fault, with its action, and what is none."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import Any

import pytest
from hostile import noted

from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.cuda_note import CudaNote
from gpuruntime.image import report
from gpuruntime.image.contents import CACHE, Binary, Contents, Versions
from gpuruntime.image.driver_libraries import DriverLibrary
from gpuruntime.image.subject import FAILS, NOTE, WARNING, Finding, Machine, Subject
from gpuruntime.model import Driver, Library

LIB = "/usr/lib/x86_64-linux-gnu"
VERSION = "550.163.01"
VISIBLE = {"NVIDIA_VISIBLE_DEVICES": "all"}
LOADER = "/lib64/ld-linux-x86-64.so.2"
MUSL = "/lib/ld-musl-x86_64.so.1"
NOTED = CudaNote("12.9", noted.DRIVERS)
# SONAME → capability, and the newest glibc that it needs.
DRIVER = {
    "libcuda.so.1": ("compute", "2.17"),
    "libnvidia-ptxjitcompiler.so.1": ("compute", "2.17"),
    "libnvidia-ml.so.1": ("utility", "2.17"),
    "libnvcuvid.so.1": ("video", "2.17"),
    "libGLX_nvidia.so.0": ("graphics", "2.17"),
}


def of_driver(soname: str, abi: str = "x86-64", **more: Any) -> DriverLibrary:
    """Return the library of the driver."""
    capability, glibc = DRIVER[soname]
    directory = LIB if abi == "x86-64" else "/usr/lib/i386-linux-gnu"
    path = f"{directory}/{soname.partition('.so')[0]}.so.{VERSION}"
    library = Library(
        host_path=path,
        container_path=path,
        soname=soname,
        abi=abi,
        capability=capability,
        needed=more.pop("needed", ("libc.so.6",)),
        dev_link="libcuda.so" if soname == "libcuda.so.1" else "",
    )
    versions = Versions(requires=(("libc.so.6", f"GLIBC_{more.pop('glibc', glibc)}"),))
    names = {soname, posixpath.basename(path), *([library.dev_link] if library.dev_link else [])}
    return DriverLibrary(library, versions, frozenset(names))


def machine(*libraries: DriverLibrary, cuda: str = "12.4") -> Machine:
    """Return a machine with *libraries*, or those of DRIVER."""
    ours = libraries or tuple(map(of_driver, DRIVER))
    driver = Driver(version=VERSION, libraries=tuple(i.library for i in ours), files=())
    return Machine("x86-64", driver, ours, cuda)


def program(path: str = "/bin/app", *needed: str, **more: Any) -> Binary:
    """Return a program."""
    more = {"abi": "x86-64", "interpreter": LOADER, **more}
    return Binary(path=path, soname="", needed=needed, **more)


def library(path: str, soname: str = "", **more: Any) -> Binary:
    """Return a library."""
    return Binary(**{"path": path, "abi": "x86-64", "soname": soname or path[1:], **more})


def libc(newest: str = "2.36", **more: Any) -> Binary:
    """Return a glibc."""
    versions = ("2.2.5", "2.17", "2.31", "2.34", "2.36", "2.38")
    provides = [f"GLIBC_{version}" for version in versions[: versions.index(newest) + 1]]
    made = {"path": f"{LIB}/libc.so.6", "versions": Versions(frozenset(provides)), **more}
    return library(soname="libc.so.6", **made)


def image(*binaries: Binary, **more: Any) -> Contents:
    """Return the contents of an image."""
    return Contents(binaries={binary.path: binary for binary in binaries}, **more)


def cache(*rows: tuple[str, str]) -> dict[str, bytes]:
    """Return the loader's configuration with a cache of *rows*."""
    flags = ldcache_merge.ABI_FLAGS["x86-64"]
    entries = [ldcache_merge.CacheEntry(soname, path, flags) for soname, path in rows]
    merged = ldcache_merge.merge(None, entries)
    # As the image's own, without our mark.
    return {CACHE: merged.replace((0x47505521).to_bytes(4, "little"), b"\0\0\0\7")}


def subject(contents: Contents, **more: Any) -> Subject:
    """Return the image on a machine, asked for by the variables *env*."""
    env = {**VISIBLE, **more.pop("env", {})}
    wanted = more.pop("wanted", ("compute", "utility"))
    return Subject(contents, env, wanted, more.pop("machine", machine()))


CUDA_APP = program("/bin/app", "libc.so.6", "libcuda.so.1")
# What is wrong: the subject, then level, what, why and action of its one finding, or of each.
FAULTS: dict[str, tuple[Subject, str, str, str, str]] = {
    "a needed library of a capability that is not asked for": (
        subject(image(libc(), program("/bin/app", "libnvcuvid.so.1"))),
        *(FAILS, "libnvcuvid.so.1", "/bin/app needs it, but the container does not request video"),
        'add "video" to NVIDIA_DRIVER_CAPABILITIES: compute,utility,video',
    ),
    "a program opens it": (
        subject(image(libc(), program(opens=("libnvcuvid.so.1",)))),
        *(FAILS, "libnvcuvid.so.1", "/bin/app opens it"),
        'add "video"',
    ),
    "a library opens it, and may have other ways": (
        subject(image(libc(), library("/libav.so", opens=("libnvcuvid.so.1",)))),
        *(WARNING, "libnvcuvid.so.1", "/libav.so opens it"),
        'add "video"',
    ),
    "CUDA's runtime has no other way": (
        subject(image(libc(), library("/librt.so", opens=("libcuda.so.1",))), wanted=["utility"]),
        *(FAILS, "libcuda.so.1", "/librt.so opens it"),
        'add "compute" to NVIDIA_DRIVER_CAPABILITIES: compute,utility',
    ),
    "without a driver, by the table": (
        subject(image(libc(), program("/bin/app", "libnvoptix.so.1")), machine=Machine("x86-64")),
        *(FAILS, "libnvoptix.so.1", "does not request graphics"),
        'add "graphics"',
    ),
    "32 bit": (
        subject(
            image(
                libc(),
                libc(path="/usr/lib/i386-linux-gnu/libc.so.6", abi="i386"),
                program("/bin/app", "libcuda.so.1", abi="i386"),
            ),
            machine=machine(of_driver("libcuda.so.1"), of_driver("libcuda.so.1", "i386")),
        ),
        *(FAILS, "libcuda.so.1", "does not request compat32"),
        'add "compat32"',
    ),
    "32 bit that is not installed": (
        subject(
            image(
                libc(),
                libc(path="/usr/lib/i386-linux-gnu/libc.so.6", abi="i386"),
                program("/bin/app", "libcuda.so.1", abi="i386"),
            )
        ),
        *(FAILS, "libcuda.so.1", "is installed here for x86-64, not for i386"),
        "install the driver's libraries for i386",
    ),
    "a library that the driver no longer has": (
        subject(image(libc(), program("/bin/app", "libnvidia-ifr.so.1"))),
        *(FAILS, "libnvidia-ifr.so.1", "have it: it is part of the driver up to 470"),
        "install the whole driver",
    ),
    "a library in another version": (
        subject(image(libc(), program("/bin/app", "libcuda.so.2"))),
        *(FAILS, "libcuda.so.2", f"driver {VERSION} has libcuda.so.1 instead"),
        "build the program for that library",
    ),
    "another architecture": (
        subject(image(program("/bin/app", "libcuda.so.1", abi="aarch64"))),
        *(FAILS, "all libraries of the driver", "the image is for aarch64"),
        'the platform "linux/amd64"',
    ),
    "an architecture without a name": (
        subject(image(program(abi=""))),
        *(FAILS, "all libraries of the driver", "the image is for another architecture"),
        "linux/amd64",
    ),
    "musl": (
        subject(image(library(MUSL, "libc.so"), program(interpreter=MUSL))),
        *(FAILS, "all libraries of the driver", "the image has musl"),
        "build on an image with glibc",
    ),
    "musl behind the name of glibc": (
        subject(image(library(MUSL, "libc.so"), links={f"{LIB}/libc.so.6": MUSL})),
        *(FAILS, "all libraries of the driver", "the image has musl"),
        "build on an image with glibc",
    ),
    "a program for musl beside glibc": (
        subject(
            image(
                *(libc(), library(MUSL, "libc.so")),
                program("/bin/app", "libcuda.so.1", interpreter=MUSL),
            )
        ),
        *(FAILS, "/bin/app", "it is for musl's loader"),
        "build it for glibc",
    ),
    "no C library": (
        subject(image(program(interpreter=""))),
        *(FAILS, "all libraries of the driver", "the image has no libc.so.6"),
        "build on an image with glibc",
    ),
    "no C library in a part of the image": (
        subject(image(program(), is_complete=False)),
        *(WARNING, "all libraries of the driver", "in the examined part"),
        "",
    ),
    "an old glibc": (
        subject(
            image(libc("2.17"), CUDA_APP), machine=machine(of_driver("libcuda.so.1", glibc="2.34"))
        ),
        *(
            FAILS,
            "libcuda.so.1",
            "needs glibc 2.34 (GLIBC_2.34 of libc.so.6), the image has 2.17",
        ),
        "build on an image with glibc 2.34 or newer",
    ),
    "an old glibc, for what nobody needs": (
        subject(
            image(libc("2.17"), CUDA_APP),
            machine=machine(
                of_driver("libcuda.so.1"), of_driver("libGLX_nvidia.so.0", glibc="2.38")
            ),
            wanted=("compute", "graphics"),
        ),
        *(WARNING, "libGLX_nvidia.so.0", "needs glibc 2.38"),
        "build on an image with glibc 2.38",
    ),
    "an old glibc, for what CUDA opens": (
        subject(
            image(libc("2.17"), CUDA_APP),
            machine=machine(
                of_driver("libcuda.so.1"), of_driver("libnvidia-ptxjitcompiler.so.1", glibc="2.38")
            ),
        ),
        *(FAILS, "libnvidia-ptxjitcompiler.so.1", "needs glibc 2.38"),
        "build on an image with glibc 2.38",
    ),
    "other symbol versions": (
        subject(
            image(libc(), CUDA_APP), machine=machine(of_driver("libcuda.so.1", glibc="2.2.5_NONE"))
        ),
        *(FAILS, "libcuda.so.1", "lacks the symbol versions GLIBC_2.2.5_NONE"),
        "install a newer libc.so.6",
    ),
    "a library that the driver's needs": (
        subject(
            image(libc(), CUDA_APP),
            machine=machine(of_driver("libcuda.so.1", needed=("librt.so.1",))),
        ),
        *(FAILS, "libcuda.so.1", "librt.so.1 is not in the image"),
        "install the package that has librt.so.1",
    ),
    "an own library, by LD_LIBRARY_PATH": (
        subject(
            image(libc(), CUDA_APP, library("/opt/lib/libcuda.so.1", "libcuda.so.1")),
            env={"LD_LIBRARY_PATH": "/nope:/opt/lib"},
        ),
        *(
            FAILS,
            "/opt/lib/libcuda.so.1",
            "the image's own library hides the driver's libcuda.so.1",
        ),
        "remove the file from the image, or /opt/lib from LD_LIBRARY_PATH of the container",
    ),
    "an own library of another driver, behind links": (
        subject(
            image(
                *(libc(), CUDA_APP, library("/opt/driver/libcuda.so.535.54.03", "libcuda.so.1")),
                links={"/opt/lib": "driver", "/opt/driver/libcuda.so.1": "libcuda.so.535.54.03"},
            ),
            env={"LD_LIBRARY_PATH": "/opt/lib"},
        ),
        *(FAILS, "/opt/lib/libcuda.so.1", "the image's own library of driver 535.54.03 hides"),
        "remove the file",
    ),
    "an own library, by the program": (
        subject(
            image(
                *(libc(), library("/opt/lib/libcuda.so.1", "libcuda.so.1")),
                program("/opt/bin/app", "libcuda.so.1", search=("$ORIGIN/../lib",)),
            )
        ),
        *(FAILS, "/opt/bin/../lib/libcuda.so.1", "DT_RUNPATH or DT_RPATH of /opt/bin/app"),
        "remove the file",
    ),
    "an empty library": (
        subject(
            image(libc(), CUDA_APP, empty={"/opt/lib/libcuda.so.1"}),
            env={"LD_LIBRARY_PATH": "/opt/lib"},
        ),
        *(FAILS, "/opt/lib/libcuda.so.1", "it is empty and hides the driver's"),
        "remove the file",
    ),
    "a stub": (
        subject(
            image(
                *(libc(), library("/usr/local/cuda-12/lib64/stubs/libcuda.so", "libcuda.so.1")),
                program(opens=("libcuda.so",)),
                links={"/usr/local/cuda": "cuda-12"},
            ),
            env={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs"},
        ),
        *(FAILS, "/usr/local/cuda/lib64/stubs/libcuda.so", "a stub of the CUDA toolkit"),
        "remove /usr/local/cuda/lib64/stubs from LD_LIBRARY_PATH",
    ),
    "forward compatibility for another driver": (
        subject(
            image(
                *(libc(), CUDA_APP),
                library("/c/libcuda.so.575.57.08", "libcuda.so.1", note=CudaNote("12.9", (535,))),
                links={"/c/libcuda.so.1": "libcuda.so.575.57.08"},
            ),
            env={"LD_LIBRARY_PATH": "/c"},
        ),
        *(FAILS, "/c/libcuda.so.1", f"not for driver {VERSION}"),
        "remove /c from LD_LIBRARY_PATH",
    ),
    "a stale loader cache": (
        subject(
            image(
                libc(),
                CUDA_APP,
                config=cache(("libcuda.so.1", f"{LIB}/libcuda.so.1"), ("libx.so", "/none")),
            )
        ),
        *(WARNING, CACHE, "that are not in the image: libcuda.so.1"),
        "run ldconfig when the image is built",
    ),
    "a stale loader cache for what the container does not get": (
        subject(
            image(
                libc(),
                program("/bin/app", "libnvidia-ifr.so.1"),
                config=cache(("libnvidia-ifr.so.1", f"{LIB}/libnvidia-ifr.so.1")),
                empty={f"{LIB}/libnvidia-ifr.so.1"},
            )
        ),
        *(FAILS, CACHE, "libnvidia-ifr.so.1"),
        "run ldconfig",
    ),
    "a damaged loader cache": (
        subject(image(libc(), CUDA_APP, config={CACHE: b"glibc-ld.so.cache9.9" * 9})),
        *(WARNING, CACHE, "the image's loader cache is not used"),
        "run ldconfig",
    ),
    "a driver in the image": (
        subject(image(libc(), CUDA_APP, library(f"{LIB}/libcuda.so.535.1.2", "libcuda.so.1"))),
        *(WARNING, f"{LIB}/libcuda.so.535.1.2", "the image has driver libraries"),
        "remove them",
    ),
    "a CUDA runtime of a newer major version": (
        subject(image(libc(), library("/libcudart.so.13.0.48", "libcudart.so.13"))),
        *(
            FAILS,
            "CUDA runtime 13.0",
            "supports CUDA 12.4, but /libcudart.so.13.0.48 needs a newer",
        ),
        "use an image with CUDA 12.4 or older",
    ),
    "a CUDA runtime that is needed from elsewhere": (
        subject(image(libc(), program("/bin/app", "libcudart.so.13"))),
        *(FAILS, "CUDA runtime 13", "/bin/app needs a newer version"),
        "update the driver",
    ),
    "a CUDA runtime of a newer minor version": (
        subject(image(libc(), library("/libcudart.so.12.8.90", "libcudart.so.12"))),
        *(
            WARNING,
            "CUDA runtime 12.8",
            "/libcudart.so.12.8.90 works with it, but its PTX",
        ),
        "update the driver",
    ),
    "an old CUDA, which is compatible with nothing": (
        subject(
            image(libc(), library("/libcudart.so.10.2.89", "libcudart.so.10.2")),
            machine=machine(cuda="10.1"),
        ),
        *(FAILS, "CUDA runtime 10.2", "needs a newer version"),
        "update the driver",
    ),
    "a CUDA runtime, and nobody knows the driver's": (
        subject(
            image(libc(), library("/libcudart.so.12.8.90", "libcudart.so.12")),
            machine=machine(cuda=""),
        ),
        *(NOTE, "CUDA runtime 12.8", "is unknown"),
        "",
    ),
    "no GPU": (
        subject(image(libc(), CUDA_APP), env={"NVIDIA_VISIBLE_DEVICES": ""}),
        *(NOTE, "no GPU", "NVIDIA_VISIBLE_DEVICES is not set"),
        '"--gpus all"',
    ),
    "a directory that is no image": (
        subject(image()),
        *(WARNING, "no programs", "may not be the root file system"),
        "bin and usr",
    ),
    "what was not looked at": (
        subject(image(libc(), CUDA_APP, limits=["the image is larger"])),
        *(WARNING, "not all files", "the image is larger"),
        "",
    ),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_is_said_once_with_an_action(case: tuple[Any, ...]) -> None:
    """Whoever reads the line knows what to do; CI knows by the level."""
    of, level, what, why, action = case
    findings = report.findings(of)
    fitting = [
        finding
        for finding in findings
        if (finding.level, finding.what) == (level, what) and why in finding.why
    ]
    assert len(fitting) == 1, findings
    assert action in fitting[0].action
    assert bool(action) == bool(fitting[0].action)
    worse = [finding for finding in findings if finding.level == FAILS and finding not in fitting]
    # The same library, seen from another side.
    assert all(
        finding.what.endswith(what.rpartition("/")[2]) or what == CACHE for finding in worse
    )


GOOD: dict[str, Subject] = {
    "a CUDA image": subject(
        image(libc(), CUDA_APP, library("/libcudart.so.12.4.127", "libcudart.so.12"))
    ),
    "a plain image": subject(image(libc(), program())),
    "a merged /usr": subject(
        image(libc(path="/usr/lib64/libc.so.6"), CUDA_APP, links={"/lib64": "usr/lib64"})
    ),
    "a library in a directory of the cache": subject(
        image(libc(path="/nix/libc.so.6"), CUDA_APP, config=cache(("libc.so.6", "/nix/libc.so.6")))
    ),
    "a library in a configured directory": subject(
        image(
            libc(path="/o/libc.so.6"), CUDA_APP, config={"/etc/ld.so.conf.d/o.conf": b"/o # x\n"}
        )
    ),
    "an own library where the driver's is put": subject(
        image(libc(), CUDA_APP, empty={f"{LIB}/libcuda.so.1"}), env={"LD_LIBRARY_PATH": LIB}
    ),
    "an own library for another machine": subject(
        image(libc(), CUDA_APP, library("/o/libcuda.so.1", "libcuda.so.1", abi="i386")),
        env={"LD_LIBRARY_PATH": "/o"},
    ),
    "a stub that nobody looks for": subject(
        image(libc(), CUDA_APP, library("/cuda/lib64/stubs/libcuda.so", "libcuda.so.1"))
    ),
    "stubs in the search path without the name that is looked for": subject(
        image(libc(), CUDA_APP, library("/cuda/lib64/stubs/libcuda.so", "libcuda.so.1")),
        env={"LD_LIBRARY_PATH": "/cuda/lib64/stubs"},
    ),
    "a newer CUDA with libraries for forward compatibility": subject(
        image(
            *(libc(), CUDA_APP, library("/libcudart.so.12.8.90", "libcudart.so.12")),
            library("/usr/local/cuda/compat/libcuda.so.575.57.08", "libcuda.so.1", note=NOTED),
        )
    ),
    "a CUDA 11 runtime, whose SONAME is 11.0": subject(
        image(libc(), program("/bin/app", "libcudart.so.11.0"))
    ),
    "the Container Toolkit's own library": subject(
        image(libc(), program("/bin/app", "libnvidia-container.so.1"))
    ),
}


@pytest.mark.parametrize("of", GOOD.values(), ids=GOOD)
def test_what_works_is_not_complained_about(of: Subject) -> None:
    """A false alarm teaches to read no more."""
    assert [finding for finding in report.findings(of) if finding.level != NOTE] == []


def test_forward_compatibility_that_fits_is_a_note() -> None:
    """By LD_LIBRARY_PATH, as CUDA's images once had it."""
    compat = library("/c/libcuda.so.575.57.08", "libcuda.so.1", note=NOTED)
    contents = image(
        *(libc(), CUDA_APP, compat), links={"/c/libcuda.so.1": "libcuda.so.575.57.08"}
    )
    of = subject(contents, env={"LD_LIBRARY_PATH": "/c"})
    assert report.findings(of) == [
        Finding(
            NOTE,
            "/c/libcuda.so.1",
            "CUDA for forward compatibility is used in place of the driver's",
        )
    ]


def test_libraries_for_this_cpu_come_before_the_driver() -> None:
    """The loader takes what is in glibc-hwcaps from its cache first, wherever it stands there."""
    own = library("/usr/lib/glibc-hwcaps/x86-64-v2/libcuda.so.1", "libcuda.so.1")
    of = subject(image(libc(), CUDA_APP, own, config=cache(("libcuda.so.1", own.path))))
    assert [f for f in report.findings(of) if f.level == FAILS] == []
    of.loader.cached[:] = [replace(row, is_for_cpu=True) for row in of.loader.cached]
    (finding,) = [f for f in report.findings(of) if f.level == FAILS]
    assert "prefers libraries for this CPU" in finding.why
