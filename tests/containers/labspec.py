# SPDX-License-Identifier: Apache-2.0
"""A CDI spec of no GPU, and what a container that has all its devices must see of it; pure.

It is made of what readers get wrong: strings that YAML 1.1 takes for something else, characters
that need an escape, nodes that are given in full, in part or not at all.
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
# Each is a number, a boolean, a date, nothing or another string to a reader of plain YAML.
NAMES = ("y", "on", "null", "true", "7", "0x10", "0o7", "1_000", "1e3", "1.0", "1:30", "2024-01-01")
STRINGS = (
    *(*NAMES, "n", "no", "off", "~", "", " ", ".inf", "<<", "=", "-", "012", "+1", "1.50"),
    *("it's", 'a "quoted" word', "back\\slash \\n \\u0041", "a\ttab", "two\nlines\n", "cr\rend"),
    *("# comment", "a # comment", "a: b", "- item", "{x}", "[y]", "&anchor", "*alias", "!tag"),
    *("%d", "@at", "`tick`", "| text", "> text", "? key", "a=b=c", "/etc//x", " both ends "),
    *("é", "\N{GRINNING FACE}", "日本", "\x7f", "\x85", "\u2028", "\ufeff", "\x1b[1m", "</script>"),
)
# Of a device that no driver is behind: opening it gives ENXIO, if the cgroup allows that.
MAJOR = 195
ALLOWED = "No such device or address"
REFUSED = "Operation not permitted"
READ_ONLY = "Read-only file system"
STAGES = (
    *("prestart", "createRuntime", "createContainer"),
    *("startContainer", "poststart", "poststop"),
)
HOOK_ENVIRONMENT = [f"LAB_HOOK_{index}={text}" for index, text in enumerate(STRINGS)]
# All that it was given, told by the process itself: its argv, with argv[0], and its environment.
_HOOK = (
    "b=/bin/busybox; $b cat >/dev/null; "
    'for part in cmdline environ; do $b base64 /proc/$$/$part | $b tr -d "\\n"; echo; done >"$1"'
)
_ODD_NAME = "it's an \N{GRINNING FACE} \\ \"odd\" é name"


@dataclass(frozen=True)
class Lab:
    """Where the lab's files are on the host, below *work*."""

    work: Path

    @property
    def hooks(self) -> Path:
        """The directory where each hook leaves what it was given."""
        return self.work / "lab" / "hooks"

    def prepare(self) -> None:
        """Make the host's files and nodes; on a host whose /dev is its own."""
        data = self.work / "lab" / _ODD_NAME
        data.mkdir(parents=True)
        (data / "file").write_text("of the directory")
        (self.work / "lab" / "single").write_text("of the file")
        self.hooks.mkdir()
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
        """Return each device of the spec, name and edits."""
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
                        **{"path": "/dev/lab/given", "type": "c", "major": MAJOR, "minor": 77},
                        **{"fileMode": 0o640, "uid": 7, "gid": 8, "permissions": "rw"},
                    },
                ]
            },
            "hooks": {"hooks": [self._hook(stage) for stage in STAGES]},
        }

    def _hook(self, stage: str) -> Any:
        # This one runs inside, where the directory is mounted.
        place = "/lab/hooks" if stage == "startContainer" else str(self.hooks)
        return {
            "hookName": stage,
            "path": "/bin/busybox",
            "args": hook_arguments(f"{place}/{stage}"),
            "env": HOOK_ENVIRONMENT,
            "timeout": 20,
        }

    def hooks_seen(self) -> dict[str, list[list[str]]]:
        """Return, by stage, the argv and the environment that the hooks were given."""
        found = {}
        for file in self.hooks.iterdir():
            found[file.name] = [_words(line) for line in file.read_text().splitlines()]
            file.unlink()
        return found


def hook_arguments(output: str) -> list[str]:
    """Return the argv of a hook that writes to *output*: odd strings behind what it needs."""
    return ["sh", "-c", _HOOK, "lab", output, *STRINGS]


def names() -> list[str]:
    """Return the qualified names of all devices of the spec."""
    return [f"{KIND}={name}" for name, _ in Lab(Path("/")).devices()]


def script() -> str:
    """Return the program of a container that has all devices: what it sees, as `parse` reads it."""
    odd = f"/lab/{_ODD_NAME}"
    lines = [
        "b=/bin/busybox",
        'b64() { $b base64 | $b tr -d "\\n"; }',
        'tell() { echo "$1 $(b64)"; }',
        # What the process was started with; a shell's own variables come and go.
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
    for path in _NODES:
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
_NODES = (
    *("/dev/full", "/dev/lab0", "/dev/lab/reads", "/dev/lab/writes", "/dev/lab-pipe"),
    "/dev/lab/given",
)


def parse(output: str) -> dict[str, str]:
    """Return what `script` told, by name."""
    pairs = (line.partition(" ") for line in output.splitlines())
    return {name: base64.b64decode(text).decode() for name, _, text in pairs}


def environment(seen: dict[str, str]) -> list[str]:
    """Return the variables of the container's first process."""
    return seen["environ"].split("\0")[:-1]


def _mount(source: object, target: str, options: list[str]) -> Any:
    return {"hostPath": str(source), "containerPath": target, "options": options}


def _words(line: str) -> list[str]:
    return base64.b64decode(line).decode().split("\0")[:-1]
