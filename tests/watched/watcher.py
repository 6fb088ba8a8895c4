# SPDX-License-Identifier: Apache-2.0
"""`watcher.py ARGV0 ARGS...`: exit 0 if the shim would change nothing for this create.

With a name in WATCHED_ANSWER: if the file of that name in the bundle is what the shim would write.

Run in the engine's environment and directory by the watched launcher (launcher.c). It asks for the
shim's decision itself, without the look for words that comes before it; what would have to be
asked of the machine, or be refused, is a change too.
"""

from __future__ import annotations

import copy
import os
import sys

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(TREE)

from cdi import strictjson  # noqa: E402
from gpuruntime.errors import GpuRuntimeError  # noqa: E402
from gpuruntime.log import Log  # noqa: E402
from gpuruntime.oci import argv  # noqa: E402
from gpuruntime.oci.bundle import CONFIG_NAME, Bundle  # noqa: E402
from gpuruntime.plan import injection  # noqa: E402
from gpuruntime.shim import main as shim  # noqa: E402
from gpuruntime.shim.host import ShimHost  # noqa: E402
from gpuruntime.snapshots import config_snapshot  # noqa: E402
from gpuruntime.snapshots.grants import SavedGrants  # noqa: E402

CLI_PYTHON = os.path.join(TREE, ".venv", "bin", "python")


class Untouchable:
    """A machine that nothing may be asked of."""

    def __getattr__(self, name: str) -> None:
        """Fail: somebody wants to know something."""
        raise RuntimeError(f"{name} is asked of the machine")


def main() -> str | None:
    """Return what is wrong with passing on the create, None if nothing is."""
    command = argv.parse(sys.argv[2:])
    if not (command.understood and command.creates):
        return "no create that Python would understand"
    log = Log(None, json_format=False)
    saved = SavedGrants()
    config = config_snapshot.load(
        os.environ, lambda path: shim._compile(path, CLI_PYTHON, log), saved
    )
    config = shim.as_called(config, sys.argv[1])
    directory, name = os.path.split(command.config or "")
    bundle = Bundle(directory, name) if name else Bundle(command.bundle or "", CONFIG_NAME)
    try:
        document, _ = bundle.parse()
    except GpuRuntimeError:
        # No JSON: no runtime reads it.
        return None
    answer = os.environ.get("WATCHED_ANSWER")
    if answer is not None:
        host = ShimHost(config, CLI_PYTHON, sys.argv[1], log, saved)
        injection.decide(document, config, host).apply(document)
        wanted = strictjson.dumps(document, ascii_only=False).encode()
        with open(os.path.join(command.bundle or "", answer), "rb") as stream:
            return None if stream.read() == wanted else "the shim would write something else"
    before = copy.deepcopy(document)
    decided = injection.decide(document, config, Untouchable())  # type: ignore[arg-type]
    if decided.apply(document) or document != before:
        return "the shim would have changed config.json"
    return None


sys.exit(main())
