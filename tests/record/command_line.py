# SPDX-License-Identifier: Apache-2.0
"""The command line: help, refusals, nvidia-container-cli, nodes and links, hooks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from creates import container
from recorder import BUNDLE, DATA, WORK, Recorder
from requested import VISIBLE


def help_texts(recorder: Recorder) -> None:
    """`--help` of every command, as far as they name each other, and `--version`."""
    for program in ("gpuruntime", "nvidia-ctk", "nvidia-container-cli"):
        _help(recorder, program, ())
        recorder.call(f"version/{program}", WORK / "bin" / program, "--version")
    hooks = ("gpu-cdi-hook", "gpu-container-runtime-hook", "gpu-container-runtime")
    for program in hooks:
        for word in ("--help", "--version", "-h", "help"):
            recorder.call(f"help/{program}/{word}", recorder.program(program), word)
    names = sorted(path.name for path in (WORK / "bin").iterdir())
    for path in [*(WORK / "bin" / name for name in names), WORK / "launched/nvidia-ctk"]:
        for word in ("--help", "--version", "-version"):
            recorder.call(f"names/{path.parent.name}-{path.name}/{word}", path, word)


def _help(recorder: Recorder, program: str, words: tuple[str, ...]) -> None:
    case = "/".join(("help", program, *words))
    recorder.call(f"{case}/--help", WORK / "bin" / program, *words, "--help")
    text = (recorder.out / case / "--help" / "stdout").read_text()
    commands = commands_of(text)
    if not commands:
        recorder.call(f"{case}/--no-such", WORK / "bin" / program, *words, "--no-such")
        return
    recorder.call(f"{case}/no-such", WORK / "bin" / program, *words, "no-such")
    recorder.call(f"{case}/nothing", WORK / "bin" / program, *words)
    for name in commands:
        _help(recorder, program, (*words, name))


def commands_of(text: str) -> list[str]:
    """Return the commands that the help *text* lists, under one heading or several.

    Every heading behind the options is one of commands.
    """
    _, _, sections = text.partition("\nOptions:\n")
    lines = sections.splitlines()
    headings = [number for number, line in enumerate(lines) if re.fullmatch(r"\S.*:", line)]
    rows = lines[headings[0] :] if headings else []
    return [match[1] for line in rows if (match := re.match(r"  ([a-z][a-z-]*)(?:  |$)", line))]


def refusals(recorder: Recorder) -> None:
    """Values that options do not take, and files that are not there."""
    for name, words in (
        ("cdi-validate-none", ("cdi", "validate")),
        ("cdi-validate-missing", ("cdi", "validate", "/nowhere/x.yaml")),
        ("cdi-diff-missing", ("cdi", "diff", "/nowhere/a", "/nowhere/b")),
        ("cdi-diff-one", ("cdi", "diff", "/nowhere/a")),
        ("cdi-transform-missing", ("cdi", "transform", "root", "--input", "/nowhere/a")),
        ("cdi-transform-relative", ("cdi", "transform", "root", "--relative-to", "x")),
        ("cdi-generate-mode", ("cdi", "generate", "--mode", "other")),
        ("config-set-none", ("config", "set")),
        ("config-set-unknown", ("config", "set", "no.such=1")),
        ("config-set-bad", ("config", "set", "hook-deadline=x")),
        ("config-show-missing", ("config", "show", "--config", "/nowhere/x.toml")),
        ("config-global-missing", ("--config", "/nowhere/x.toml", "config", "show")),
        ("quiet", ("--quiet", "cdi", "generate", "--device", "77")),
        ("debug", ("--debug", "cdi", "list")),
        ("debug-false", ("--debug=false", "cdi", "list")),
        ("doctor-check", ("doctor", "--check", "no-such")),
        ("doctor-root", ("doctor", "--root", "/nowhere")),
        ("doctor-timeout", ("doctor", "--timeout", "0")),
        ("driver-capability", ("driver", "list", "--capability", "x")),
        ("driver-root", ("driver", "list", "--driver-root", "/nowhere")),
        ("explain-bundle", ("explain", "--bundle", "/nowhere")),
        ("explain-gpus", ("explain", "--gpus", "x=y")),
        ("explain-mode", ("explain", "--mode", "x", "--gpus", "all")),
        ("runtime-none", ("runtime", "configure", "--dry-run")),
        ("system-nothing", ("system", "create-device-nodes", "--dry-run")),
    ):
        recorder.call(f"refused/{name}", recorder.program("gpuruntime"), *words)
        recorder.call(f"refused/{name}-ctk", WORK / "bin/nvidia-ctk", *words)


def container_cli(recorder: Recorder) -> None:
    """`nvidia-container-cli info` and `list`."""
    for command in (
        *("info", "--load-kmods info --csv", "list", "list --device 1 --libraries --compat32"),
        *("list --device GPU-5f1e0000", "list --ipcs --no-persistenced", "list --device 9"),
        *("list --imex-channel 0", "list --imex-channel x", "configure --pid=1 /x"),
        *("list --mig-config all", "list --mig-monitor all", "list --device 1:0", "list -b -f"),
        *("-k -d /dev/tty info", "--root=/nowhere info", "list --no-gsp-firmware"),
    ):
        case = re.sub(r"[^a-z0-9-]", "_", command.lower())
        recorder.call(f"cli/{case}", WORK / "bin/nvidia-container-cli", *command.split())


def system(recorder: Recorder) -> None:
    """Nodes and links: dry runs, and links in a directory of ours."""
    links = WORK / "char"
    nodes = WORK / "nodes"
    links.mkdir()
    nodes.mkdir()
    char = ("create-dev-char-symlinks", "--dev-char-path", links)
    make = ("create-device-nodes", "--dev-root", nodes, "--driver-root", "/")
    for name, words in (
        ("links-dry", (*char, "--dry-run")),
        ("links-all-dry", (*char, "--create-all", "--dry-run")),
        ("links-modules-dry", (*char, "--create-all", "--load-kernel-modules", "--dry-run")),
        ("links-nodes-dry", (*char, "--create-all", "--create-device-nodes", "--dry-run")),
        ("links", char),
        ("links-again", char),
        ("links-all", (*char, "--create-all")),
        ("nodes-dry", (*make, "--all", "--dry-run")),
        ("nodes-here-dry", ("create-device-nodes", "--all", "--dry-run")),
        ("nodes-control-dry", (*make, "--control-devices", "--dry-run")),
        ("nodes-gpu-dry", (*make, "--gpu-devices", "--dry-run")),
        ("nodes-mig-dry", (*make, "--mig-devices", "--dry-run")),
        ("nodes-modules-dry", (*make, "--all", "--load-kernel-modules", "--dry-run")),
        ("nodes", (*make, "--all")),
    ):
        ours = recorder.program("gpuruntime")
        recorder.call(f"system/{name}", ours, "system", *words, files={"links": links})
        recorder.call(f"system/{name}-ctk", WORK / "bin/nvidia-ctk", "system", *words)
    recorder.keep("system/made", "nodes", nodes)


def hooks(recorder: Recorder) -> None:
    """Hooks: what they do in a root, and what they refuse."""
    hook, ctk = recorder.program("gpu-cdi-hook"), WORK / "launched/nvidia-ctk"
    cuda = "/usr/lib/x86_64-linux-gnu"
    tiny = DATA / "elf" / "libtiny-x86-64.so"
    for name, words in (
        ("links", ("create-symlinks", "--link", f"libcuda.so.1::{cuda}/libcuda.so")),
        ("ldcache", ("update-ldcache", "--folder", cuda)),
        (
            "ldcache-host",
            ("update-ldcache", "--folder", cuda, "--ldconfig-path", "/sbin/ldconfig"),
        ),
        ("chmod", ("chmod", "--mode", "755", "--path", "/etc")),
        ("compat", ("enable-cuda-compat", "--host-driver-version", "550.163.01")),
        ("masks", ("disable-device-node-modification",)),
        ("profile", ("update-application-profile",)),
        ("noop", ("noop",)),
        ("update", ("update-container", "--link", f"libcuda.so.1::{cuda}/libcuda.so")),
        ("ahead", ("update-container", "--ahead", "--link", f"libcuda.so.1::{cuda}/libcuda.so")),
        ("link-outside", ("create-symlinks", "--link", "x::../../y")),
        ("link-bad", ("create-symlinks", "--link", "x")),
        ("no-such", ("no-such-hook",)),
        ("no-option", ("noop", "--no-such")),
        ("deadline", ("--deadline", "x", "noop")),
        ("nothing", ()),
    ):
        for program, front in ((hook, ()), (ctk, ("hook",))):
            state = _bundle(tiny, cuda)
            recorder.call(
                f"hooks/{name}-{Path(program).name}",
                *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
                # As a low-level runtime has it, in the container's mount namespace.
                f'mount --bind {BUNDLE}/rootfs {BUNDLE}/rootfs && exec "$@"',
                *("sh", program, *front, *words),
                stdin=state,
                files={"rootfs": BUNDLE / "rootfs"},
            )
    for name, state in (
        ("state-empty", ""),
        ("state-bad", "{"),
        ("state-no-bundle", "{}"),
        ("state-missing", json.dumps({"bundle": "/nowhere"})),
    ):
        for program, words in ((hook, ("noop",)), (hook, ("update-container",))):
            recorder.call(f"hooks/{name}-{words[0]}", program, *words, stdin=state)
        prestart = recorder.program("gpu-container-runtime-hook")
        recorder.call(f"hooks/{name}-prestart", prestart, "prestart", stdin=state)
    for word in ("prestart", "poststart", "poststop", "no-such"):
        prestart = recorder.program("gpu-container-runtime-hook")
        state = _bundle(tiny, cuda)
        recorder.call(f"hooks/prestart-{word}", prestart, word, stdin=state)


def _bundle(library: Path, directory: str) -> str:
    """Make a bundle with a root that has a library, and return its state."""
    shutil.rmtree(BUNDLE, ignore_errors=True)
    place = BUNDLE / "rootfs" / directory.lstrip("/")
    place.mkdir(parents=True)
    for name in ("etc", "proc", "dev", "tmp"):
        (BUNDLE / "rootfs" / name).mkdir()
    shutil.copy(library, place / "libtiny.so.1")
    (BUNDLE / "config.json").write_text(json.dumps(container(f"{VISIBLE}=0")))
    state = {"ociVersion": "1.0.2", "id": "id", "status": "creating", "bundle": str(BUNDLE)}
    return json.dumps(state)
