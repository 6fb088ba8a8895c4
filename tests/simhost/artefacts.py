# SPDX-License-Identifier: Apache-2.0
"""The simulated driver's user space: real ELF files, compiled once and kept under build/simhost.

The layout is that of NVIDIA's own installer on Debian: everything in the multi-arch directory,
SONAME links beside the files. A change of any source or of this table builds anew.

Each start of a simulated host imports this: what only a build needs is imported by the build.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "simhost"
# The driver of a simulated host that is not told another.
DEFAULT_VERSION = "550.163.01"
MULTIARCH = f"{os.uname().machine}-linux-gnu"
LIBRARY_DIRECTORY = f"usr/lib/{MULTIARCH}"
CFLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")


class SimhostError(Exception):
    """What stops the simulated host: one line, and one thing to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


class Library(NamedTuple):
    """One driver library.

    *soname* is None where it is the file's whole name; *plain_link*: there is a link `NAME.so`.
    *own_version* is that of a library which does not have the driver's; *directory* is where it
    is below the library directory.
    """

    name: str
    soname: str | None
    needed: tuple[str, ...] = ()
    plain_link: bool = False
    own_version: str = ""
    directory: str = "."

    def file(self, version: str) -> str:
        """Name of the file for driver *version*."""
        return f"{self.name}.so.{self.own_version or version}"


# Names, SONAMEs, needed libraries and plain-name links as in driver 550. Order: a library stands
# behind what it needs. libnvidia-ml is not here: it is the fake NVML.
LIBRARIES = (
    # compute
    Library("libcuda", "libcuda.so.1", plain_link=True),
    Library("libcudadebugger", "libcudadebugger.so.1"),
    Library("libnvidia-allocator", "libnvidia-allocator.so.1"),
    Library("libnvidia-gpucomp", None),
    Library("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
    Library("libnvidia-opencl", "libnvidia-opencl.so.1"),
    Library("libnvidia-pkcs11-openssl3", None),
    Library("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
    # utility
    Library("libnvidia-cfg", "libnvidia-cfg.so.1"),
    # video
    Library("libnvcuvid", "libnvcuvid.so.1", plain_link=True),
    Library("libnvidia-encode", "libnvidia-encode.so.1", ("libnvcuvid",), plain_link=True),
    Library("libnvidia-opticalflow", "libnvidia-opticalflow.so.1", ("libnvcuvid",)),
    Library("libvdpau_nvidia", "libvdpau_nvidia.so.1", directory="vdpau"),
    # graphics and display
    Library("libnvidia-glsi", None),
    Library("libnvidia-tls", None),
    Library("libnvidia-glcore", None, ("libnvidia-tls", "libnvidia-gpucomp")),
    Library("libnvidia-eglcore", None, ("libnvidia-glsi", "libnvidia-gpucomp")),
    Library(
        "libGLX_nvidia",
        "libGLX_nvidia.so.0",
        ("libnvidia-glsi", "libnvidia-tls", "libnvidia-glcore"),
    ),
    Library("libEGL_nvidia", "libEGL_nvidia.so.0", ("libnvidia-glsi",)),
    Library("libGLESv2_nvidia", "libGLESv2_nvidia.so.2"),
    Library("libnvidia-egl-gbm", "libnvidia-egl-gbm.so.1", own_version="1.1.2"),
    Library("libnvidia-fbc", "libnvidia-fbc.so.1", plain_link=True),
    Library("libnvidia-glvkspirv", None),
    Library("libnvidia-rtcore", None),
    Library("libnvoptix", "libnvoptix.so.1"),
    # ngx
    Library("libnvidia-ngx", "libnvidia-ngx.so.1"),
)
# Modules of Xorg: below its directory.
XORG = ("drivers/nvidia_drv.so", "extensions/libglxserver_nvidia.so.VERSION")
_PLATFORM = '{"file_format_version": "1.0.0", "ICD": {"library_path": "NAME"}}'
# Other files: path → content; VERSION stands for the driver's.
CONFIGS = {
    "etc/OpenCL/vendors/nvidia.icd": "libnvidia-opencl.so.1",
    "usr/share/vulkan/icd.d/nvidia_icd.json": _PLATFORM.replace("NAME", "libGLX_nvidia.so.0"),
    "usr/share/vulkan/implicit_layer.d/nvidia_layers.json": '{"file_format_version": "1.0.0"}',
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json": _PLATFORM.replace("NAME", "libEGL_nvidia.so.0"),
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json": _PLATFORM.replace(
        "NAME", "libnvidia-egl-gbm.so.1"
    ),
    "usr/share/nvidia/nvidia-application-profiles-VERSION-rc": "{}",
    "usr/share/nvidia/nvoptix.bin": "simulated data",
    "usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf": "# simulated",
}
TOOLS = (
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-server",
)
FIRMWARE = ("gsp_ga10x.bin", "gsp_tu10x.bin")
# The CUDA version that a driver branch brings, as cuDriverGetVersion reports it.
CUDA_VERSIONS = {"525": 12000, "535": 12020, "550": 12040, "570": 12080, "580": 13000}


def cuda_version(version: str) -> int:
    """Return what cuDriverGetVersion reports for driver *version*."""
    return CUDA_VERSIONS.get(version.split(".", 1)[0], 12040)


def driver_tree(version: str) -> Path:
    """Return the root (`usr/…`) of the simulated user space of driver *version*."""
    return _built(f"driver-{version}", lambda root: _build_driver(root, version))


def fake_nvml() -> Path:
    """Return the compiled fake NVML."""
    return _built("nvml", _build_nvml) / "libnvidia-ml.so.1"


def fake_dxcore(*, old: bool = False) -> Path:
    """Return the compiled fake libdxcore; an *old* one lacks D3DKMTEnumAdapters3."""
    name = "dxcore-old" if old else "dxcore"
    flags = ("-DOLD",) if old else ()
    return _built(name, lambda root: _build_dxcore(root, *flags)) / "libdxcore.so"


def nvidia_smi() -> Path:
    """Return the nvidia-smi that lists what the fake NVML reports."""
    return _built("nvidia-smi", _build_smi) / "nvidia-smi"


def fakeproc_hook() -> Path:
    """Return the static createRuntime hook that shows /proc/driver inside a container."""
    return _built("fakeproc", _build_fakeproc) / "fakeproc"


def _build_driver(root: Path, version: str) -> None:
    import shutil

    libraries = root / LIBRARY_DIRECTORY
    libraries.mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    for library in LIBRARIES:
        _build_stub(libraries, library, version)
    shutil.copyfile(fake_nvml(), libraries / f"libnvidia-ml.so.{version}")
    (libraries / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")
    (libraries / "libnvidia-ml.so").symlink_to("libnvidia-ml.so.1")
    programs = root / "usr/bin"
    programs.mkdir()
    shutil.copy(nvidia_smi(), programs / "nvidia-smi")
    _compile(HERE / "mps_control.c", programs / "nvidia-cuda-mps-control")
    for tool in TOOLS:
        _compile(HERE / "tool.c", programs / tool, f'-DTOOL_NAME="{tool}"')
    firmware = root / "usr/lib/firmware/nvidia" / version
    firmware.mkdir(parents=True)
    for name in FIRMWARE:
        (firmware / name).write_bytes(b"simulated firmware\n")
    for path, text in CONFIGS.items():
        file = root / path.replace("VERSION", version)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    (libraries / "gbm").mkdir()
    (libraries / "gbm/nvidia-drm_gbm.so").symlink_to("../libnvidia-allocator.so.1")
    for name in XORG:
        module = root / "usr/lib/xorg/modules" / name.replace("VERSION", version)
        module.parent.mkdir(parents=True)
        _compile(HERE / "stub.c", module, "-shared", "-fPIC", f'-DSTUB_NAME="{module.name}"')
    module.with_name("libglxserver_nvidia.so").symlink_to(module.name)


def _build_stub(libraries: Path, library: Library, version: str) -> None:
    directory = libraries / library.directory
    directory.mkdir(exist_ok=True)
    file = library.file(version)
    soname = library.soname or file
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{soname}", f'-DSTUB_NAME="{library.name}"']
    if library.name == "libcuda":
        flags.append(f"-DSTUB_CUDA_VERSION={cuda_version(version)}")
    needed = [str(libraries / f"{name}.so.{version}") for name in library.needed]
    _compile(
        HERE / "stub.c",
        directory / file,
        *flags,
        f"-Wl,--no-as-needed,-rpath-link,{libraries}",
        *needed,
    )
    if soname != file:
        (directory / soname).symlink_to(file)
    if library.plain_link:
        (directory / f"{library.name}.so").symlink_to(soname)


def _build_nvml(root: Path) -> None:
    flags = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1")
    others = [str(HERE / f"fakenvml_{part}.c") for part in ("conf", "mig", "migwrite", "node")]
    libraries = ("-ldl", "-lpthread")
    _compile(HERE / "fakenvml.c", root / "libnvidia-ml.so.1", *others, *flags, *libraries)


def _build_dxcore(root: Path, *flags: str) -> None:
    flags = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libdxcore.so", *flags)
    _compile(HERE / "fakedxcore.c", root / "libdxcore.so", *flags, "-ldl")


def _build_smi(root: Path) -> None:
    _compile(HERE / "nvidia-smi.c", root / "nvidia-smi", "-ldl")


def _build_fakeproc(root: Path) -> None:
    _compile(HERE / "fakeproc.c", root / "fakeproc", "-static")


def _compile(source: Path, target: Path, *flags: str) -> None:
    import subprocess

    command = ["gcc", *CFLAGS, "-o", str(target), str(source), *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        message = "gcc is missing, which builds the simulated driver"
        raise SimhostError(message, 'run "apt-get install gcc libc6-dev"') from None
    if done.returncode != 0:
        raise SimhostError(f'gcc on "{source}": {done.stderr.strip()}')


def _built(name: str, build: Callable[[Path], None]) -> Path:
    """Return the directory *name*, made by *build* unless one of the same sources is there."""
    digest = 0
    for source in sorted([*HERE.glob("*.[ch]"), HERE / "artefacts.py"]):
        digest = zlib.crc32(source.read_bytes(), digest)
    final = BUILD / f"{name}-{digest:08x}"
    if final.is_dir():
        return final
    import shutil
    import tempfile

    BUILD.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=BUILD))
    try:
        fresh.chmod(0o755)
        build(fresh)
        try:
            os.rename(fresh, final)
        except OSError:
            # Somebody built the same at the same time: theirs is as good.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return final
