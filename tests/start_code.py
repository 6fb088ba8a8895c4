# SPDX-License-Identifier: Apache-2.0
"""The code that the launcher passes to Python, for programs that start Python as it does.

tests/launcher/test_interpreter.py compares it with what the launcher passes.
"""

from __future__ import annotations

DIRECTORY = "/gpuruntime/__pycache__"
MODULES = {"shim": "gpuruntime.shim.main", "hook": "hooks.entry"}
OPTIONS = {"shim": "", "hook": ",is_supervised=True"}
_CODE = """\
import sys;sys.path.append("{library}")
try:
 import marshal,_frozen_importlib_external as f
 library=sys.path[-1]
 with open(library+"{directory}/start-{role}."+sys.implementation.cache_tag,"rb") as s:b=s.read()
 if b[:4]==f.MAGIC_NUMBER:
  code,modules=marshal.loads(memoryview(b)[4:])
  exec(code,{{"modules":modules,"library":library}})
except Exception:pass
from {module} import main;main("{slow}"{options})"""


def code(library: object, role: str, slow: str = "") -> str:
    """Return the code that starts *role* from *library*, with *slow* as the CLI's interpreter."""
    names = {
        "directory": DIRECTORY,
        "role": role,
        "module": MODULES[role],
        "options": OPTIONS[role],
    }
    return _CODE.format(library=library, slow=slow, **names)
