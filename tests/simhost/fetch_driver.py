#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpack NVIDIA's real user space of a driver branch: `make driver-root VERSION=550`.

The packages are those of the distribution's non-free section, fetched from where this machine
fetches its own and checked against the same keys, with lists and cache of our own. Nothing is
installed, no maintainer script runs, and apt's own state is not touched. The result is
build/driver-root/VERSION, a driver root for `simhost.py run --driver-root`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
MULTIARCH = f"{platform.machine()}-linux-gnu"
COMPONENTS = "main contrib non-free non-free-firmware"
# Where to look for a branch, in this order. The machine's own suite comes first.
SUITES = ("bookworm", "bookworm-backports", "trixie", "trixie-backports")
BRANCHES = ("535", "550")
PACKAGES = (
    # compute and utility
    "libcuda1",
    "libcudadebugger1",
    "libnvidia-allocator1",
    "libnvidia-cfg1",
    "libnvidia-gpucomp",
    "libnvidia-ml1",
    "libnvidia-nvvm4",
    "libnvidia-pkcs11-openssl3",
    "libnvidia-ptxjitcompiler1",
    "nvidia-cuda-mps",
    "nvidia-opencl-common",
    "nvidia-opencl-icd",
    "nvidia-persistenced",
    "nvidia-smi",
    # video, graphics, display
    "libegl-nvidia0",
    "libgles-nvidia1",
    "libgles-nvidia2",
    "libglx-nvidia0",
    "libnvcuvid1",
    "libnvidia-api1",
    "libnvidia-egl-gbm1",
    "libnvidia-egl-wayland1",
    "libnvidia-eglcore",
    "libnvidia-encode1",
    "libnvidia-fbc1",
    "libnvidia-glcore",
    "libnvidia-glvkspirv",
    "libnvidia-ngx1",
    "libnvidia-opticalflow1",
    "libnvidia-rtcore",
    "libnvoptix1",
    "nvidia-driver-bin",
    "nvidia-egl-common",
    "nvidia-egl-icd",
    "nvidia-vdpau-driver",
    "nvidia-vulkan-common",
    "nvidia-vulkan-icd",
    "xserver-xorg-video-nvidia",
    # the rest of a node
    "firmware-nvidia-gsp",
    "nvidia-modprobe",
    "nvidia-powerd",
)


class FetchError(Exception):
    """Why there is no driver root: one line, and one thing to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")


@dataclass(frozen=True)
class Source:
    """One entry of apt's sources: what of it a private configuration needs."""

    uris: str
    suites: tuple[str, ...]
    signed_by: str


def main(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    if len(arguments) != 1 or arguments[0] not in BRANCHES:
        print(f"usage: fetch_driver.py {'|'.join(BRANCHES)}", file=sys.stderr)
        return 2
    try:
        version, root = fetch(arguments[0])
    except FetchError as error:
        print(f"driver-root: {error}", file=sys.stderr)
        return 1
    print(f"driver-root: {version} in {root}")
    return 0


def fetch(branch: str) -> tuple[str, Path]:
    """Fetch and unpack driver *branch*, and return its full version and its driver root."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FetchError("this machine has no apt", "run it on Debian")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or CHECKOUT / "build" / "cache")
    source = machine_source()
    own = [suite for suite in SUITES if suite in source.suites]
    failures = []
    for suite in dict.fromkeys([*own, *SUITES]):
        progress(f"1/3 reading the package lists of {suite}")
        apt = Apt(cache / "gpuruntime-apt" / suite, source, suite)
        failure = apt.update()
        if failure:
            failures.append(f"{suite}: {failure}")
            continue
        versions = apt.available(PACKAGES)
        if versions.get("libcuda1", "").startswith(f"{branch}."):
            return _unpack(branch, apt, versions)
    if failures:
        message = f"driver {branch} was not found, and not all suites could be read: {failures[0]}"
        raise FetchError(message, "check the network and try again")
    message = f"no suite has driver {branch} ({', '.join(SUITES)})"
    raise FetchError(message, "ask for another VERSION")


def progress(line: str) -> None:
    """Print which step begins; nothing where QUIET is set, as it is by "make -s"."""
    if not os.environ.get("QUIET"):
        print(f"driver-root: {line}", file=sys.stderr, flush=True)


class Apt:
    """apt with the machine's settings for reaching the archive, and state of its own."""

    def __init__(self, state: Path, source: Source, suite: str) -> None:
        self.archives = state / "archives"
        for directory in ("lists/partial", "archives/partial"):
            (state / directory).mkdir(parents=True, exist_ok=True)
        status = state / "status"
        status.touch()
        sources = state / "apt.sources"
        signed = f"Signed-By: {source.signed_by}\n" if source.signed_by else ""
        sources.write_text(
            f"Types: deb\nURIs: {source.uris}\nSuites: {suite}\nComponents: {COMPONENTS}\n{signed}"
        )
        self._configuration = state / "apt.conf"
        # Read last (-c), after the machine's own: its clean-up hooks are not for our state.
        self._configuration.write_text(
            f'Dir::Etc::sourcelist "{sources}";\n'
            'Dir::Etc::sourceparts "/dev/null";\n'
            'Dir::Etc::preferencesparts "/dev/null";\n'
            'Dir::Etc::preferences "/dev/null";\n'
            f'Dir::State::Lists "{state}/lists";\n'
            f'Dir::State::status "{status}";\n'
            f'Dir::Cache "{state}";\n'
            'APT::Sandbox::User "root";\n'
            "#clear APT::Update::Pre-Invoke;\n"
            "#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n"
            "#clear DPkg::Post-Invoke;\n"
        )

    def update(self) -> str | None:
        """Fetch the package lists; return what went wrong, in one line, or None."""
        done = self._run("apt-get", "-q", "--error-on=any", "update")
        if done.returncode == 0:
            return None
        lines = [line for line in done.stderr.splitlines() if line.startswith(("E:", "Err"))]
        return lines[0] if lines else f"apt-get update ended with {done.returncode}"

    def available(self, packages: tuple[str, ...]) -> dict[str, str]:
        """Return the version of each of *packages* that there is."""
        done = self._run("apt-cache", "madison", *packages)
        versions: dict[str, str] = {}
        for line in done.stdout.splitlines():
            name, version, _ = (field.strip() for field in line.split("|", 2))
            versions.setdefault(name, version)
        return versions

    def download(self, versions: dict[str, str]) -> list[Path]:
        """Fetch the packages and return their files."""
        pinned = [f"{name}={version}" for name, version in versions.items()]
        done = self._run("apt-get", "-q", "download", *pinned, cwd=self.archives)
        if done.returncode != 0:
            message = f"the packages could not be fetched: {done.stderr.strip()}"
            raise FetchError(message, "check the network and try again")
        # apt escapes the colon of an epoch in a file name.
        return [
            next(self.archives.glob(f"{name}_{version.replace(':', '%3a')}_*.deb"))
            for name, version in versions.items()
        ]

    def _run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        program, *rest = command
        return subprocess.run(
            [program, f"-c={self._configuration}", *rest],
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
        )


def machine_source() -> Source:
    """Return the entry of the machine's sources that the distribution itself comes from."""
    codename = ""
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            codename = line.partition("=")[2].strip('"')
    directory = Path("/etc/apt/sources.list.d")
    sources = []
    for file in sorted(directory.glob("*.sources")):
        sources += parse_deb822(file.read_text())
    for file in (Path("/etc/apt/sources.list"), *sorted(directory.glob("*.list"))):
        if file.is_file():
            sources += parse_one_line(file.read_text())
    for source in sources:
        if codename in source.suites:
            return source
    message = f'apt\'s sources on this machine have no entry for "{codename}"'
    raise FetchError(message, "add the distribution's own entry to /etc/apt/sources.list.d")


def parse_deb822(text: str) -> list[Source]:
    """Return the enabled binary entries of a deb822 sources file: sources.list(5)."""
    sources = []
    for paragraph in text.split("\n\n"):
        fields: dict[str, str] = {}
        last = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                # A key given in the file itself goes on over lines, dots for empty ones.
                fields[last] += f"\n{line}"
                continue
            last, _, value = line.partition(":")
            last = last.lower()
            fields[last] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes") != "no":
            suites = tuple(fields.get("suites", "").split())
            sources.append(Source(fields.get("uris", ""), suites, fields.get("signed-by", "")))
    return sources


def parse_one_line(text: str) -> list[Source]:
    """Return the binary entries of a sources file of one entry a line: sources.list(5)."""
    sources = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] != ["deb"]:
            continue
        signed_by = ""
        words = words[1:]
        if words and words[0].startswith("["):
            closing = next(i for i, word in enumerate(words) if word.endswith("]"))
            for option in " ".join(words[: closing + 1]).strip("[] ").split():
                if option.startswith("signed-by="):
                    signed_by = option.partition("=")[2].replace(",", " ")
            words = words[closing + 1 :]
        if len(words) >= 2:
            sources.append(Source(words[0], (words[1],), signed_by))
    return sources


def _unpack(branch: str, apt: Apt, versions: dict[str, str]) -> tuple[str, Path]:
    missing = [name for name in PACKAGES if name not in versions]
    if missing:
        print(f"driver-root: not in this suite: {' '.join(missing)}")
    progress(f"2/3 fetching {len(versions)} packages of driver {versions['libcuda1']}")
    packages = apt.download(versions)
    progress(f"3/3 unpacking {len(packages)} packages")
    root = CHECKOUT / "build" / "driver-root" / branch
    fresh = root.with_name(f".{branch}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", str(package), str(fresh)], check=True)
    _merge_usr(fresh)
    _link(fresh)
    shutil.rmtree(root, ignore_errors=True)
    fresh.rename(root)
    return driver_version(root), root


def driver_version(root: Path) -> str:
    """Return the full version of the driver in *root*, from the name of its libcuda.

    Raises FetchError where there is none.
    """
    for file in sorted((root / "usr/lib").rglob("libcuda.so.*")):
        version = file.name.removeprefix("libcuda.so.")
        if "." in version and not file.is_symlink():
            return version
    raise FetchError(f'no libcuda in "{root}"', 'run "make driver-root VERSION=550"')


def _merge_usr(root: Path) -> None:
    """Move /lib and the like below /usr, as on an installed system."""
    for name in ("lib", "lib64", "bin", "sbin"):
        old = root / name
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(old)
        if (root / "usr" / name).is_dir():
            old.symlink_to(f"usr/{name}")


def _link(root: Path) -> None:
    """Make the links that Debian's alternatives make at installation, without their middle hop.

    Libraries lie in nvidia/current; by their SONAMEs, and libcuda and NVML also by their plain
    names, they are found in the multi-arch directory.
    """
    version = driver_version(root)
    libraries = root / "usr/lib" / MULTIARCH
    current = libraries / "nvidia/current"
    for file in sorted(current.glob("*.so*")):
        plain = file.name in {"libcuda.so", "libnvidia-ml.so"}
        if plain or (".so." in file.name and not file.name.endswith(version)):
            _link_to(libraries / file.name, f"nvidia/current/{file.name}")
    for name, directory in (("nvidia-drm_gbm.so", "gbm"), ("libvdpau_nvidia.so.1", "vdpau")):
        if (current / name).exists():
            _link_to(libraries / directory / name, f"../nvidia/current/{name}")
    programs = root / "usr/lib/nvidia/current"
    for name in ("nvidia-smi", "nvidia-debugdump"):
        if (programs / name).exists():
            _link_to(root / "usr/bin" / name, f"../lib/nvidia/current/{name}")


def _link_to(link: Path, target: str) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() and not link.exists():
        link.symlink_to(target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
