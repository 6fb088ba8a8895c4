# SPDX-License-Identifier: Apache-2.0
"""Write the bytecode of the start path into one file for each role.

    python bytecode.py [--slow-path] [--unchecked] [--as DIRECTORY]

writes the files of the library that this program is in, for the interpreter that runs it. With
--slow-path, these are the files of the slow path's questions, whose interpreter is that of the
command line. With --as, tracebacks name the modules by their paths in DIRECTORY.

The launcher's Python reads the file of its role in one piece, and the child of the slow path that
of its question. The alternative is to find, read and check thirty to fifty modules one by one,
which they do if there is no valid file.

A file begins with the magic number of the interpreter, as all bytecode does. The rest is
marshalled: the code of bytecode_loader.py, the modules written in C that the others import, and
these in the order in which they are loaded.
A file is valid while the sources of these modules are unchanged. With --unchecked the sources are
not compared, as with the other bytecode of an installed tree. The files are in
gpuruntime/__pycache__, and are removed together with that directory.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import marshal
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, ModuleType

# Role → the modules that its usual work loads, besides those that these import.
ROLES = {
    "shim": ("gpuruntime.shim.main", "gpuruntime.shim.host", "gpuruntime.atomic_replace"),
    "hook": ("hooks.entry",),
}
# Question of gpuruntime.slowpath_server → the same.
QUESTIONS = {
    "config": ("gpuruntime.slowpath_server", "gpuruntime.configfile.compilation"),
    "discover": (
        *("gpuruntime.slowpath_server", "gpuruntime.probes", "gpuruntime.discover.fingerprint"),
        "gpuruntime.snapshots.inventory_json",
    ),
}
LOADER = "gpuruntime/bytecode_loader.py"
_OURS = ("cdi", "gpuruntime", "hooks")
_GUARD = "TYPE_CHECKING"
_NO_COLUMN = -1
# Bases and decorators for which annotations are fields.
_DECLARED = {"NamedTuple", "TypedDict", "dataclass"}


def path_of(library: str, role: str, tag: str | None = sys.implementation.cache_tag) -> str:
    """Return the path of the file of a role or question, for interpreters with *tag*."""
    return os.path.join(library, "gpuruntime", "__pycache__", f"start-{role}.{tag}")


def content(library: str, role: str, *, shown: str, is_checked: bool) -> bytes:
    """Return the file of *role*, or question, for the modules in *library*.

    Messages call the library *shown*.
    """
    modules = []
    natives = {"gc": ""}
    for module in _loaded({**ROLES, **QUESTIONS}[role]):
        source = str(module.__file__)
        path = os.path.relpath(source, library)
        # Before it is read: a change while we read is one that the loader sees.
        stamp = _stamp(source) if is_checked else None
        tree = _lean(source)
        natives.update(_natives(tree))
        code = _compiled(tree, os.path.join(shown, path))
        modules.append((module.__name__, path, hasattr(module, "__path__"), stamp, code))
    loader = _compiled(_lean(os.path.join(library, LOADER)), os.path.join(shown, LOADER))
    return importlib.util.MAGIC_NUMBER + marshal.dumps((loader, ([*natives.items()], modules)))


class Lean(ast.NodeTransformer):
    """Removes what has no effect at run time: annotations, docstrings, columns, types' imports."""

    def visit(self, node: ast.AST) -> ast.AST:
        """Remove the columns of *node*; its line stays, which an error report names."""
        if isinstance(node, (ast.expr, ast.stmt)):
            node.col_offset = node.end_col_offset = _NO_COLUMN
            node.end_lineno = node.lineno
        result: ast.AST = super().visit(node)
        return result

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        """Remove imports from __future__, which would load that module."""
        return None if node.module == "__future__" else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """Remove what is for type checkers."""
        self.generic_visit(node)
        is_guard = isinstance(node.test, ast.Name) and node.test.id == _GUARD
        return (node.orelse or ast.copy_location(ast.Pass(), node)) if is_guard else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Remove the annotation of a parameter."""
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Turn a declaration into the assignment in it, or into nothing."""
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Remove the docstring, and the annotation of what is returned."""
        node.returns = None
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Remove the docstring; raise ValueError if annotations declare fields of the class."""
        names = {n.id for n in (*node.bases, *node.decorator_list) if isinstance(n, ast.Name)}
        if names & _DECLARED:
            raise ValueError(f"class {node.name}: annotations are removed")
        return self._without_docstring(node)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Remove the docstring."""
        return self._without_docstring(node)

    def _without_docstring(self, node: ast.FunctionDef | ast.ClassDef | ast.Module) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
        return self.generic_visit(node)


def _loaded(names: Iterable[str]) -> list[ModuleType]:
    """Import *names* anew; return our modules in the order in which their code has ended."""
    for name in [*filter(_is_ours, sys.modules)]:
        del sys.modules[name]
    loaded: list[ModuleType] = []
    execute = SourceFileLoader.exec_module

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        execute(self, module)
        loaded.append(module)

    SourceFileLoader.exec_module = exec_module  # type: ignore[assignment,method-assign]
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        SourceFileLoader.exec_module = execute  # type: ignore[method-assign]
    return [module for module in loaded if _is_ours(module.__name__)]


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in _OURS


def _stamp(path: str) -> tuple[int, int, int]:
    """Return what changes with a source; bytecode_loader.py compares it."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _lean(path: str) -> ast.Module:
    """Return the syntax tree of the source *path*, without what has no effect."""
    with open(path, "rb") as stream:
        tree = ast.parse(stream.read())
    Lean().visit(tree)
    return tree


def _natives(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """Yield the modules written in C that *tree* imports at once: name, file ("": built in)."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name in sys.builtin_module_names:
                yield name, ""
            elif not _is_ours(name):
                origin = str(getattr(importlib.util.find_spec(name), "origin", None))
                if origin.endswith(tuple(EXTENSION_SUFFIXES)):
                    yield name, os.path.basename(origin)


def _compiled(tree: ast.Module, shown: str) -> CodeType:
    """Return the code of *tree*, whose annotations are not evaluated."""
    code: CodeType = compile(tree, shown, "exec", dont_inherit=True)
    return code


def _replace(path: str, data: bytes) -> None:
    """Put *data* into the file *path*; at no moment is there half of it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "wb") as stream:
        stream.write(data)
    os.rename(temporary, path)


def main() -> None:
    """Write a file for each role, or for each question."""
    words = sys.argv[1:]
    library = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    shown = words[words.index("--as") + 1] if "--as" in words else library
    is_checked = "--unchecked" not in words
    sys.path.append(library)
    for role in QUESTIONS if "--slow-path" in words else ROLES:
        _replace(
            path_of(library, role), content(library, role, shown=shown, is_checked=is_checked)
        )


if __name__ == "__main__":
    main()
