# SPDX-License-Identifier: Apache-2.0
"""Give configs that are written strangely to our reader, to runc and to crun; print what each saw.

Standard output is one JSON object: name of the change → whether ours accepts it, and the views of
"ours", "runc" and "crun": None for who refuses, or starts no container. Ours has a view also of
what it does not accept: that of a reader who asks nothing, json.loads, which is the control.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scenario
from matrix import without_unified

sys.path.append(str(scenario.TREE))
from gpuruntime.oci.bundle import parse

RUNTIMES = ("runc", "crun")
CAPABILITIES = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SYS_ADMIN": 21}
NODES = ("extra1", "extra2")
PLACES = ("/extra1", "/extra2")
LOOK = (
    "/bin/busybox cat /proc/1/environ | /bin/busybox tr '\\0' '\\n' | /bin/busybox sed 's/^/E /';"
    "for n in /dev/extra*; do echo D $n; done; /bin/busybox sed 's/^/M /' /proc/1/mountinfo;"
    "/bin/busybox sed 's/^/S /' /proc/1/status"
)
RANDOM, RANDOM_RUN = 4000, 25
SEED = 20_261_128
# Now and then crun 1.8 does not hear how a hook has ended.
LOST, TRIES = "(exit code: -33)", 8


def hook(name: str, marks: Path) -> dict[str, Any]:
    """Return a hook that leaves its name."""
    return {"path": "/bin/sh", "args": ["sh", "-c", f"echo {name} >>{marks}"], "env": ["A=b"]}


def base(bundle: Path, marks: Path) -> dict[str, Any]:
    """Return the config that the changes are made to."""
    scenario.run("runc", "spec", "--bundle", bundle)
    config: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    config["process"].update(
        terminal=False, args=["/bin/busybox", "sh", "-c", LOOK], env=["PATH=/bin", "A=1", "B=2"]
    )
    kept = {name: ["CAP_KILL"] for name in ("bounding", "effective", "permitted")}
    config["process"]["capabilities"] = kept
    config["root"]["readonly"] = False
    config["mounts"].append({"destination": "/extra1", "type": "tmpfs", "source": "tmpfs"})
    node = {"path": "/dev/extra1", "type": "c", "major": 1, "minor": 3, "fileMode": 438}
    config["linux"]["devices"] = [{**node, "uid": 0, "gid": 0}]
    config["hooks"] = {"createRuntime": [hook("one", marks), hook("two", marks)]}
    return config


def changes(text: str, marks: Path) -> Iterator[tuple[str, bytes]]:
    """Return *text*, a config, changed in each of the ways that readers differ about."""
    evil = json.dumps({"createRuntime": [hook("evil", marks)]})
    env, caps = '["PATH=/bin", "A=evil"]', '{"bounding": ["CAP_SYS_ADMIN"]}'
    mounts = '[{"destination": "/extra2", "type": "tmpfs", "source": "tmpfs"}]'
    more = {"hooks": evil, "process": f'{{"env": {env}}}', "linux": '{"devices": []}'}
    yield "as it is", text.encode()
    for key, value in more.items():
        for name in (key, key.upper(), key.title(), f"{key[:-1]}{key[-1].upper()}"):
            yield f"first {name}", text.replace("{", f'{{"{name}": {value},', 1).encode()
            yield f"last {name}", f'{text.rstrip()[:-1]},"{name}": {value}}}'.encode()
        yield f"unknown {key}", text.replace("{", f'{{"x-{key}": {value},', 1).encode()
        yield f"null {key}", text.replace("{", f'{{"{key}": null,', 1).encode()
    # Letters that Go takes for others, and escapes of plain ones.
    for name in (
        "hook\\u017f",
        "hooks\\u0000x",
        "hoo\\u212as",
        "\\u0068ooks",
        "hooks\\u0000",
        "hooks ",
    ):
        yield f"first {name}", text.replace("{", f'{{"{name}": {evil},', 1).encode()
        yield f"named {name}", text.replace('"hooks"', f'"{name}"').encode()
    for key, value in (("env", env), ("Env", env), ("capabilities", caps), ("Capabilities", caps)):
        inner = text.replace('"process": {', f'"process": {{"{key}": {value},')
        yield f"process first {key}", inner.encode()
        yield f"process null {key}", text.replace(f'"{key}":', f'"{key}": null, "{key}":').encode()
    yield "mounts twice", text.replace("{", f'{{"mounts": {mounts},', 1).encode()
    yield "mounts other case", text.replace("{", f'{{"Mounts": {mounts},', 1).encode()
    yield "value escaped", text.replace('"A=1"', '"\\u0041=1"').encode()
    yield "value of two bytes", text.replace('"A=1"', '"A=\u00e9"').encode()
    yield "value twice", text.replace('"A=1"', '"A=1", "A=2"').encode()
    yield "value without name", text.replace('"A=1"', '"A=1", "B"').encode()
    yield "value with NUL", text.replace('"A=1"', '"A=1\\u0000B=3"').encode()
    yield "place with NUL", text.replace('"/extra1"', '"/extra1\\u0000/a"').encode()
    yield "node with NUL", text.replace('"/dev/extra1"', '"/dev/extra1\\u0000"').encode()
    yield "node named with NUL", text.replace('"fileMode"', '"path\\u0000": 7, "a"').encode()
    yield "value of half a pair", text.replace('"A=1"', '"A=\\ud800"').encode()
    yield "value of no UTF-8", text.encode().replace(b'"A=1"', b'"A=\xff"')
    yield "numbers as floats", text.replace('"major": 1', '"major": 1.0').encode()
    yield "numbers as powers", text.replace('"minor": 3', '"minor": 3e0').encode()
    yield "numbers negative", text.replace('"minor": 3', '"minor": -0').encode()
    yield "numbers of many digits", text.replace('"minor": 3', f'"minor": {2**64 + 3}').encode()
    yield "mark of the byte order", b"\xef\xbb\xbf" + text.encode()
    yield "two bytes a letter", text.encode("utf-16")
    yield "garbage behind", f"{text} x".encode()
    yield "two documents", f"{text}{text}".encode()
    yield "a comment", text.replace("{", "{/* x */", 1).encode()
    yield "a comma more", f"{text.rstrip()[:-1]},}}".encode()
    yield "a NUL behind", text.encode() + b"\0"
    yield "spaces", json.dumps(json.loads(text), indent="\t \r").encode()


def at_random(text: str) -> Iterator[tuple[str, bytes]]:
    """Return *text* with bytes of it put elsewhere, left out, repeated, or in other case."""
    chance = random.Random(SEED)
    data = text.encode()
    for number in range(RANDOM):
        at, length = chance.randrange(len(data)), chance.randrange(1, 40)
        piece, place = data[at : at + length], chance.randrange(len(data))
        changed = chance.choice(
            (
                data[:place] + piece + data[place:],
                data[:at] + data[at + length :],
                data[:at] + piece.swapcase() + data[at + length :],
                data[:at] + bytes((chance.randrange(256),)) + data[at + 1 :],
            )
        )
        yield f"random {number}", changed


def expected(config: Any) -> dict[str, Any] | None:
    """Return what a container of *config* is to see, None if that cannot be said."""
    try:
        hooks = ((config.get("hooks") or {}).get("createRuntime")) or []
        bounding = (config["process"].get("capabilities") or {}).get("bounding") or []
        return {
            "env": sorted(
                dict(
                    v.split("=", 1) for v in config["process"].get("env") or () if "=" in v
                ).items()
            ),
            "nodes": sorted(
                d["path"][5:]
                for d in config["linux"].get("devices") or []
                if d["path"][5:] in NODES
            ),
            "mounts": sorted(
                m["destination"] for m in config["mounts"] if m["destination"] in PLACES
            ),
            "capabilities": sorted(name for name in bounding if name in CAPABILITIES),
            "hooks": [item["args"][2].split()[1] for item in hooks],
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None


def seen_by(runtime: str, bundle: Path, marks: Path) -> dict[str, Any] | None:
    """Return what a container of *bundle* sees under *runtime*, None if it does not start."""
    name = f"readers-{os.getpid()}"
    for _ in range(TRIES):
        marks.unlink(missing_ok=True)
        done = scenario.run(
            runtime, "run", "--bundle", bundle, name, check=False, errors="replace"
        )
        scenario.run(runtime, "delete", "--force", name, check=False)
        if LOST not in done.stderr:
            break
    rows: dict[str, list[str]] = {kind: [] for kind in "EDMS"}
    for line in done.stdout.splitlines():
        if line[:1] in rows and line[1:2] == " ":
            rows[line[0]].append(line[2:])
    if done.returncode != 0 or not rows["S"]:
        return None
    (mask,) = (int(row.split()[1], 16) for row in rows["S"] if row.startswith("CapBnd:"))
    environment = dict(row.split("=", 1) for row in rows["E"] if "=" in row)
    environment.pop("HOME", None)
    return {
        "env": sorted(environment.items()),
        "nodes": sorted(row[5:] for row in rows["D"] if row[5:] in NODES),
        "mounts": sorted({row.split()[4] for row in rows["M"]} & set(PLACES)),
        "capabilities": sorted(name for name, bit in CAPABILITIES.items() if mask >> bit & 1),
        "hooks": marks.read_text().split() if marks.exists() else [],
    }


def accepted(data: bytes) -> bool:
    """Return whether our reader would edit the config *data*."""
    try:
        config, doubt = parse(data)
        # What has no bytes cannot be stored again.
        json.dumps(config, ensure_ascii=False).encode()
    except ValueError:
        return False
    return doubt is None


def looks(data: bytes) -> bool:
    """Return whether the container of *data* would say what it sees."""
    return (read(data).get("process") or {}).get("args") == ["/bin/busybox", "sh", "-c", LOOK]


def read(data: bytes) -> Any:
    """Return what Python makes of *data*, None if it is nothing."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def main() -> None:
    """Make every change, and print."""
    without_unified()
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-readers-"))
    try:
        bundle, marks = top / "bundle", top / "marks"
        scenario.make_root(bundle / "rootfs")
        text = json.dumps(base(bundle, marks))
        named = dict(changes(text, marks))
        plain, usual = json.loads(text), {}
        for name, data in at_random(text):
            # Only what is another config says anything, and who looks must be who he was.
            is_other = accepted(data) and read(data) != plain and looks(data)
            if is_other and len(usual) < RANDOM_RUN:
                usual[name] = data
        results = {}
        for name, data in {**named, **usual}.items():
            (bundle / "config.json").write_bytes(data)
            results[name] = {
                "accepted": accepted(data),
                "ours": expected(read(data)),
                **{runtime: seen_by(runtime, bundle, marks) for runtime in RUNTIMES},
            }
        json.dump(results, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
