# SPDX-License-Identifier: Apache-2.0
"""`platform_trees.py play NAME=ROOT...`: containers on miniature roots, by runc in automatic mode.

Prints one JSON object: name of the root → what the container sees. For the simulated host, as
scenario.py.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from drivers import Bundle
from scenario import CONFIG, WORK, cgroup2_alone, host_of, main, nothing_left
from ways import Way

from gpuruntime.formats import ldcache_merge

ROOT = "nvidia-container-cli.root"
# The containers' view: nodes, whether they can be opened, symlinks, mounts, the loader cache.
LOOK = """
for node in $(find /dev -type c | grep -v -E '^/dev/(pts|null|zero|full|u?random|tty|ptmx)'); do
    cat $node 2>&1 | grep -q "not permitted" && how=denied || how=opened
    echo "node $node $how"
done
for link in $(find /usr /etc /lib -xdev -type l); do
    echo "link $link $(readlink $link) $(test -e $link && echo leads || echo dangles)"
done
while read -r a b c d point rest; do echo "mount $point"; done < /proc/self/mountinfo
env | sed 's/^/env /'
echo "cache $(base64 /etc/ld.so.cache | tr -d '\\n')"
"""


class Looking(Bundle):
    """A bundle whose process looks at what is particular about a platform."""

    def _make(self, env: list[str]) -> Path:
        bundle = super()._make(env)
        path = bundle / "config.json"
        config = json.loads(path.read_text())
        config["process"]["args"] = ["/bin/busybox", "sh", "-c", LOOK]
        for name in ("find", "grep", "cat", "sed", "readlink", "env", "base64", "tr"):
            (bundle / "rootfs/bin" / name).symlink_to("busybox")
        path.write_text(json.dumps(config))
        return bundle


def seen(output: str) -> dict[str, Any]:
    """Return the lines of LOOK by their first word; the cache as rows of SONAME and path."""
    rows: dict[str, Any] = {}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        rows.setdefault(word, []).append(rest)
    entries = ldcache_merge.parse(base64.b64decode(rows["cache"][0]), lambda _: True)
    rows["cache"] = sorted({(entry[0], entry[1]) for entry in entries})
    return rows


def play(*roots: str) -> dict[str, Any]:
    """Run a container without our runtime, and one for each of *roots*, as driver root."""
    cgroup2_alone()
    CONFIG.parent.mkdir(exist_ok=True)
    engine = Looking(WORK)
    results: dict[str, Any] = {"plain": seen(engine.run(None, plain=True))}
    with nothing_left(results):
        for word in roots:
            name, _, path = word.partition("=")
            with host_of(Way("0", None), **{ROOT: path}):
                results[name] = seen(engine.run("0"))
    return results


if __name__ == "__main__":
    main({"play": play})
