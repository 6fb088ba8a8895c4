# SPDX-License-Identifier: Apache-2.0
"""Fuzz target for the replays of the launcher, built with sanitisers.

A document gets random edits, which are recorded. The launcher either leaves another document to
Python, or applies the record to it with the same bytes as Python.
"""

from __future__ import annotations

import copy
import json
import random
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

from cdi import edits as cdi_edits
from cdi import strictjson
from gpuruntime.config import Config
from gpuruntime.launcher import replay, replay_template
from gpuruntime.oci import bundle
from gpuruntime.plan.injection import Injection
from gpuruntime.request import parse
from gpuruntime.request.parse import Request

HERE = Path(__file__).parent
TREE = HERE.parents[1]
RECORDED = sorted((TREE / "tests/data/configs").glob("*.json"))
CASES_AT_A_TIME = 400
# The launcher must replay all ordinary cases, and at least this share of all cases.
LEAST_ANSWERED = 0.25
OPTIONS = (
    *("-std=gnu11", "-g", "-O1", "--coverage", "-Wno-unused-function"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *(f'-D{name}="/x"' for name in ("LIBDIR", "PYTHON", "CLI_PYTHON", "VERSION")),
)
FUNCTIONS = (
    *("more", "next", "has_word", "number_of", "width_of", "read_hole", "matches", "fits_host"),
    *("put", "fill", "apply"),
)
CONFIG = Config({}, None)
CALLER = replay.Caller("gpu-container-runtime", "1:2", "/bin")
WORDS = parse.triggers(CONFIG) or ()
DONE = "NVIDIA_VISIBLE_DEVICES=void"
NAMES = ("PATH", "HOME", "A", "B_C", "É", "LD_LIBRARY_PATH", 'Q"', "N\\")
TEXTS = (
    *("", "x", "a b", "a=b=c", "é", "日本", "𝄞", 'quo"te', "back\\slash", "<&>", "\t\n\r\b\f"),
    *("\u2028", "/", "/a//b/", "\x7f", "%s", "null", "x" * 300, "nvidia", "CUDA", "\U0010ffff"),
)
PLAIN = tuple(text for text in TEXTS if text.isascii() and "\x7f" not in text)
PLACES = (
    *(
        "/proc",
        "/dev",
        "/sys/fs/cgroup",
        "/etc/hosts",
        "/data",
        "/data/a b",
        "/data/é",
        "/a/b/c/d",
    ),
    *("/usr/bin/nvidia-smi", "/", "/data/.hidden", "/data/..x", "/data/...", '/q"/x', "/b\\/x"),
)
ODD_PLACES = ("", "rel/x", "//x", "/x/", "/x/./y", "/x/../y", "/x//y", "/.", "/..", "/x/..", ".")
WHOLE = (0, 1, -1, 5, 1024, 2**31, -(2**40), 10**30)


def build(place: Path) -> Path:
    """Return the program; build it in *place* at the first call."""
    program = place / "replay"
    if not program.exists():
        subprocess.run(
            ["gcc", *OPTIONS, "-o", str(program), str(HERE / "replay_harness.c")],
            cwd=place, check=True, capture_output=True,
        )  # fmt: skip
    return program


def run(cases: list[tuple[bytes, bytes]], place: Path) -> list[bytes]:
    """Return the output of the launcher for each of *cases*, a kind and its bytes."""
    file = place / "cases"
    file.write_bytes(b"".join(kind + struct.pack("<I", len(d)) + d for kind, d in cases))
    done = subprocess.run(
        [build(place), file, *WORDS],
        cwd=place,
        env={"PATH": CALLER.path},
        capture_output=True,
        check=False,
        timeout=120,
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr[:2000].decode(errors="replace"))
    return done.stdout.split(b"\n")[:-1]


def compare(rng: random.Random, texts: list[Any], place: Path) -> None:
    """Replay many documents in C and in Python; raise on a difference or a sanitiser report."""
    del texts
    cases = [
        _replay_case(rng) if rng.random() < 0.8 else _number_case(rng)
        for _ in range(CASES_AT_A_TIME)
    ]
    lines = run([case[:2] for case in cases], place)
    if len(lines) != len(cases):
        raise AssertionError(f"{len(lines)} lines for {len(cases)} cases")
    for (_, data, expected, is_required), line in zip(cases, lines, strict=True):
        if line == b"-":
            if is_required:
                raise AssertionError(f"not replayed: {data!r}")
        elif expected is not None and line != expected:
            raise AssertionError(f"{data!r}: {line!r}, not {expected!r}")
    share = sum(line != b"-" for line in lines) / len(lines)
    if share < LEAST_ANSWERED:
        raise AssertionError(f"only {share:.0%} are replayed")


def _number_case(rng: random.Random) -> tuple[bytes, bytes, bytes | None, bool]:
    """Return a kind, a document, the number that Python gives it, and that it is required."""
    data = _spelled(rng, _container(rng))
    return b"n", data, b"%d" % replay_template.number_of(data, WORDS), True


def _replay_case(rng: random.Random) -> tuple[bytes, bytes, bytes | None, bool]:
    """Return a kind, a document and a file, the expected result, and whether it is required."""
    first = _container(rng)
    decided = Injection(Request("cdi", "environment", ("a",)), _edits(rng))
    second, odd = copy.deepcopy(first), False
    for _ in range(rng.randint(0, 3)):
        second = _with_other_holes(rng, second)
    if rng.random() < 0.2:
        second, odd = _freely_changed(rng, second), True
    if rng.random() < 0.2:
        second, odd = _changed(rng, second), True
    if rng.random() < 0.2:
        second, odd = _oddly_changed(rng, second), True
    how = rng.randrange(4)
    before, data = _spelled(rng, first, how), _spelled(rng, second, how)
    if rng.random() < 0.2:
        data, odd = _spoiled(rng, data), True
    file = _file(before, first, decided)
    if file is None:
        return b"r", data + b"\0", None, False
    if rng.random() < 0.1:
        # The result is unspecified: only the sanitisers check this case.
        file = _spoiled(rng, file).replace(b"\0", b"0")
        return b"r", data + b"\0" + file[: rng.randint(0, len(file) - 1)], None, False
    return b"r", data + b"\0" + file, _expected(data, decided), not odd


def _file(data: bytes, document: dict[str, Any], decided: Injection) -> bytes | None:
    """Return the file behind its head by which *decided* is added to *data* again."""
    template = replay_template.make(data, document, WORDS)  # type: ignore[arg-type]
    assert template is not None
    marked = template.marked(document)  # type: ignore[arg-type]
    decided.apply(marked)
    pieces = template.pieces(strictjson.dumps(marked, ascii_only=False).encode())
    if pieces is None:
        return None
    parts = replay.listed(template.parts), b"", replay.listed(pieces)
    return replay.listed((CALLER.program.encode(), CALLER.path.encode(), *parts))


def _expected(data: bytes, decided: Injection) -> bytes:
    """Return the document *data* after *decided*; b"?", which no result is, if it is unusable."""
    try:
        document, doubt = bundle.parse(data)
        if doubt is not None or b"\0" in data or cdi_edits.has_user_namespace(document):
            return b"?"
        decided.apply(document)
        return strictjson.dumps(document, ascii_only=False).encode()
    except (ValueError, TypeError, AttributeError, KeyError):
        # Invalid JSON, a lone surrogate, or a part of another kind.
        return b"?"


def _with_other_holes(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """Return *document* with another text where no record depends on it."""
    changed = copy.deepcopy(document)
    process, text = changed["process"], rng.choice(PLAIN)
    mounts = [mount for mount in changed["mounts"] if "source" in mount]
    free = [i for i, entry in enumerate(process["env"]) if not _asks(entry) and entry.isascii()]
    change = rng.randrange(5)
    if change == 0 and process.get("args"):
        place = rng.randrange(len(process["args"]))
        if _is_free(process["args"][place]):
            process["args"][place] = text
    elif change == 1 and free:
        place = rng.choice(free)
        name, _, value = process["env"][place].partition("=")
        if _is_free(value) and "\\" not in name and '"' not in name:
            process["env"][place] = f"{name}={text}"
    elif change == 2 and mounts:
        mount = rng.choice(mounts)
        if _is_free(mount["source"]) and not _asks(json.dumps(mount)):
            mount["source"] = text
    elif change == 3 and _is_free(changed.get("hostname", "é")):
        changed["hostname"] = text
    else:
        process["cwd"] = f"/{text}"
    return changed


def _is_free(text: str) -> bool:
    """Return whether *text* may be in a hole."""
    return text.isascii() and "\x7f" not in text and not _asks(text)


def _asks(text: str) -> bool:
    return any(word in text.encode() for word in WORDS)


def _container(rng: random.Random) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(rng.choice(RECORDED).read_bytes())
    document["process"]["env"].append(f"NVIDIA_VISIBLE_DEVICES={rng.choice(('all', '0', '1,2'))}")
    if rng.random() < 0.7:
        # It is most of the file and irrelevant here.
        document["linux"].pop("seccomp", None)
    for _ in range(rng.randint(0, 3)):
        document = _freely_changed(rng, document)
    return document


def _freely_changed(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """Return *document* with a changed value that no record depends on."""
    changed = copy.deepcopy(document)
    process, linux = changed["process"], changed["linux"]
    mounts = changed["mounts"]
    change = rng.randrange(12)
    if change == 0:
        process["args"] = [rng.choice(TEXTS) for _ in range(rng.randint(0, 4))]
    elif change == 1:
        entry = f"{rng.choice(NAMES)}={rng.choice(TEXTS)}"
        process["env"].insert(rng.randint(0, len(process["env"])), entry)
    elif change == 2:
        mount = {"destination": f"/own/{rng.randint(0, 9)}", "source": rng.choice(TEXTS)}
        mount.update(rng.choice(({}, {"options": ["bind", "ro"]}, {"type": "bind"})))
        mounts.insert(rng.randint(0, len(mounts)), mount)
    elif change == 3:
        mounts.insert(0, {"source": "x", "destination": f"{rng.choice(PLACES).rstrip('/')}/z"})
    elif change == 4:
        changed["annotations"] = {
            **(changed.get("annotations") or {}),
            rng.choice(TEXTS[1:4]): "x",
        }
    elif change == 5:
        changed["hostname"] = rng.choice(TEXTS)
    elif change == 6:
        name = rng.choice(("createContainer", "createRuntime", "prestart", "poststop"))
        changed.setdefault("hooks", {}).setdefault(name, []).append(
            {"path": "/bin/true", "args": ["true", rng.choice(TEXTS)], "timeout": 5}
        )
    elif change == 7:
        linux["cgroupsPath"] = f"/docker/{rng.randint(0, 99)}"
    elif change == 8:
        linux["namespaces"] = [{"type": "pid"}, {"type": "network", "path": "/proc/1/ns/net"}]
    elif change == 9:
        # The launcher does not read names that are not ASCII.
        linux["sysctl"] = {"net.x": rng.choice(TEXTS), "y": [rng.choice(WHOLE), {}, None]}
    elif change == 10:
        linux["resources"][rng.choice(("memory", "cpu"))] = {"limit": rng.choice(WHOLE)}
    else:
        changed = dict(rng.sample(list(changed.items()), len(changed)))
    return changed


def _changed(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """Return *document* with a changed value that a record depends on."""
    changed = copy.deepcopy(document)
    process, linux = changed["process"], changed["linux"]
    change = rng.randrange(9)
    if change == 0:
        process["user"] = {"uid": rng.randint(0, 2), "gid": 0, "additionalGids": [44]}
    elif change == 1:
        process.pop("user", None)
    elif change == 2:
        process["capabilities"] = {"bounding": rng.choice((["CAP_CHOWN"], ["CAP_SYS_ADMIN"]))}
    elif change == 3:
        linux["devices"] = rng.choice(
            (None, [], [{"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3}])
        )
    elif change == 4:
        linux["resources"]["devices"] = rng.choice((None, [], [{"allow": False}]))
    elif change == 5:
        process["env"].insert(0, rng.choice(("NVIDIA_VISIBLE_DEVICES=3", "CUDA_VERSION=9")))
    elif change == 6:
        changed["annotations"] = {"cdi.k8s.io/x": "nvidia.com/gpu=0"}
    elif change == 7:
        place = "/var/run/nvidia-container-devices/0"
        changed["mounts"].append({"source": "/dev/null", "destination": place})
    else:
        linux["cgroupsPath"] = rng.choice(("s.slice:docker:1", "a:b:c", "a:b", 5))
    return changed


def _oddly_changed(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """Return *document* with a value that engines do not write."""
    changed = copy.deepcopy(document)
    process, linux, mounts = changed["process"], changed["linux"], changed["mounts"]
    change = rng.randrange(17)
    odd = _value(rng, 0, odd=True)
    if change == 0:
        changed[rng.choice(("hooks", "annotations", "root", "linux", "process", "mounts"))] = odd
    elif change == 1:
        process[rng.choice(("env", "user", "capabilities", "args"))] = odd
    elif change == 2:
        linux[rng.choice(("devices", "resources", "namespaces", "netDevices"))] = odd
    elif change == 3:
        mounts.append({"destination": rng.choice((*ODD_PLACES, *PLACES)), "source": "y"})
    elif change == 4:
        mounts.append(rng.choice(({}, {"source": "x"}, 5, {"destination": 5}, None, [])))
    elif change == 5:
        process["env"].append(rng.choice(("NOTHING", 5, None, "", "=x", "A", ["A=b"])))
    elif change == 6:
        linux["namespaces"] = [{"type": "user"}, {"type": "pid"}]
    elif change == 7:
        target = rng.choice((changed, process, linux, linux["resources"], changed["mounts"][0]))
        name = rng.choice(sorted(bundle.known_names()))
        target[rng.choice((name.upper(), name.title(), name.swapcase(), f"{name}\u017f"))] = odd
    elif change == 8:
        changed["hooks"] = {
            rng.choice(("prestart", "x")): rng.choice(([{"path": 5}], [5], {}, None))
        }
    elif change == 9:
        changed["hooks"] = {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}
    elif change == 10:
        changed.pop(
            rng.choice(("hooks", "annotations", "root", "linux", "process", "mounts")), None
        )
    else:
        changed[rng.choice(("x", "annotations"))] = odd
    return changed


def _edits(rng: random.Random) -> Any:
    """Return completed edits."""
    hooks = [
        {
            "hookName": rng.choice(("createContainer", "createRuntime", "startContainer")),
            "path": "/usr/bin/gpu-cdi-hook",
            **rng.choice(({}, {"args": ["gpu-cdi-hook", rng.choice(TEXTS)]}, {"timeout": 3})),
        }
        for _ in range(rng.choice((0, 1, 1, 3)))
    ]
    edits: dict[str, Any] = {
        "env": [
            DONE,
            *(f"{rng.choice(NAMES)}={rng.choice(TEXTS)}" for _ in range(rng.randint(0, 4))),
        ],
        "deviceNodes": [
            {"path": f"/dev/nvidia{i}", "type": "c", "major": 195, "minor": i, "fileMode": 438}
            for i in range(rng.choice((0, 1, 2, 8)))
        ],
        "mounts": [
            {
                "hostPath": rng.choice(TEXTS),
                "containerPath": rng.choice(PLACES if rng.random() < 0.97 else ODD_PLACES),
                "options": rng.choice(([], ["ro", "nosuid"])),
            }
            for _ in range(rng.choice((0, 1, 3, 20)))
        ],
        "hooks": hooks,
        "additionalGids": rng.choice(([], [], [44], [44, 109])),
    }
    if rng.random() < 0.03:
        edits["netDevices"] = [{"hostInterfaceName": "eth0", "name": "e"}]
    if rng.random() < 0.03:
        edits["intelRdt"] = {"closID": "x"}
    return edits


def _value(rng: random.Random, depth: int, *, odd: bool) -> Any:
    """Return a random JSON value; *odd*: also values that the launcher does not read."""
    kind = rng.randrange(8 if depth < 5 else 5)
    if kind == 0:
        return rng.choice((True, False, None))
    if kind == 1:
        return rng.choice(WHOLE)
    if kind == 2 and odd:
        return rng.choice((1.5, 1e300, -0.0, 1e-9, "\ud800", "\0", "\x1f", 10**100))
    if kind <= 4:
        return rng.choice(TEXTS)
    if kind == 5 and odd and rng.random() < 0.1:
        return json.loads("[" * (n := rng.randint(20, 80)) + "]" * n)
    if kind <= 6:
        return [_value(rng, depth + 1, odd=odd) for _ in range(rng.randint(0, 4))]
    return {rng.choice(TEXTS): _value(rng, depth + 1, odd=odd) for _ in range(rng.randint(0, 4))}


def _spelled(rng: random.Random, value: Any, how: int | None = None) -> bytes:
    """Return *value* as JSON, formatted as by an engine or by hand, or as *how* says."""
    if how is None:
        how = rng.randrange(4)
    if how == 0:
        text = json.dumps(value, indent="\t", ensure_ascii=False)
    else:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if how == 1:
        # Go escapes these characters.
        for character in "<>&\u2028\u2029":
            text = text.replace(character, f"\\u{ord(character):04x}")
    if how == 2:
        text = re.sub(r"[é日本\u2028]", lambda match: f"\\u{ord(match[0]):04X}", text)
    return (text + ("\n" if how else "")).encode("utf-8", "surrogatepass")


def _spoiled(rng: random.Random, data: bytes) -> bytes:
    """Return *data* with one random change."""
    at = rng.randint(0, len(data))
    pieces = (
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\\",
        b"\\u00e9",
        b"\\ud800",
        b"\\/",
        b"0",
    )
    more = (b"-", b"1", b".5", b"e3", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80")
    words = (b"true", b"null", b"NaN", b" ", b"\n", b"\x01", b'"env":[],', b"\xe9", b"\xf0\x9f")
    piece = rng.choice((*pieces, *more, *words))
    how = rng.randrange(4)
    if how == 0:
        return data[:at] + piece + data[at:]
    if how == 1:
        return data[:at] + data[at + rng.randint(1, 5) :]
    if how == 2:
        return data[:at] + piece + data[at + len(piece) :]
    end = at + rng.randint(1, 60)
    return data[:end] + data[at:]


def covered(place: Path) -> dict[str, tuple[int, int]]:
    """Return the executed and the total number of lines of the readers and the replay."""
    done = subprocess.run(
        ["gcov", "--no-output", "--function-summaries", "replay-replay_harness"],
        cwd=place, capture_output=True, text=True, check=True,
    )  # fmt: skip
    summaries = re.findall(r"Function '(\w+)'\nLines executed:([\d.]+)% of (\d+)", done.stdout)
    counts = {
        name: (round(float(share) * int(total) / 100), int(total))
        for name, share, total in summaries
    }
    parts = [counts[name] for name in FUNCTIONS]
    return {"gpuruntime/launcher": (sum(a for a, _ in parts), sum(b for _, b in parts))}
