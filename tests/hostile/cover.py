# SPDX-License-Identifier: Apache-2.0
"""Enter libraries below a root whose /etc cannot be written; print what came of it, twice.

Run in a mount namespace of its own: `cover.py WORK KIND WALK|OPENAT2|STRING`. STRING is the
control, which mounts by path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.paths import Root

ENTRY = CacheEntry("libx.so.1", "/opt/driver/libx.so.1", ABI_FLAGS["x86-64"])
IMAGE = CacheEntry("libown.so.1", "/opt/own/libown.so.1", ABI_FLAGS["x86-64"])


# How the merge marks its own entries in a cache, and something that it does not know.
OURS, NOT_OURS = b"\x21UPG", b"\x22UPG"


def image_cache(*entries: CacheEntry) -> bytes:
    """Return a cache in which *entries* are the image's."""
    return ldcache_merge.merge(None, entries).replace(OURS, NOT_OURS)


def run(*command: object) -> None:
    """Run a command of the machine."""
    subprocess.run([str(word) for word in command], check=True)


def prepare(work: Path, kind: str) -> tuple[Path, Path]:
    """Make a root with its mounts, and a tree outside; return the root and a victim."""
    root, outside = work / "root", work / "outside"
    etc = root / "etc"
    for directory in (etc, root / "sbin", outside):
        directory.mkdir(parents=True)
    (root / "sbin" / "ldconfig").touch()
    victim = outside / "victim"
    victim.write_bytes(image_cache(IMAGE))
    if kind == "shared":
        # What is mounted below the work directory appears in its twin, as on a host.
        run("mount", "--bind", work, work)
        run("mount", "--make-rshared", work)
        (work.parent / "twin").mkdir(exist_ok=True)
        run("mount", "--bind", work, work.parent / "twin")
    run("mount", "--bind", root, root)
    cache = etc / "ld.so.cache"
    if kind == "link":
        cache.symlink_to("../" * 40 + str(victim).lstrip("/"))
    elif kind == "directory":
        cache.mkdir()
    elif kind != "missing":
        cache.write_bytes(victim.read_bytes())
    if kind == "shared_file":
        # A volume that is this one file, and that the host shares.
        run("mount", "--bind", victim, victim)
        run("mount", "--make-shared", victim)
        run("mount", "--bind", victim, cache)
    if kind == "root":
        run("mount", "-o", "remount,bind,ro", root)
    elif kind != "writable":
        run("mount", "--rbind", etc, etc)
        run("mount", "-o", "remount,bind,ro", etc)
    return root, victim


def mounted() -> dict[str, str]:
    """Return the lines of mounts by number: the rest of a line may change."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[0]: line for line in lines}


def enter(root: Path, way: str) -> dict[str, Any]:
    """Enter the library; return what was mounted, said and refused."""
    before = mounted()
    warnings: list[str] = []
    refused = ""
    if way == "STRING":
        merged = root.parent / "merged"
        merged.write_bytes(image_cache(ENTRY))
        subprocess.run(["mount", "--bind", merged, root / "etc" / "ld.so.cache"], check=False)
    else:
        opened = Root(str(root))
        opened._has_openat2 = way == "OPENAT2"
        try:
            LoaderCache((ENTRY,)).execute(opened, warnings.append)
        except LdcacheError as error:
            refused = error.message
        opened.close()
    after = mounted()
    return {
        "new": [after[number] for number in after.keys() - before.keys()],
        "gone": [before[number] for number in before.keys() - after.keys()],
        "warnings": warnings,
        "refused": refused,
    }


def main() -> None:
    """Enter twice, look, and print."""
    work, kind, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    root, victim = prepare(work, kind)
    content = victim.read_bytes()
    seen: dict[str, Any] = {"first": enter(root, way), "second": enter(root, way)}
    seen["victim_kept"] = victim.read_bytes() == content and os.listdir(victim.parent) == [
        "victim"
    ]
    seen["etc"] = sorted(os.listdir(root / "etc"))
    cache = root / "etc" / "ld.so.cache"
    try:
        cache.open("ab").close()
        seen["writable"] = True
    except OSError:
        seen["writable"] = False
    # As the container sees it, at the end of this namespace.
    os.chroot(root)
    try:
        seen["names"] = [
            row[0] for row in ldcache_merge.parse(Path("/etc/ld.so.cache").read_bytes())
        ]
    except OSError as error:
        seen["names"] = [str(error.strerror)]
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
