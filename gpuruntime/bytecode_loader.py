# SPDX-License-Identifier: Apache-2.0
"""Load the modules of a file that bytecode.py wrote; the first code of that file.

The code that the launcher passes to Python has read the file and compared the magic number. It
runs this module with two more names: *modules*, the contents of the file, and *library*, the
directory that they come from. After a failure, or if a source has changed, no module is loaded:
the imports that follow find the modules, or report what is wrong.
"""

from __future__ import annotations

import _frozen_importlib
import _imp
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

    # Name, and the name of its file, "" if it is part of the interpreter.
    _Native = tuple[str, str]
    _Entry = tuple[str, str, bool, tuple[int, int, int] | None, CodeType]

    modules: tuple[list[_Native], list[_Entry]] = ([], [])
    library = ""


def load_natives(natives: list[_Native]) -> None:
    """Load modules written in C, without the search that takes longer than most of them do.

    One that this interpreter does not have there is left to the import that needs it.
    """
    places = [place for place in sys.path if place.endswith("/lib-dynload")]
    for name, file in natives:
        if name in sys.modules or (file and not places):
            continue
        spec = _frozen_importlib.ModuleSpec(name, None, origin=file and f"{places[0]}/{file}")
        try:
            module = _imp.create_dynamic(spec) if file else _imp.create_builtin(spec)
            if module is not None:
                module.__spec__ = spec
                sys.modules[name] = module
                (_imp.exec_dynamic if file else _imp.exec_builtin)(module)
        except ImportError:
            sys.modules.pop(name, None)


def load(entries: list[_Entry], directory: str) -> None:
    """Load the modules of *entries* from *directory*, or none of them."""
    loaded = sys.modules
    module_type = type(sys)
    try:
        for _, path, _, stamp, _ in entries:
            if stamp is not None:
                status = posix.stat(f"{directory}/{path}")
                if stamp != (status.st_size, status.st_mtime_ns, status.st_ctime_ns):
                    return
        for name, path, is_package, _, code in entries:
            module = module_type(name)
            namespace = module.__dict__
            namespace["__file__"] = f"{directory}/{path}"
            parent, _, child = name.rpartition(".")
            namespace["__package__"] = name if is_package else parent
            if is_package:
                namespace["__path__"] = [f"{directory}/{path[: path.rindex('/')]}"]
            loaded[name] = module
            exec(code, namespace)  # noqa: S102 (what an import of the module does)
            if parent:
                setattr(loaded[parent], child, module)
    except BaseException:
        for entry in entries:
            loaded.pop(entry[0], None)
        raise


load_natives(modules[0])
# The process soon becomes another program, or ends. Until then it makes no cycles.
sys.modules["gc"].disable()
load(modules[1], library)
