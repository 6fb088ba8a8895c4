# SPDX-License-Identifier: Apache-2.0
"""Which Python is started: the build's, or that of a file beside the launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import start_code
from launcher.test_choice_of_runtime import swap

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.conftest import Bench, Outcome

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")
NAMES = pytest.mark.parametrize("name", ["gpu-container-runtime", "gpu-cdi-hook"])
ROLES = {"gpu-container-runtime": "shim", "gpu-cdi-hook": "hook"}
ISOLATED = ["-I", "-S", "-B", "-X", "utf8", "-c"]
HINT = 'install gpuruntime again, or correct "launcher.interpreter" beside the launcher'
TEXT = """\
gpuruntime-interpreter 1
library @/lib
python @/python/loader
python --library-path
python @/python/lib:@/python/more:/usr/lib@
python @/python/bin/python3
slow @/python/slow
slow -s
end
"""


class Tree:
    """A directory with a launcher of its own, which can be anywhere."""

    def __init__(self, bench: Bench, build: str = "plain") -> None:
        self.bench = bench
        self.place = bench.path("other/tree")
        self.place.mkdir()
        shutil.copy(bench.workshop.build(build) / "launcher", self.place / "launcher")
        for name in ROLES:
            (self.place / name).symlink_to("launcher")
        self.file = self.place / "launcher.interpreter"

    def write(self, text: str | bytes) -> None:
        """Write the file beside the launcher."""
        self.file.write_bytes(text.encode() if isinstance(text, str) else text)
        self.file.chmod(0o644)

    def start(self, name: str, **how: Any) -> Outcome:
        """Have Python started."""
        return self.bench.start([str(self.place / name), "create", "c1"], **how)

    def refused(self, name: str, reason: str) -> bool:
        """Return whether the file is refused for *reason*; asserts that nothing was started."""
        outcome = self.start(name)
        assert (outcome.returncode, outcome.who, outcome.stdout) == (127, None, b"")
        return outcome.stderr.decode() == (
            f'{name}: runtime: cannot use "{self.file}": {reason}\nhint: {HINT}\n'
        )


@pytest.fixture
def tree(bench: Bench) -> Tree:
    """Return a tree with a Python of its own that records."""
    made = Tree(bench)
    for name in ("loader", "bin/python3", "slow"):
        bench.put(f"other/tree/python/{name}")
    return made


@pytest.fixture(params=["plain", "twin"])
def either(bench: Bench, request: pytest.FixtureRequest) -> Tree:
    """Return a tree, also with the launcher that the sanitisers watch."""
    if request.param == "twin":
        request.getfixturevalue("twin")
    made = Tree(bench, request.param)
    bench.put("other/tree/python/loader")
    return made


def code(tree: Tree, name: str, slow: str) -> str:
    """Return what Python is to run."""
    return start_code.code(f"{tree.place}/lib", ROLES[name], slow)


@NAMES
def test_a_file_beside_the_launcher_names_the_interpreter(name: str, tree: Tree) -> None:
    """For a tree with its own Python, loader and C library, wherever it lies."""
    tree.write(TEXT)
    outcome = tree.start(name)
    assert outcome.who == "other/tree/python/loader"
    words = [os.fsdecode(word) for word in outcome.record.arguments]
    place = tree.place
    assert words[:4] == [
        *(f"{place}/python/loader", "--library-path"),
        *(f"{place}/python/lib:{place}/python/more:/usr/lib@", f"{place}/python/bin/python3"),
    ]
    assert words[4:11] == [*ISOLATED, code(tree, name, rf"{place}/python/slow\n-s")]
    assert words[-3:] == [f"{place}/{name}", "create", "c1"]


@NAMES
def test_without_words_of_its_own_the_slow_path_has_the_same(name: str, tree: Tree) -> None:
    """One interpreter is enough where it has both."""
    text = "".join(line for line in TEXT.splitlines(keepends=True) if "slow" not in line)
    tree.write(text)
    place = tree.place
    joined = (
        rf"{place}/python/loader\n--library-path\n{place}/python/lib:{place}/python/more:"
        rf"/usr/lib@\n{place}/python/bin/python3"
    )
    assert tree.start(name).record.arguments[10].decode() == code(tree, name, joined)


def test_the_place_is_that_of_the_program_itself(tree: Tree) -> None:
    """Engines know it by a link that is elsewhere; its argv[0] is anybody's."""
    tree.write(TEXT)
    link = tree.bench.path("other/gpu-cdi-hook")
    link.symlink_to(tree.place / "launcher")
    for command in (str(link), "gpu-cdi-hook", "/nowhere/gpu-cdi-hook"):
        outcome = tree.bench.start([command], program=str(link))
        assert outcome.who == "other/tree/python/loader"


def test_a_tree_may_be_moved(tree: Tree) -> None:
    """Nothing in it has its own path."""
    tree.write(TEXT)
    tree.place = tree.place.rename(tree.bench.path("other/moved"))
    assert tree.start("gpu-cdi-hook").who == "other/moved/python/loader"


def test_a_call_that_is_passed_on_does_not_look_for_it(tree: Tree) -> None:
    """It would cost each of them, and a broken file would stop them all."""
    tree.write("broken")
    words = [str(tree.place / "gpu-container-runtime"), "state", "c1"]
    assert tree.bench.start(words).who == "lowlevel/runc"


def test_most_words_fit_and_one_more_does_not(either: Tree) -> None:
    """Each needs room in front of the arguments."""
    python = [f"python @/python/{name}\n" for name in ("loader", *map(str, range(15)))]
    lines = ["gpuruntime-interpreter 1\n", "library /l\n"]
    either.write("".join([*lines, *python, "slow /s\n", "end\n"]))
    outcome = either.start("gpu-container-runtime")
    assert len(outcome.record.arguments) == 16 + 6 + 1 + 2 + 3
    either.write("".join([*lines, *python, "python x\n", "slow /s\n", "end\n"]))
    assert either.refused("gpu-container-runtime", "not in the format that is documented")


MALFORMED: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "other-version": swap("interpreter 1", "interpreter 2"),
    "longer-version": swap("interpreter 1", "interpreter 12"),
    "no-library": swap("library @/lib\n", ""),
    "two-libraries": swap("library @/lib\n", "library @/lib\nlibrary @/lib\n"),
    "no-python": lambda text: "".join(
        line for line in text.splitlines(keepends=True) if "python" not in line.split()[0]
    ),
    "python-behind-slow": swap("end\n", "python x\nend\n"),
    "relative-library": swap("library @/lib", "library lib"),
    "relative-python": swap("python @/python/loader", "python loader"),
    "relative-slow": swap("slow @/python/slow", "slow slow"),
    "empty-library": swap("library @/lib", "library "),
    "empty-word": swap("python --library-path", "python "),
    "quotation-mark": swap("@/lib\n", '@/lib";x="\n'),
    "backslash": swap("@/lib\n", "@/lib\\\n"),
    "control": swap("@/lib\n", "@/lib\x1b\n"),
    "beyond-ascii": swap("@/lib\n", "@/libé\n"),
    "no-end": swap("end\n", ""),
    "end-without-line-feed": swap("end\n", "end"),
    "behind-the-end": swap("end\n", "end\n\n"),
    "cut": lambda text: text[: len(text) // 2],
    "nul": swap("slow -s", "slow -s\0"),
    "unknown-line": swap("end\n", "prefix /x\nend\n"),
    "line-feeds-of-windows": lambda text: text.replace("\n", "\r\n"),
    "too-much-when-expanded": swap("@/python/lib:", f"{'@/' * 1500}:"),
    "too-much-for-the-slow-path": swap("slow -s", f"slow {'@/' * 1500}"),
}


@NAMES
@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_an_error_and_no_other_interpreter(
    change: Callable[[str], str], name: str, either: Tree
) -> None:
    """Another Python may be another version, or a stranger's."""
    either.write(TEXT)
    assert either.start(name).who == "other/tree/python/loader"
    either.write(change(TEXT))
    assert either.refused(name, "not in the format that is documented")


@NAMES
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("link", "a link"),
        ("fifo", "not a regular file"),
        ("directory", "not a regular file"),
        ("large", "too long"),
        ("group-writable", "others than root may write it, or its directory"),
        ("other-writable", "others than root may write it, or its directory"),
        ("directory-writable", "others than root may write it, or its directory"),
        pytest.param(
            *("foreign", "others than root may write it, or its directory"), marks=ROOT_ONLY
        ),
        pytest.param(
            *("directory-foreign", "others than root may write it, or its directory"),
            marks=ROOT_ONLY,
        ),
    ],
)
def test_a_file_that_others_may_have_written_is_an_error(
    spoil: str, reason: str, name: str, either: Tree
) -> None:
    """It decides what runs as root."""
    either.write(TEXT)
    if spoil == "link":
        either.file.symlink_to(either.file.rename(either.place / "real"))
    elif spoil == "fifo":
        either.file.unlink()
        os.mkfifo(either.file)
    elif spoil == "directory":
        either.file.unlink()
        either.file.mkdir()
    elif spoil == "large":
        either.write(TEXT.replace("-s", "-s" * 4000))
    elif spoil == "group-writable":
        either.file.chmod(0o664)
    elif spoil == "other-writable":
        either.file.chmod(0o646)
    elif spoil == "directory-writable":
        either.place.chmod(0o777)
    elif spoil == "foreign":
        os.chown(either.file, 1234, -1)
    elif spoil == "directory-foreign":
        os.chown(either.place, 1234, -1)
    assert either.refused(name, reason)


def test_a_tree_at_a_path_that_python_could_misread_is_an_error(tree: Tree) -> None:
    """The path becomes part of what Python runs."""
    tree.place = tree.place.rename(tree.bench.path('other/a"b'))
    tree.file = tree.place / "launcher.interpreter"
    tree.write(TEXT)
    outcome = tree.start("gpu-cdi-hook")
    assert (outcome.returncode, outcome.who) == (127, None)
    assert b"not in the format that is documented\nhint: " in outcome.stderr


@pytest.mark.parametrize(("spoil", "status"), [("missing", 127), ("denied", 126)])
def test_an_interpreter_of_the_file_that_cannot_be_executed_is_named(
    spoil: str, status: int, tree: Tree
) -> None:
    """With the hint that fits the file."""
    tree.write(TEXT)
    loader = tree.place / "python" / "loader"
    if spoil == "missing":
        loader.unlink()
    else:
        loader.chmod(0o644)
    outcome = tree.start("gpu-cdi-hook")
    assert (outcome.returncode, outcome.who) == (status, None)
    assert outcome.stderr.decode().startswith(
        f'gpu-cdi-hook: runtime: cannot execute "{loader}": '
    )
    assert outcome.stderr.decode().endswith(f"\nhint: {HINT}\n")


@ROOT_ONLY
@NAMES
def test_without_proc_nobody_guesses_which_it_is(name: str, tree: Tree) -> None:
    """There might be a file that says so."""
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-euc"),
            # Another /proc may be below it.
            *('mount -t tmpfs none /proc; exec "$0" create', str(tree.place / name)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    reason = 'cannot read the link "/proc/self/exe": no such file or directory'
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == f"{name}: runtime: {reason}\nhint: mount /proc\n"


@ROOT_ONLY
@pytest.mark.parametrize(
    ("user", "owner", "believed"),
    [
        # root of the namespace is not root of the host, whose files have the overflow id.
        ((*("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"),), 0, True),
        # Where the host's root is mapped, that number is somebody's.
        ((), 65534, False),
    ],
)
def test_files_of_the_host_s_root_are_believed_in_a_user_namespace_without_him(
    user: tuple[str, ...], owner: int, believed: bool, bench: Bench
) -> None:
    """Rootless engines call the hook in a user namespace."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copy(bench.workshop.build("plain") / "launcher", place / "gpu-cdi-hook")
        file = place / "launcher.interpreter"
        file.write_text("gpuruntime-interpreter 1\nlibrary /l\npython /bin/true\nend\n")
        file.chmod(0o644)
        place.chmod(0o755)
        for path in (place, file):
            os.chown(path, owner, -1)
        done = subprocess.run(
            [*user, "unshare", "--user", "--map-root-user", str(place / "gpu-cdi-hook")],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        os.chown(place, 0, -1)
    reason = "others than root may write it, or its directory"
    expected = f'gpu-cdi-hook: runtime: cannot use "{file}": {reason}\nhint: {HINT}\n'
    assert (done.returncode, done.stderr) == ((0, "") if believed else (127, expected))
