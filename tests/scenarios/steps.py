# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D103 (the name of a case says what it is)
"""Start containers whose image has CUDA of its own, and places that cannot be written.

Standard output is one JSON object: case → kind of spec → status and what the container saw. The
kinds are one hook for all steps (`combined`) and one a step (`separate`), the second of them for
some cases: each step is the same code.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "hostile"))
import noted
import scenario

COMPAT = "usr/local/cuda-12/compat"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
CONF = "/etc/ld.so.conf.d/00-compat-gpuruntime.conf"
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
SPEC = Path("/etc/cdi/nvidia.json")
SPECS = {"combined": (), "separate": ("--separate-hooks",)}


class Container:
    """A bundle, its config, and a directory on the host for volumes."""

    def __init__(self, bundle: Path, config: dict[str, Any]) -> None:
        self.bundle = bundle
        self.root = bundle / "rootfs"
        self.config = config
        self.volume = bundle / "volume"
        self.volume.mkdir()

    def mount(self, destination: str, *options: str) -> None:
        """Have the volume, with what the image has there, mounted."""
        source = self.root / destination.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, self.volume, symlinks=True, dirs_exist_ok=True)
        self.config["mounts"].append(
            {"destination": destination, "type": "bind", "source": str(self.volume),
             "options": ["rbind", "rprivate", *options]}
        )  # fmt: skip

    def compat(self, version: str, *drivers: int) -> None:
        """Ship CUDA of *version*, which says that it runs on *drivers*."""
        directory = self.root / COMPAT
        directory.mkdir(parents=True)
        text = json.dumps({"Format": 1, "CUDA Version": "12.9", "Driver": list(drivers)})
        note = directory.parent / "note"
        note.write_bytes(noted.note(text.encode()))
        source = f'.section {noted.SECTION.decode()},"a",@note\n.incbin "{note}"\n'
        library = directory / f"libcuda.so.{version}"
        scenario.run(
            "gcc", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "assembler", "-",
            "-o", library, input=source,
        )  # fmt: skip
        (directory / "libcuda.so.1").symlink_to(library.name)
        (self.root / "usr/local/cuda").symlink_to("/usr/local/cuda-12")


def image_without_cuda(container: Container) -> None:
    del container


def compat_is_newer(container: Container) -> None:
    container.compat("575.57.08", 535, 550, 570)


def compat_is_for_others(container: Container) -> None:
    container.compat("575.57.08", 535, 570)


def compat_is_older(container: Container) -> None:
    container.compat("535.1", 535, 550)


def compat_in_a_read_only_etc(container: Container) -> None:
    container.compat("575.57.08", 535, 550, 570)
    etc_is_read_only(container)


def etc_is_a_volume(container: Container) -> None:
    container.mount("/etc")


def etc_is_read_only(container: Container) -> None:
    (container.root / "etc" / "ld.so.cache").touch()
    etc_is_read_only_without_a_cache(container)


def etc_is_read_only_without_a_cache(container: Container) -> None:
    # runc makes the places of mounts: there they have to be already.
    spec = json.loads(SPEC.read_text())
    for mount in spec["containerEdits"]["mounts"]:
        place = Path(f"{container.root}{mount['containerPath']}")
        if mount["containerPath"].startswith("/etc/"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    container.mount("/etc", "ro")


def etc_is_missing(container: Container) -> None:
    shutil.rmtree(container.root / "etc")


def libraries_are_a_volume(container: Container) -> None:
    container.mount(f"/{LIBRARIES}")


def root_is_read_only(container: Container) -> None:
    container.config["root"]["readonly"] = True


CASES: tuple[Callable[[Container], None], ...] = (
    image_without_cuda, compat_is_newer, compat_is_for_others, compat_is_older,
    compat_in_a_read_only_etc, etc_is_a_volume, etc_is_read_only,
    etc_is_read_only_without_a_cache, etc_is_missing, libraries_are_a_volume, root_is_read_only,
)  # fmt: skip


SEPARATE = (
    image_without_cuda, compat_is_newer, compat_in_a_read_only_etc, etc_is_a_volume,
    etc_is_read_only_without_a_cache,
)  # fmt: skip


def observe(container: Container) -> dict[str, object]:
    """Run the container twice in a row; return what the second one saw."""
    (container.bundle / "config.json").write_text(json.dumps(container.config))
    status, text, kept = 0, "", []
    for number in range(2):
        name = f"steps-{os.getpid()}-{number}"
        # The shim edits the config in place: each start has the engine's own.
        (container.bundle / "config.json").write_text(json.dumps(container.config))
        status, out = scenario.create(container.bundle, name)
        if status == 0:
            scenario.finish(name)
        text = out.read_text(errors="replace")
        kept.append(written(container))
    return {"status": status, "output": text, "kept": kept[0] == kept[1]}


def written(container: Container) -> dict[str, tuple[int, int]]:
    """Return inode and mtime of what hooks write, in the root and in the volume."""
    entries = {}
    for tree in (container.root / "etc", container.volume):
        for path in tree.rglob("*"):
            status = path.lstat()
            entries[str(path)] = (status.st_ino, status.st_mtime_ns if path.is_file() else 0)
    return entries


def main() -> None:
    """Run every case with both kinds of spec and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-steps-"))
    results: dict[str, dict[str, object]] = {case.__name__: {} for case in CASES}
    try:
        pristine = scenario.make_bundle(top / "pristine", "nvidia.com/gpu=0,nvidia.com/gpu=1")
        probe = pristine / "rootfs" / "bin" / "asks"
        scenario.run("gcc", "-o", probe, scenario.HERE / "asks.c", "-ldl")
        for kind, options in SPECS.items():
            generate = (scenario.BIN / "gpuruntime", "cdi", "generate", *options)
            scenario.run(*generate, "--output", SPEC)
            for case in CASES if kind == "combined" else SEPARATE:
                bundle = top / f"{case.__name__}-{kind}"
                shutil.copytree(pristine, bundle, symlinks=True)
                config = json.loads((bundle / "config.json").read_text())
                config["process"]["args"] = [
                    *("/bin/asks", CONF, PROFILE, "/proc/driver/nvidia/params")
                ]
                container = Container(bundle, config)
                case(container)
                results[case.__name__][kind] = observe(container)
        json.dump(results, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
