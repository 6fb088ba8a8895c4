# SPDX-License-Identifier: Apache-2.0
"""Have the host's ldconfig make a cache: `sandboxed.py ROOT LDCONFIG DEADLINE`; print what came.

Standard output is one JSON object: the names in the cache, or why there is none, and the seconds.
"""

from __future__ import annotations

import json
import sys
import time

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge
from gpuruntime.system import sandbox
from gpuruntime.system.paths import Root


def main() -> None:
    """Run it and print."""
    sandbox.DEADLINE_S = float(sys.argv[3])
    start = time.monotonic()
    names, refused, text = [], "", ""
    try:
        data = sandbox.build_cache(Root(sys.argv[1]), sys.argv[2])
        text = data.decode("latin-1") if data.startswith(b"seen ") else ""
        names = [] if text else [f"{row[0]} {row[1]}" for row in ldcache_merge.parse(data)]
    except LdcacheError as error:
        refused = error.message
    seconds = time.monotonic() - start
    json.dump({"names": names, "refused": refused, "text": text, "seconds": seconds}, sys.stdout)


if __name__ == "__main__":
    main()
