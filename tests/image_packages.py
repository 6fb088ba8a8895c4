#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpack packages of distributions for tests: `make image-packages`.

They are C libraries, for tests of `explain --rootfs`, and a checker of alert rules. The packages
are Debian's, fetched as those of `make driver-root` are; nothing is installed. The results are
build/image-packages/NAME, root file systems with little else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "simhost"))
import fetch_driver

ROOT = fetch_driver.CHECKOUT / "build" / "image-packages"
# Name → suite and packages. Alpine's C library is musl, which Debian has too; prometheus has
# promtool, for tests of the alert rules.
TREES = {
    "debian": ("bookworm", ("libc6", "libgcc-s1", "libstdc++6", "coreutils")),
    "old-glibc": ("bullseye", ("libc6", "libgcc-s1", "libstdc++6", "coreutils")),
    "musl": ("bookworm", ("musl",)),
    "prometheus": ("bookworm", ("prometheus",)),
}


def main() -> int:
    """Unpack each tree that is not there, and return the exit status."""
    try:
        for name in TREES:
            print(f"image-packages: {unpack(name)}")
    except fetch_driver.FetchError as error:
        print(f"image-packages: {error}", file=sys.stderr)
        return 1
    return 0


def unpack(name: str) -> Path:
    """Return the tree *name*, unpacked if it is not there; raise FetchError."""
    final = ROOT / name
    if final.is_dir():
        return final
    suite, packages = TREES[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or fetch_driver.CHECKOUT / "build" / "cache")
    apt = fetch_driver.Apt(cache / "gpuruntime-apt" / suite, fetch_driver.machine_source(), suite)
    failure = apt.update()
    versions = {} if failure else apt.available(packages)
    if len(versions) != len(packages):
        reason = failure or f"no {', '.join(sorted({*packages} - {*versions}))} in {suite}"
        raise fetch_driver.FetchError(
            f"the packages of {name} could not be fetched: {reason}",
            "check the network and try again",
        )
    fresh = final.with_name(f".{name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for package in apt.download(versions):
        subprocess.run(["dpkg-deb", "-x", str(package), str(fresh)], check=True)
    fresh.rename(final)
    return final


if __name__ == "__main__":
    sys.exit(main())
