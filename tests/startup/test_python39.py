# SPDX-License-Identifier: Apache-2.0
"""The start path and the hooks run on Python 3.9, which is what GPU nodes have."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
COLD = {
    *(
        "cdi/advice.py",
        "cdi/annotations.py",
        "cdi/conflicts.py",
        "cdi/diff.py",
        "cdi/generate.py",
        "cdi/inject.py",
    ),
    *("cdi/reasons.py", "cdi/store.py", "cdi/transform.py", "cdi/validate.py", "cdi/wire.py"),
    *("cdi/yaml_text.py", "cdi/yamlio.py"),
    *("gpuruntime/__main__.py", "gpuruntime/formats/toml_source.py"),
    "gpuruntime/slowpath_server.py",
}
COLD_PACKAGES = {
    *("gpuruntime/cli", "gpuruntime/cli/checks", "gpuruntime/configfile"),
    *("gpuruntime/discover", "gpuruntime/engines", "gpuruntime/image"),
}
# Methods and functions that came after 3.9, by name.
TOO_NEW = {"pairwise", "bit_count", "aiter", "anext", "add_note", "batched"}


def start_path() -> list[str]:
    """Return the modules of the start path and the hooks, as paths in the tree."""
    paths = [
        str(path.relative_to(TREE))
        for package in ("cdi", "gpuruntime", "hooks")
        for path in sorted((TREE / package).rglob("*.py"))
    ]
    return [p for p in paths if p not in COLD and p.rpartition("/")[0] not in COLD_PACKAGES]


def problems(source: str) -> list[str]:
    """Return what in *source* Python 3.9 cannot parse or would not evaluate."""
    try:
        tree = ast.parse(source, feature_version=(3, 9))
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    found = []
    postponed = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )
    annotated = (ast.AnnAssign, ast.FunctionDef)
    if any(isinstance(node, annotated) for node in ast.walk(tree)) and not postponed:
        found.append("no `from __future__ import annotations`")
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Match):
            found.append(f"line {line}: match")
        elif isinstance(node, ast.Attribute) and node.attr in TOO_NEW:
            found.append(f"line {line}: {node.attr} is newer than 3.9")
        elif isinstance(node, ast.Call):
            found += [
                f"line {line}: {k.arg}= is newer than 3.9"
                for k in node.keywords
                if k.arg == "strict"
            ]
            if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                found += [
                    f"line {line}: X | Y at run time"
                    for part in ast.walk(node.args[1])
                    if isinstance(part, ast.BinOp)
                ]
    return found + _union_aliases(tree)


def _union_aliases(tree: ast.Module) -> list[str]:
    """Return the module-level assignments of `X | Y` between names: aliases of types."""
    return [
        f"line {node.lineno}: X | Y at run time"
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.BitOr)
        and any(_is_type(part) for part in ast.walk(node.value))
    ]


def _is_type(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is None
    names = ("str", "int", "bytes", "bool", "float", "dict", "list", "tuple", "set", "object")
    return isinstance(node, ast.Name) and node.id in names


@pytest.mark.parametrize("path", start_path())
def test_the_start_path_is_written_for_python_39(path: str) -> None:
    """A node with Python 3.9 must not fail every GPU container with a SyntaxError."""
    assert problems((TREE / path).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "match 1:\n    case 1: pass\n",
        "x: int | None = None\n",
        "from __future__ import annotations\nAlias = str | None\n",
        "from __future__ import annotations\nisinstance(1, int | str)\n",
        "from __future__ import annotations\nzip([], [], strict=True)\n",
        "try: pass\nexcept* OSError: pass\n",
        "from __future__ import annotations\n(1).bit_count()\n",
    ],
)
def test_newer_python_is_seen(source: str) -> None:
    """The control: each of these works in the Python of the tests and not in 3.9."""
    assert problems(source) != []


def test_the_list_has_both_halves() -> None:
    """A moved directory must not empty the test."""
    assert {"gpuruntime/shim/main.py", "hooks/entry.py", "cdi/registry.py"} <= set(start_path())
    assert all((TREE / path).is_file() for path in COLD)
    assert sys.version_info >= (3, 11)
