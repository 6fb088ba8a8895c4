# SPDX-License-Identifier: Apache-2.0
"""What runs as root below a rootfs uses descriptors, no path strings and nothing that runs data.

LINT-01 of the attack catalogue. Every rule is shown to catch a line that breaks it, and every
exception to be needed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
CHECKED = sorted(
    str(path.relative_to(TREE))
    for path in (*(TREE / "hooks").rglob("*.py"), *(TREE / "gpuruntime" / "system").rglob("*.py"))
)

# Modules that others consist of, under the names of those.
SAME = {("posix", "os"), ("_stat", "stat")}
BANNED_NAMES = {"open", "eval", "exec", "compile", "__import__", "input"}
BANNED_MODULES = {
    *("shutil", "glob", "tempfile", "subprocess", "pickle", "marshal", "yaml", "tarfile"),
    *("zipfile", "pathlib", "shelve", "importlib", "runpy", "fileinput", "pwd", "grp", "locale"),
}
BANNED_OF_OS = {
    *("walk", "fwalk", "system", "popen", "environ", "environb", "getenv", "getenvb", "putenv"),
    *("getcwd", "getcwdb", "chdir", "chroot", "getpid", "getppid", "listdir", "scandir"),
    *("makedirs", "removedirs", "renames", "remove", "fork", "startfile", "posix_spawn"),
}
BANNED_OF_PATH = {
    *("realpath", "abspath", "exists", "lexists", "isfile", "isdir", "islink", "ismount"),
    *("getsize", "getmtime", "samefile", "expanduser", "expandvars", "join"),
}
# os function → the keywords without which its path is looked up from the working directory.
NEEDS_DIRECTORY = {
    **dict.fromkeys(
        ("open", "mkdir", "mknod", "mkfifo", "unlink", "rmdir", "symlink", "readlink", "stat",
         "lstat", "chmod", "chown", "lchown", "utime", "access", "truncate", "setxattr"),
        ("dir_fd",),
    ),
    **dict.fromkeys(("rename", "replace", "link"), ("src_dir_fd", "dst_dir_fd")),
}  # fmt: skip
# A path of the process table by number: in a createContainer hook the numbers are not the host's.
PROC_NUMBER = re.compile(r"/proc/(?:$|%|\{|\d)")
# File, function and call: trusted paths of the host.
ALLOWED = {
    ("gpuruntime/system/paths.py", "__init__", "os.open(path, _O_DIRECTORY)"),
    ("gpuruntime/system/paths.py", "is_host_root", "os.stat('/')"),
    ("hooks/entry.py", "_detach", "os.open('/dev/null', os.O_WRONLY | os.O_CLOEXEC)"),
    (
        "hooks/entry.py",
        "_detach",
        "os.open('/proc/self/oom_score_adj', os.O_WRONLY | os.O_CLOEXEC)",
    ),
    # A prestart hook runs on the host, where the numbers of the state are those of /proc.
    ("hooks/prestart.py", "enter", "os.open(f'/proc/{pid}/ns/mnt', os.O_RDONLY | os.O_CLOEXEC)"),
    ("hooks/prestart.py", "enter", "os.stat('/')"),
    ("hooks/prestart.py", "enter", "os.open('/proc/self/ns/mnt', os.O_RDONLY | os.O_CLOEXEC)"),
    ("hooks/prestart.py", "enter", "'/proc/'"),
    # There it opens the log that the operator's config names, before it enters the container.
    ("hooks/debug_log.py", "_open", "os.open(path, _FLAGS, 384)"),
    # And where it finds the container's cgroup, and tells systemd, in the host's mount namespace.
    ("gpuruntime/system/device_grant.py", "_open", "open"),
    ("gpuruntime/system/device_grant.py", "_path_in", "open"),
    ("gpuruntime/system/device_grant.py", "_path_in", "'/proc/'"),
    (
        "gpuruntime/system/device_grant.py",
        "_open",
        "os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)",
    ),
    ("gpuruntime/system/scope.py", "path_of", "os.path.isdir(_BOOTED)"),
    ("gpuruntime/system/scope.py", "_run", "os.access(path, os.X_OK)"),
    ("gpuruntime/system/scope.py", "_run", "os.fork"),
    ("gpuruntime/system/scope.py", "_execute", "os.open('/dev/null', os.O_RDONLY)"),
    ("gpuruntime/system/scope.py", "_execute", "os.execve"),
    ("gpuruntime/system/bind.py", "execute", "os.path.lexists(self.host_path)"),
    ("hooks/prestart.py", "_load", "os.path.exists(path)"),
    (
        "gpuruntime/system/paths.py",
        "reopen",
        "os.open(f'/proc/self/fd/{fd}', flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)",
    ),
    (
        "gpuruntime/system/ops.py",
        "_masked_params",
        "os.open(PARAMS, os.O_RDONLY | os.O_CLOEXEC)",
    ),
    ("gpuruntime/system/ops.py", "_masked_params", "os.open(DEVICES, os.O_PATH | os.O_CLOEXEC)"),
    ("gpuruntime/system/paths.py", "require_proc", "os.open('/proc', _O_DIRECTORY)"),
    # By descriptor.
    ("gpuruntime/system/paths.py", "list_names", "os.scandir"),
    ("gpuruntime/system/paths.py", "change_mode", "os.chmod(f'/proc/self/fd/{fd}', mode)"),
    (
        "gpuruntime/system/paths.py",
        "_mount_id_in_proc",
        "os.open(f'/proc/self/fdinfo/{fd}', os.O_RDONLY | os.O_CLOEXEC)",
    ),
    ("gpuruntime/system/mounts.py", "_line_of", "open"),
    ("gpuruntime/system/mounts.py", "_listed", "open"),
    ("gpuruntime/system/replace.py", "_remove_leftovers", "os.scandir"),
    # The host's ldconfig, in its sandbox: paths of the host, and `.` and `/` on the way into it.
    ("gpuruntime/system/sandbox.py", "_sealed_copy", "os.open(path, os.O_PATH | os.O_CLOEXEC)"),
    ("gpuruntime/system/sandbox.py", "_run", "os.open('/dev/null', os.O_RDWR | os.O_CLOEXEC)"),
    ("gpuruntime/system/sandbox.py", "_be_child", "os.fork"),
    (
        "gpuruntime/system/sandbox.py",
        "_enter",
        "os.open('/', os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)",
    ),
    (
        "gpuruntime/system/sandbox.py",
        "_enter",
        "os.open('.', os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)",
    ),
    ("gpuruntime/system/sandbox.py", "_enter", "os.chroot"),
    ("gpuruntime/system/sandbox.py", "_execute", "os.execve"),
    # The file that the spec on the host names.
    (
        "hooks/state.py",
        "open_state",
        "os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)",
    ),
}


class Checker(ast.NodeVisitor):
    """Collects (function, source) of what is forbidden."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._function = "module"

    def _note(self, node: ast.AST) -> None:
        self.found.append((self._function, ast.unparse(node)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Remember which function this is."""
        before, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = before

    def visit_Import(self, node: ast.Import) -> None:
        """Refuse modules, and other names for those that are checked."""
        for name in node.names:
            is_renamed = name.asname and (name.name, name.asname) not in SAME
            if name.name.split(".")[0] in BANNED_MODULES or is_renamed:
                self._note(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Refuse modules, and names out of `os` that the other rules would not see."""
        module = (node.module or "").split(".")[0]
        if module in BANNED_MODULES | {"os", "posixpath", "io", "posix"}:
            self._note(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Refuse built-in functions, also under another name."""
        if node.id in BANNED_NAMES:
            self._note(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Refuse what is never right, called or not."""
        owner = ast.unparse(node.value)
        if owner == "os" and (
            node.attr in BANNED_OF_OS or node.attr.startswith(("exec", "spawn", "posix_spawn"))
        ):
            self._note(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Refuse a path without the directory that it is in."""
        owner, _, name = ast.unparse(node.func).rpartition(".")
        needed = NEEDS_DIRECTORY.get(name, ()) if owner == "os" else ()
        path_banned = owner in {"os.path", "posixpath"} and name in BANNED_OF_PATH
        if path_banned or set(needed) - {word.arg for word in node.keywords}:
            self._note(node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Refuse the process table by number."""
        value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
        if isinstance(value, str) and PROC_NUMBER.search(value):
            self._note(node)


def findings(source: str) -> list[tuple[str, str]]:
    """Return what *source* does that it must not."""
    checker = Checker()
    checker.visit(ast.parse(source))
    return checker.found


@pytest.mark.parametrize("name", CHECKED)
def test_lint_01_nothing_below_a_rootfs_is_a_string(name: str) -> None:
    """A path that is looked up twice is a race (CVE-2024-0132, CVE-2025-23359)."""
    found = {(name, *finding) for finding in findings((TREE / name).read_text())}
    assert found - ALLOWED == set()


def test_lint_01_every_exception_is_needed() -> None:
    """An exception that nothing needs any more is a hole for the next line."""
    found = {(name, *f) for name in CHECKED for f in findings((TREE / name).read_text())}
    assert found >= ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "open(path)", "f = open", "eval(text)", "exec(text)", "compile(text, '', 'exec')",
        "__import__(name)", "import shutil", "import os as o", "from os import path",
        "from posixpath import join", "from io import open", "import pickle", "import yaml",
        "import tarfile, json", "import subprocess", "import tempfile", "import glob",
        "import importlib.util", "from pathlib import Path", "os.walk(root)", "os.system(text)",
        "os.popen(text)", "os.environ", "os.getenv('HOME')", "os.getcwd()", "os.chdir('/x')",
        "os.getpid()", "os.listdir(path)", "os.scandir(path)", "os.makedirs(path)",
        "os.execv(path, [])", "os.posix_spawn(path, [], {})", "os.path.realpath(path)",
        "os.path.exists(path)", "os.path.join(root, path)", "posixpath.join(root, path)",
        "posixpath.islink(path)", "os.open(path, 0)", "os.mkdir(path)", "os.mkdir(path, 0o755)",
        "os.symlink(target, path)", "os.rename(one, other)", "os.replace(one, other)",
        "os.rename(one, other, src_dir_fd=fd)", "os.link(one, other, dst_dir_fd=fd)",
        "os.unlink(path)", "os.readlink(path)", "os.stat(path)", "os.lstat(path)",
        "os.chmod(path, 0)", "os.chown(path, 0, 0)", "os.mknod(path)", "os.access(path, 0)",
        "f'/proc/{pid}/root'", "'/proc/%d/root' % pid", "b'/proc/%d' % pid", "'/proc/1/root'",
        "'/proc/{}/ns'.format(pid)", "'/proc/' + str(pid)",
    ],
)  # fmt: skip
def test_lint_01_control_each_rule_catches_its_line(line: str) -> None:
    """A check that finds nothing in bad code finds nothing at all."""
    assert findings(f"def f():\n    {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "os.open(name, 0, dir_fd=fd)", "os.rename(a, b, src_dir_fd=fd, dst_dir_fd=fd)",
        "os.fstat(fd)", "f'/proc/self/fd/{fd}'", "posixpath.split(path)", "os.O_PATH",
        "root.open_path(path)", "os.read(fd, 1)", "'/proc/driver/nvidia/params'",
    ],
)  # fmt: skip
def test_lint_01_descriptors_are_not_caught(line: str) -> None:
    """What the rules forbid to everybody will be switched off."""
    assert findings(f"def f():\n    {line}\n") == []
