# SPDX-License-Identifier: Apache-2.0
"""The start path's bytecode in one file: the same modules, never older ones, or none."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import start_code
from startup.interpreters import ISOLATED, MINORS, found
from startup.test_imports import HOOK, WARM, of

from gpuruntime import bytecode, slowpath

TREE = Path(__file__).parents[2]
PYTHON = ("/usr/bin/python3",)
LOADED = {"shim": WARM, "hook": HOOK | of("gpuruntime.snapshots", "hook_log")}
# Runs in place of `main` and prints which of our modules there are, and which were imported.
REPORT = """
import sys
ours = [name for name in sys.modules if name.partition(".")[0] in ("cdi", "gpuruntime", "hooks")]
imported = [name for name in ours if sys.modules[name].__spec__ is not None]
print(" ".join(sorted(ours)))
print(" ".join(sorted(imported)))
print(getattr(sys.modules[MODULE], "MARK", ""))
sys.exit
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of our packages."""
    place = tmp_path_factory.mktemp("library")
    for package in ("cdi", "gpuruntime", "hooks"):
        shutil.copytree(
            TREE / package, place / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return place


def build(library: Path, *words: str, python: tuple[str, ...] = PYTHON) -> None:
    """Write the files for *python*."""
    program = str(library / "gpuruntime" / "bytecode.py")
    subprocess.run([*python, "-I", "-S", "-B", program, *words], check=True)


def file_of(library: Path, role: str) -> Path:
    """Return the file of *role* for the launcher's interpreter."""
    (path,) = (library / "gpuruntime" / "__pycache__").glob(f"start-{role}.*")
    return path


def start(
    library: Path, role: str, python: tuple[str, ...] = PYTHON
) -> tuple[set[str], set[str], str]:
    """Start *role*; return our modules, those that were imported, and MARK of the main one."""
    module = start_code.MODULES[role]
    report = REPORT.replace("MODULE", repr(module))
    loading = start_code.code(library, role).rpartition(f"from {module} import main")[0]
    code = f'{loading}import {module}\n{report}("")'
    done = subprocess.run(
        [*python, *ISOLATED, "-c", code, "x"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    ours, imported, mark = done.stdout.split("\n")[:3]
    return set(ours.split()), set(imported.split()), mark


@pytest.fixture
def own(library: Path, tmp_path: Path) -> Path:
    """Return a copy of the library that a test can change, with files for its sources."""
    place = tmp_path / "library"
    shutil.copytree(library, place, ignore=shutil.ignore_patterns("__pycache__"))
    build(place)
    return place


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("role", bytecode.ROLES)
def test_every_interpreter_loads_its_own_file(role: str, minor: int, library: Path) -> None:
    """With nothing imported; and the modules are those that the role's usual work needs."""
    python = found().get(minor)
    if python is None:
        pytest.skip(f"this machine has no Python 3.{minor}")
    build(library, "--unchecked", python=python)
    ours, imported, _ = start(library, role, python)
    assert imported == set()
    assert ours | {"gpuruntime.system"} == LOADED[role] | {"gpuruntime.system"}


@pytest.mark.parametrize("role", bytecode.ROLES)
def test_a_changed_source_is_the_one_that_runs(role: str, own: Path) -> None:
    """Also with the same length, and its time of modification set back."""
    source = own / (start_code.MODULES[role].replace(".", "/") + ".py")
    text = source.read_text() + '\nMARK = "1"\n'
    source.write_text(text)
    build(own)
    assert start(own, role)[1:] == (set(), "1")
    status = source.stat()
    source.write_text(text.replace('MARK = "1"', 'MARK = "2"'))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    ours, imported, mark = start(own, role)
    assert mark == "2"
    assert imported == ours
    build(own)
    assert start(own, role)[1:] == (set(), "2")


def test_a_source_that_is_gone_is_not_run(own: Path) -> None:
    """The import that follows says which one."""
    (own / "gpuruntime" / "record.py").unlink()
    code = start_code.code(own, "shim")
    done = subprocess.run([*PYTHON, *ISOLATED, "-c", code], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 1
    assert "No module named 'gpuruntime.record'" in done.stderr


@pytest.mark.parametrize("damage", ["empty", "magic number", "cut off", "no code", "missing"])
def test_a_file_of_no_use_is_passed_over(damage: str, own: Path) -> None:
    """That of another interpreter, or what is left of one: the modules are imported."""
    path = file_of(own, "shim")
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "magic number": b"\0\0\r\n" + data[4:],
            "cut off": data[: len(data) // 2],
            "no code": data[:4] + b"N",
            "missing": b"",
        }[damage]
    )
    if damage == "missing":
        path.unlink()
    ours, imported, _ = start(own, "shim")
    assert imported == ours
    assert "gpuruntime.shim.main" in ours


def test_a_module_that_fails_leaves_none(own: Path) -> None:
    """Half of the modules of a file and half of those of the sources would be a third program."""
    path = file_of(own, "shim")
    code = (
        f"import marshal\npath = {str(path)!r}\ndata = open(path, 'rb').read()\n"
        "loader, (natives, modules) = marshal.loads(data[4:])\n"
        "bad = compile('raise OSError(1)', 'bad', 'exec')\n"
        "modules = [(n, p, k, None, bad if n.endswith('injection') else c)\n"
        "           for n, p, k, s, c in modules]\n"
        "open(path, 'wb').write(data[:4] + marshal.dumps((loader, (natives, modules))))\n"
    )
    subprocess.run([*PYTHON, *ISOLATED, "-c", code], check=True)
    ours, imported, _ = start(own, "shim")
    assert imported == ours


def ask(library: Path, question: str) -> tuple[set[str], set[str]]:
    """Start the child of the slow path; return our modules, and those that were imported."""
    module = "gpuruntime.slowpath_server"
    code = slowpath.CODE.replace(f"from {module} import main;main()", f"import {module}")
    assert code != slowpath.CODE
    words = [sys.executable, "-I", "-B", "-X", "utf8", "-c"]
    report = REPORT.replace("MODULE", repr(module))
    done = subprocess.run(
        [*words, f"{code}\n{report}", question, "30", str(library)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours, imported = done.stdout.split("\n")[:2]
    return set(ours.split()), set(imported.split())


@pytest.mark.parametrize("question", bytecode.QUESTIONS)
def test_a_question_of_the_slow_path_is_loaded_in_one_piece(question: str, own: Path) -> None:
    """By the command line's interpreter; without a valid file the modules are imported."""
    build(own, "--slow-path", python=(sys.executable,))
    ours, imported = ask(own, question)
    assert {*bytecode.QUESTIONS[question]} <= ours
    assert imported == set()
    (own / "gpuruntime" / "errors.py").write_text("MARK = 1\n")
    ours, imported = ask(own, question)
    assert imported == ours
    assert "gpuruntime.slowpath_server" in ours


def test_two_files_of_the_same_sources_are_the_same(own: Path) -> None:
    """Packagers compare."""
    build(own, "--unchecked", "--as", "/usr/lib/gpuruntime")
    first = {role: file_of(own, role).read_bytes() for role in bytecode.ROLES}
    build(own, "--unchecked", "--as", "/usr/lib/gpuruntime")
    assert {role: file_of(own, role).read_bytes() for role in bytecode.ROLES} == first
    assert all(b"/usr/lib/gpuruntime/gpuruntime/errors.py" in data for data in first.values())
    assert all(os.fsencode(own) not in data for data in first.values())


@pytest.mark.parametrize(
    ("source", "lean"),
    [
        ('"""Says what it is."""\nX = 1', "pass\nX = 1"),
        ("from __future__ import annotations\nimport os", "import os"),
        ("if TYPE_CHECKING:\n    import os\nelse:\n    import re", "import re"),
        ("def f():\n    if TYPE_CHECKING:\n        import os", "def f():\n    pass"),
        ("if DEBUG:\n    import os", "if DEBUG:\n    import os"),
        ("x: int = 1\ny: str", "x = 1\npass"),
        (
            "def f(a: int, *b: str, c: int = 1, **d: T) -> str:\n    'Return.'",
            "def f(a, *b, c=1, **d):\n    pass",
        ),
        (
            "class A(B):\n    'A'\n    x: T = 1\n    def f(a):\n        'G'\n        y: T = 2",
            "class A(B):\n    pass\n    x = 1\n    def f(a):\n        pass\n        y = 2",
        ),
        ("f'text'\n'text of no docstring'", "f'text'\n'text of no docstring'"),
    ],
)
def test_what_has_no_effect_is_left_out(source: str, lean: str) -> None:
    """And nothing else: what is left is the same code, on the same lines."""
    tree = bytecode.Lean().visit(ast.parse(source))
    assert ast.unparse(tree) == ast.unparse(ast.parse(lean))


@pytest.mark.parametrize("head", ["class A(NamedTuple):", "@dataclass\nclass A:"])
def test_a_class_whose_annotations_are_fields_is_refused(head: str) -> None:
    """It would be without fields."""
    with pytest.raises(ValueError, match="class A: annotations are removed"):
        bytecode.Lean().visit(ast.parse(f"{head}\n    x: int\n"))
