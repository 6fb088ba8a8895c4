# SPDX-License-Identifier: Apache-2.0
"""A CDI spec without GPUs, and what a container with all its devices must see.

It contains what readers get wrong: strings that YAML 1.1 takes for something else, characters
that need an escape, nodes whose numbers are given in full, in part or not at all.
"""

from __future__ import annotations

import base64
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIND = "lab.example/sensor"
# Features that need CDI 0.7.0: a dot in the class, annotations, groups.
NEWER_KIND = "lab.example/sensor.v2"
NEWER_ANNOTATIONS = {"lab.example/on": "no", "lab.example/since": "2024-01-01"}
NEWER_EDITS = {"env": ["LAB_NEWER=yes"], "additionalGids": [4321]}
NEWER_SCRIPT = 'echo "$LAB_NEWER"; /bin/busybox id -G'
# A YAML 1.1 reader takes each, unquoted, for a number, a boolean, a date or null.
NAMES = (
    "y",
    "on",
    "null",
    "true",
    "7",
    "0x10",
    "0o7",
    "1_000",
    "1e3",
    "1.0",
    "1:30",
    "2024-01-01",
)
STRINGS = (
    *(*NAMES, "n", "no", "off", "~", "", " ", ".inf", "<<", "=", "-", "012", "+1", "1.50"),
    *("it's", 'a "quoted" word', "back\\slash \\n \\u0041", "a\ttab", "two\nlines\n", "cr\rend"),
    *("# comment", "a # comment", "a: b", "- item", "{x}", "[y]", "&anchor", "*alias", "!tag"),
    *("%d", "@at", "`tick`", "| text", "> text", "? key", "a=b=c", "/etc//x", " both ends "),
    *(
        "é",
        "\N{GRINNING FACE}",
        "日本",
        "\x7f",
        "\x85",
        "\u2028",
        "\ufeff",
        "\x1b[1m",
        "</script>",
    ),
)
# A device number without a driver: an open that the cgroup allows fails with ENXIO.
MAJOR = 195
ALLOWED = "No such device or address"
GIVEN = "/dev/lab/given"
REFUSED = "Operation not permitted"
READ_ONLY = "Read-only file system"
STAGES = (
    *("prestart", "createRuntime", "createContainer"),
    *("startContainer", "poststart", "poststop"),
)
HOOK_ENVIRONMENT = [f"LAB_HOOK_{index}={text}" for index, text in enumerate(STRINGS)]
# The hook writes its own argv, with argv[0], and its environment.
# It opens both before it starts another program, and through `self`: createContainer hooks are in
# the PID namespace of the container, while /proc is still that of the host.
_HOOK = (
    "b=/bin/busybox; exec 3</proc/self/cmdline 4</proc/self/environ; $b cat >/dev/null; "
    'for fd in 3 4; do $b base64 <&$fd | $b tr -d "\\n"; echo; done >"$1"'
)
_ODD_NAME = 'it\'s an \N{GRINNING FACE} \\ "odd" é name'


@dataclass(frozen=True)
class Lab:
    """Where the lab's files are on the host, below *work*."""

    work: Path

    @property
    def hooks(self) -> Path:
        """The directory where each hook writes its argv and environment."""
        return self.work / "lab" / "hooks"

    def prepare(self) -> None:
        """Create the files and nodes of the host, which must have its own /dev."""
        data = self.work / "lab" / _ODD_NAME
        data.mkdir(parents=True)
        (data / "file").write_text("of the directory")
        (self.work / "lab" / "single").write_text("of the file")
        (self.work / "lab" / "other").write_text("of the user")
        self.hooks.mkdir()
        # One hook runs in the container, as its user.
        self.hooks.chmod(0o777)
        for name, kind, mode, minor, owner in (
            ("lab0", stat.S_IFCHR, 0o640, 100, 3),
            ("lab1", stat.S_IFCHR, 0o606, 101, 0),
            ("lab2", stat.S_IFBLK, 0o600, 102, 0),
        ):
            os.mknod(f"/dev/{name}", kind, os.makedev(MAJOR, minor))
            os.chmod(f"/dev/{name}", mode)
            os.chown(f"/dev/{name}", owner, owner)
        os.mkfifo("/dev/lab-pipe")
        os.chmod("/dev/lab-pipe", 0o620)

    def devices(self) -> list[tuple[str, Any]]:
        """Return the name and edits of each device of the spec."""
        named = [(name, {"env": [f"LAB_NAME_{i}={name}"]}) for i, name in enumerate(NAMES)]
        return [*named, *self._others().items()]

    def common(self) -> Any:
        """Return the edits that come with any device, once."""
        return {"env": ["LAB_COMMON=yes", "LAB_TWICE=common"]}

    def _others(self) -> dict[str, Any]:
        lab = self.work / "lab"
        bind_ro = ["ro", "nosuid", "nodev", "bind"]
        return {
            "strings": {
                "env": [f"LAB_{i}={text}" for i, text in enumerate(STRINGS)]
                + ["LAB_TWICE=device", "LAB_TWICE=last"]
            },
            "mounts": {
                "mounts": [
                    _mount(lab / "single", "/lab/single", bind_ro),
                    _mount(lab / _ODD_NAME, f"/lab/{_ODD_NAME}", ["rbind", "ro"]),
                    _mount(lab / "hooks", "/lab/hooks", ["rw", "bind"]),
                    {**_mount("tmpfs", "/lab/tmp", ["size=65536", "mode=711"]), "type": "tmpfs"},
                ]
            },
            "nodes": {
                "deviceNodes": [
                    {"path": "/dev/full"},
                    {"path": "/dev/lab0"},
                    {"path": "/dev/lab/reads", "hostPath": "/dev/lab1", "permissions": "r"},
                    {"path": "/dev/lab/writes", "hostPath": "/dev/lab2", "permissions": "w"},
                    {"path": "/dev/lab-pipe"},
                    {
                        "path": GIVEN,
                        "type": "c",
                        "major": MAJOR,
                        "minor": 77,
                        "fileMode": 0o640,
                        "uid": 7,
                        "gid": 8,
                        "permissions": "rw",
                    },
                ]
            },
            "hooks": {"hooks": [self._hook(stage) for stage in STAGES]},
        }

    def _hook(self, stage: str) -> Any:
        return {
            "hookName": stage,
            "path": "/bin/busybox",
            "args": self.hook_arguments(stage),
            "env": HOOK_ENVIRONMENT,
            "timeout": 20,
        }

    def hook_arguments(self, stage: str) -> list[str]:
        """Return the argv of the hook of *stage*: the words it needs, then odd strings."""
        # A startContainer hook runs in the container, where the directory is mounted.
        place = "/lab/hooks" if stage == "startContainer" else str(self.hooks)
        return ["sh", "-c", _HOOK, "lab", f"{place}/{stage}", *STRINGS]

    def hooks_seen(self) -> dict[str, list[list[str]]]:
        """Return, by stage, the argv and the environment of the hooks, and remove their files."""
        hooks = {}
        for file in self.hooks.iterdir():
            hooks[file.name] = [_words(line) for line in file.read_text().splitlines()]
            file.unlink()
        return hooks


def names() -> list[str]:
    """Return the qualified names of all devices of the spec."""
    return [f"{KIND}={name}" for name, _ in Lab(Path("/")).devices()]


def script() -> str:
    """Return the script of a container with all devices; `parse` reads its output."""
    odd = f"/lab/{_ODD_NAME}"
    lines = [
        "b=/bin/busybox",
        'b64() { $b base64 | $b tr -d "\\n"; }',
        'tell() { echo "$1 $(b64)"; }',
        # The initial environment of the process: the shell changes its own variables.
        "tell environ </proc/1/environ",
        *(f"tell {name} <{shlex.quote(path)}" for name, path in _FILES.items()),
        *(
            f"(: >{shlex.quote(path)}) 2>&1 | tell {name}"
            for name, path in {
                "write-single": "/lab/single",
                "write-directory": f"{odd}/new",
                "write-tmp": "/lab/tmp/new",
            }.items()
        ),
        "$b grep ' /lab/tmp ' /proc/mounts | tell tmp",
    ]
    for path in NODES:
        word = path.rpartition("/")[2]
        lines += [
            f"$b stat -c '%F %t:%T %a %u:%g' {path} | tell node-{word}",
            *(
                f"(: {sign}{path}) 2>&1 | tell {way}-{word}"
                for way, sign in (("read", "<"), ("write", ">"))
                # Opening a pipe waits for the other end.
                if word != "lab-pipe"
            ),
        ]
    return "\n".join(lines)


_FILES = {"single": "/lab/single", "directory": f"/lab/{_ODD_NAME}/file"}


def parse(output: str) -> dict[str, str]:
    """Return the output of `script`, by name."""
    pairs = (line.partition(" ") for line in output.splitlines())
    return {name: base64.b64decode(text).decode() for name, _, text in pairs}


def assert_environment(seen: dict[str, str]) -> None:
    """Assert that the container's process has exactly the variables of the spec, in order."""
    environment = seen["environ"].split("\0")[:-1]
    assert [entry for entry in environment if entry.startswith("LAB_")] == [
        "LAB_COMMON=yes",
        "LAB_TWICE=last",
        *(f"LAB_NAME_{index}={name}" for index, name in enumerate(NAMES)),
        *(f"LAB_{index}={text}" for index, text in enumerate(STRINGS)),
    ]


def assert_nodes(seen: dict[str, str], *, host_modes: bool = False) -> None:
    """Assert that the container has the nodes, with the access that the spec allows.

    *host_modes*: without a mode in the spec, a node has the mode of the host, as in libraries
    since 1.1.0; otherwise the low-level runtime chooses the mode.
    """
    for path, (host_mode, facts, reads, writes) in _NODES_SEEN.items():
        word = path.rpartition("/")[2]
        mode = f"{host_mode if host_modes or path == GIVEN else 0o666:o}"
        assert seen[f"node-{word}"].strip() == facts.format(mode=mode)
        for way, expected in (("read", reads), ("write", writes)):
            if expected is not None:
                # The shell prints its own words before the error.
                assert seen[f"{way}-{word}"].strip().rpartition(": ")[2] == expected, path


# Mode on the host or in the spec; type, numbers (base 16) and owner; errors of read and write.
_NODES_SEEN = {
    "/dev/full": (0o666, "character special file 1:7 {mode} 0:0", "", ""),
    "/dev/lab0": (0o640, "character special file c3:64 {mode} 0:0", ALLOWED, ALLOWED),
    "/dev/lab/reads": (0o606, "character special file c3:65 {mode} 0:0", ALLOWED, REFUSED),
    "/dev/lab/writes": (0o600, "block special file c3:66 {mode} 0:0", REFUSED, ALLOWED),
    "/dev/lab-pipe": (0o620, "fifo 0:0 {mode} 0:0", None, None),
    GIVEN: (0o640, "character special file c3:4d {mode} 7:8", ALLOWED, ALLOWED),
}
NODES = frozenset(_NODES_SEEN)


def assert_mounts(seen: dict[str, str]) -> None:
    """Assert that the container has the mounts, and that it cannot write to read-only ones."""
    assert seen["single"] == "of the file"
    assert seen["directory"] == "of the directory"
    for name in ("write-single", "write-directory"):
        assert seen[name].strip().endswith(f": {READ_ONLY}")
    assert seen["write-tmp"] == ""
    assert {"size=64k", "mode=711"} <= set(seen["tmp"].split()[3].split(","))


def assert_hooks(seen: dict[str, list[list[str]]], lab: Lab) -> None:
    """Assert that the hooks of all stages ran, with their argv and environment exactly."""
    for stage in STAGES:
        argv, environment = seen[stage]
        assert argv == lab.hook_arguments(stage)
        # The initial environment: without the variables that the shell adds.
        assert environment == HOOK_ENVIRONMENT
    assert set(seen) == set(STAGES)


def _mount(source: object, target: str, options: list[str]) -> Any:
    return {"hostPath": str(source), "containerPath": target, "options": options}


def _words(line: str) -> list[str]:
    return base64.b64decode(line).decode().split("\0")[:-1]
