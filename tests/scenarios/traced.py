# SPDX-License-Identifier: Apache-2.0
"""Start containers of hostile images with the hook under strace; print what came of each.

Standard output is one JSON object: attack → variant → what was seen. Variants of the LINK
attacks: `ENOSYS` and, of a few, `EPERM`, where openat2 answers so and the walk must do; the weak
hook that each beats is in hostile.py. Variants of ENV-08: `traced`, and one control for each thing
that the trace must show.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import hostile
import scenario

TRACE = "%file,mkdirat,mknodat,symlinkat,renameat,renameat2,unlinkat"
ERRORS = ("ENOSYS", "EPERM")
# Of an error it matters that the walk follows, which is the same walk then.
OF_EVERY_ERROR = ("link_01_usr_lib_absolute", "link_04_cache_climbs", "link_06_to_proc")
# A call, the descriptor that its path starts from if there is one, and the path.
CALL = re.compile(r'\d+ +(\w+)\((?:(AT_FDCWD|\d+), )?"((?:[^"\\]|\\.)*)"')
# These take no path to look up, or the text of a link first.
OTHERS = {"symlinkat", "symlink", "getcwd"}
WEAK_BY_PID = """
import json, os, sys
os.listdir("/proc/%d/root" % json.load(sys.stdin)["pid"])
"""
WEAK_BY_CWD = """
import os
os.stat("etc")
"""


def trace_hook(attack: hostile.Attack, log: Path, *options: str) -> None:
    """Put strace in front of the hook that the spec has now."""
    hook = attack.hook()
    tracer = ["strace", "-f", "-s", "4096", "-o", str(log), "-e", f"trace={TRACE}", *options, "--"]
    attack.use_hook("/usr/bin/strace", [*tracer, hook["path"], *hook["args"][1:]], ["A=b"])


def strays(lines: list[str], root: Path) -> dict[str, list[str]]:
    """Return the calls that look up a path which is relative, below *root*, or by process."""
    found: dict[str, list[str]] = {"relative": [], "below_root": [], "by_pid": []}
    for line in lines:
        match = CALL.match(line)
        if match is None or match[1] in OTHERS or match[2] not in (None, "AT_FDCWD"):
            continue
        path = match[3]
        if not path.startswith("/"):
            found["relative"].append(line)
        if path.startswith(f"{root}/"):
            found["below_root"].append(line)
        if re.match(r"/proc/\d", path):
            found["by_pid"].append(line)
    return found


def links_inside(attack: hostile.Attack) -> list[str]:
    """Return what links named like the driver's name in the root, wherever the image put them."""
    name = Path(hostile.CUDA_LINK).name
    found = [path for path in attack.root.rglob(name) if path.is_symlink()]
    return [str(path.readlink()) for path in found]


def observe(attack: hostile.Attack, log: Path) -> dict[str, object]:
    """Run the container; return what it came to and what the trace shows."""
    seen = hostile.observe(attack)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    opens = [line for line in lines if "openat2(" in line]
    return {
        **seen,
        "links_inside": links_inside(attack),
        "traced": len(lines),
        "injected": sum("(INJECTED)" in line for line in opens),
        "answered": sum("(INJECTED)" not in line for line in opens),
        **strays(lines, attack.root),
    }


def run_links(top: Path, pristine: Path, spec: str) -> dict[str, dict[str, object]]:
    """Run every LINK attack without openat2."""
    results: dict[str, dict[str, object]] = {}
    for prepare, _ in hostile.ATTACKS:
        name = prepare.__name__
        if not name.startswith("link"):
            continue
        seen = results[name] = {}
        for error in ERRORS if name in OF_EVERY_ERROR else ERRORS[:1]:
            hostile.SPEC.write_text(spec)
            work = top / f"{name}-{error}" / "work"
            work.mkdir(parents=True)
            attack = hostile.Attack(work, pristine)
            log = work.parent / "trace"
            prepare(attack)
            trace_hook(attack, log, "-e", f"inject=openat2:error={error}")
            seen[error] = observe(attack, log)
    return results


def run_modules(top: Path, pristine: Path, spec: str) -> dict[str, object]:
    """Run ENV-08 and look at every path that the hook looks up."""
    weak = {
        "traced": None,
        "control_module": ["-m", "json.tool", "/dev/null"],
        "control_strings": ["-I", str(hostile.HERE / "weak_hook.py")],
        "control_relative": ["-I", "-c", WEAK_BY_CWD],
        "control_pid": ["-I", "-c", WEAK_BY_PID],
    }
    seen: dict[str, object] = {}
    for variant, arguments in weak.items():
        hostile.SPEC.write_text(spec)
        work = top / f"env_08-{variant}" / "work"
        work.mkdir(parents=True)
        attack = hostile.Attack(work, pristine)
        log = work.parent / "trace"
        hostile.env_08_modules_in_the_way(attack)
        if arguments is not None:
            attack.use_hook("/usr/bin/python3", ["python3", *arguments], ["A=b"])
        trace_hook(attack, log)
        seen[variant] = observe(attack, log)
    return seen


def main() -> None:
    """Run every attack in every variant and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-traced-"))
    try:
        scenario.generate()
        spec = hostile.SPEC.read_text()
        pristine = scenario.make_bundle(top / "pristine", "0")
        results = run_links(top, pristine, spec)
        results["env_08"] = run_modules(top, pristine, spec)
        json.dump(results, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
