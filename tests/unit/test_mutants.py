# SPDX-License-Identifier: Apache-2.0
"""META-01: the weaknesses that are put in on purpose can be, and the runner sees what it must.

That the suite catches them all is `make mutants`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import run, tree
from mutants.tree import PatchError

pytestmark = pytest.mark.catalogue("META-01")
PATCHES = sorted((tree.TREE / "tests" / "mutants").glob("*.patch"))
REVERSED = """\
--- a/a.txt
+++ b/a.txt
@@ -1 +1 @@
-one
+two
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files of this tree."""
    place = tmp_path_factory.mktemp("tree") / "files"
    tree.snapshot(place)
    return place


@pytest.fixture(scope="module")
def kept(copied: Path) -> dict[str, bytes]:
    """Return what is in each file of the copy."""
    files = [path for path in copied.rglob("*") if path.is_file()]
    return {str(path.relative_to(copied)): path.read_bytes() for path in files}


def test_there_are_enough() -> None:
    """One a class of weakness."""
    assert len(PATCHES) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("diff", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies_to_the_tree_as_it_is(
    copied: Path, kept: dict[str, bytes], diff: Path
) -> None:
    """Whoever changes the line has to change the patch."""
    changed = tree.patch(copied, diff)
    assert changed
    assert all((copied / name).read_bytes() != kept[name] for name in changed)
    for name in changed:
        (copied / name).write_bytes(kept[name])


def test_a_patch_that_does_not_apply_is_an_error(tmp_path: Path) -> None:
    """It is no patch that survived."""
    (tmp_path / "a.txt").write_text("three\n")
    diff = tmp_path / "x.patch"
    diff.write_text(REVERSED)
    with pytest.raises(PatchError):
        tree.patch(tmp_path, diff)
    diff.write_text("no patch at all\n")
    with pytest.raises(PatchError):
        tree.patch(tmp_path, diff)


@pytest.mark.parametrize("prefix", ["a/", ""])
def test_paths_with_and_without_a_prefix(tmp_path: Path, prefix: str) -> None:
    """As git and as diff write them."""
    (tmp_path / "a.txt").write_text("one\n")
    diff = tmp_path / "x.patch"
    diff.write_text(REVERSED.replace("a/a.txt", f"{prefix}a.txt").replace("b/", prefix))
    assert tree.patch(tmp_path, diff) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "two\n"


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("gpuruntime/launcher/launcher.c", "tests/launcher/test_hook_role.py"),
        ("hooks/entry.py", "tests/unit/hooks/test_plan.py"),
        ("gpuruntime/oci/bundle.py", "tests/unit/gpuruntime/oci/test_bundle.py"),
        ("gpuruntime/trusted_files.py", "tests/unit/gpuruntime/test_trusted_files.py"),
    ],
)
def test_the_likeliest_tests_are_first(changed: str, test: str) -> None:
    """And all the other quick ones run at last."""
    found = run.stages(tree.TREE, [changed], "", whole=False)
    assert test in found[0] + found[2]
    everything = [name for names in found for name in names]
    assert len(everything) == len(set(everything))
    assert set(map(str, (tree.TREE / "tests/unit").rglob("test_*.py"))) <= {
        str(tree.TREE / name) for name in everything
    }


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("filter-missing", "tests/unit/gpuruntime/system/test_seccomp.py"),
        ("hook-worker-holds-stderr", "tests/unit/hooks/test_worker.py"),
        ("annotations-unfiltered", "tests/unit/gpuruntime/request/test_request_table.py"),
    ],
)
def test_tests_that_speak_of_what_is_changed_are_first(name: str, test: str) -> None:
    """Also where no file has the name."""
    diff = (tree.TREE / "tests" / "mutants" / f"{name}.patch").read_text()
    (changed,) = (line[len("+++ b/") :] for line in diff.splitlines() if line.startswith("+++ "))
    assert test in run.stages(tree.TREE, [changed], diff, whole=False)[0]
