# SPDX-License-Identifier: Apache-2.0
"""The one door from the start path to expensive work: a child with the CLI's interpreter.

The child reads TOML and YAML and queries the driver; it answers in JSON (slowpath_server.py). The
process that becomes the low-level runtime is still the one that the engine started.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import errno

from cdi import strictjson
from gpuruntime import child_process
from gpuruntime.errors import DriverError, GpuRuntimeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
MAX_ANSWER_BYTES = 64 << 20
DEADLINE_S = 30
# The child has a deadline of its own, and says so; ours is for one that cannot.
_GRACE_S = 2
# For these, the driver's modules have work to do.
_OF_DRIVER = ("discover", "make-nodes")
# Not by -m, for which the interpreter loads a dozen modules that we do not need. bytecode.py puts
# the modules of a question into one file. Where that is not valid, they are imported.
CODE = """\
import sys
try:
 import marshal,_frozen_importlib_external as f
 library=sys.argv[3]
 name=f"{library}/gpuruntime/__pycache__/start-{sys.argv[1]}.{sys.implementation.cache_tag}"
 with open(name,"rb") as s:b=s.read()
 if b[:4]==f.MAGIC_NUMBER:
  code,modules=marshal.loads(memoryview(b)[4:])
  exec(code,{"modules":modules,"library":library})
except Exception:pass
from gpuruntime.slowpath_server import main;main()"""
_LIBRARY = __file__.rpartition("/")[0].rpartition("/")[0]
_HINT = 'run "{} -m gpuruntime.slowpath_server {}" to see why'


def ask(cli_python: str, question: str, argument: object, deadline_s: float = DEADLINE_S) -> Any:  # noqa: ANN401 (JSON)
    """Return the answer of `gpuruntime.slowpath_server` to *question* about *argument*.

    *cli_python* is the interpreter, or the words of its command with line feeds between. Raises
    GpuRuntimeError if that cannot be started or gives no answer, DriverError if the driver is
    asked and takes longer than *deadline_s*: then the child is killed.
    """
    words = cli_python.split("\n")
    command = " ".join(words)
    arguments = [
        *(*words, "-I", "-B", "-X", "utf8", "-c", CODE),
        *(question, f"{deadline_s:g}", _LIBRARY),
    ]
    data = strictjson.dumps(argument).encode()
    try:
        child = child_process.spawn(words[0], arguments, ENVIRONMENT, data)
    except OSError as error:
        hint = 'run "make setup" or install gpuruntime again'
        if error.errno == errno.EMFILE:
            hint = "let the engine have more open files: RLIMIT_NOFILE"
        raise GpuRuntimeError(f'cannot start "{command}": {error.strerror}', hint) from error
    outcome = child.finish(deadline_s + _GRACE_S, MAX_ANSWER_BYTES)
    # Where the child was late and ended by its own deadline, that is its status.
    if (
        outcome.how in (child_process.LATE, child_process.STUCK)
        or outcome.status == -_signal.SIGALRM
    ):
        raise _late(command, question, deadline_s)
    try:
        # More than the limit ends in the middle, which is not JSON.
        return strictjson.loads(outcome.output)
    except ValueError:
        raise GpuRuntimeError(
            f'"{command}" did not answer the question "{question}"',
            _HINT.format(command, question),
        ) from None


def _late(command: str, question: str, deadline_s: float) -> GpuRuntimeError:
    if question in _OF_DRIVER:
        from gpuruntime import remedies  # noqa: PLC0415 (only on the failing way)

        return DriverError(f"the driver did not answer in {deadline_s:g} s", remedies.CHECK_LOG)
    return GpuRuntimeError(
        f'"{command}" did not answer the question "{question}" in {deadline_s:g} s',
        _HINT.format(command, question),
    )
