# SPDX-License-Identifier: Apache-2.0
"""Fuzz targets: promises of the loader and the injection that hold for every input.

Each target takes random input from a seed and raises if a promise is broken. As a program,
`targets.py SECONDS` runs each target for that time, from a seed that it prints.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coverage
from fuzz import launcher, parsers, replay
from hostile import noted
from property import cdi_documents

from cdi import document, generate, registry, yaml_text, yamlio
from cdi.complete import complete
from cdi.edits import apply
from cdi.errors import CdiError
from cdi.inject import inject
from gpuruntime.errors import RequestError, escape
from gpuruntime.formats import cuda_note
from gpuruntime.request import requirements

TREE = Path(__file__).parents[2]
CORPUS = TREE / "tests/data/cdi"
MAX_KILOBYTES = 200 << 10
# One second, with a margin for a loaded machine.
MAX_SECONDS = 3.0
GOOD = {
    "cdiVersion": "0.5.0",
    "kind": "good.com/card",
    "devices": [{"name": "a", "containerEdits": {"env": ["A=b"]}}],
}
TOKENS = (
    *('"', "'", "{", "}", "[", "]", ":", ",", "-", "?", "|", ">", "#", "&a", "*a", "<<", "!", "%"),
    *(
        "---\n",
        "...\n",
        "\n",
        "\t",
        "  ",
        "\ufeff",
        "\\",
        "\\u0000",
        "\\ud800",
        "\\/",
        "\0",
        "\x85",
    ),
    *("null", "~", "y", "0o17", "1e999", "-0", "9" * 40, ".inf", ".nan", "!!str", "!!binary", "é"),
    *(
        "cdiVersion",
        "CDIVERSION",
        "containerEdits",
        "devices",
        "name",
        "\u2028",
        "\U0001f600",
        "//",
    ),
)


def seeds() -> list[str]:
    """Return the texts of all specs of the corpus."""
    texts = {
        spec["text"]
        for path in sorted(CORPUS.glob("*.json"))
        for spec in json.loads(path.read_text()).get("specs", ())
    }
    return sorted(text for text in texts if len(text) < 20_000)


def mutated(rng: random.Random, texts: list[str]) -> bytes:
    """Return one of *texts* with random changes to its characters and bytes."""
    text = rng.choice(texts)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.randint(0, 12))
        how = rng.randrange(6)
        if how == 0:
            text = text[:at] + text[end:]
        elif how == 1:
            text = text[:at] + rng.choice(TOKENS) + text[at:]
        elif how == 2:
            text = text[:at] + text[at:end] * rng.randint(2, 40) + text[end:]
        elif how == 3:
            other = rng.choice(texts)
            text = (
                text[:at]
                + other[rng.randrange(len(other) + 1) :][: rng.randint(1, 200)]
                + text[at:]
            )
        elif how == 4:
            text = text[:at] + chr(rng.randrange(1, 0x3000)) + text[end:]
        else:
            text = text[:at] + rng.choice(TOKENS) * rng.randint(1, 300) + text[at:]
    data = bytearray(text[:100_000].encode("utf-8", "surrogatepass"))
    if data and rng.random() < 0.1:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def load(rng: random.Random, texts: list[str], place: Path) -> None:
    """Load random files beside a good one: at most one error each, and the good file is loaded."""
    files = {f"x.{rng.choice(('json', 'yaml'))}": mutated(rng, texts)}
    for name, data in files.items():
        (place / name).write_bytes(data)
    try:
        specs = registry.load(
            [str(place)], may_trust=lambda _: True, decode_yaml=yamlio.decode_all
        )
        if "good.com/card=a" not in specs.devices and "good.com/card=a" not in specs.conflicting:
            raise AssertionError("the good file does not load any more")
        for path, errors in specs.errors.items():
            if len(errors) > 1 and {error.category for error in errors} != {"conflict"}:
                raise AssertionError(f"{path}: {errors}")
            if any("\n" in error.message for error in errors if error.category == "syntax"):
                raise AssertionError(f"{path}: an error of more than a line")
        for device in specs.devices:
            apply(_without_nodes(specs.resolve([device])), {})
    finally:
        for name in files:
            (place / name).unlink()


def _without_nodes(edits: Any) -> Any:
    return {**edits, "deviceNodes": []}


def save(rng: random.Random, texts: list[str], place: Path) -> None:
    """Encode a spec as JSON and as YAML, and decode the same spec."""
    del texts, place
    spec = document.check(cdi_documents.valid(rng))
    if document.check(yamlio.decode(yaml_text.encode(spec))) != spec:
        raise AssertionError("YAML")
    text = generate.encode_json(spec)
    for decoded in (registry.decode_json(text), yamlio.decode(text)):
        if document.check(decoded) != spec:
            raise AssertionError("JSON")


def twice(rng: random.Random, texts: list[str], place: Path) -> None:
    """Assert that a second injection changes only hooks and cgroup rules, which are appended."""
    del texts
    spec = document.check(cdi_documents.valid(rng))
    path = place / "x.json"
    path.write_text(generate.encode_json(spec))
    try:
        specs = registry.load(
            [str(place)], may_trust=lambda _: True, decode_yaml=yamlio.decode_all
        )
    finally:
        path.unlink()
    names = [f"{spec['kind']}={device['name']}" for device in spec["devices"]]
    chosen = rng.sample(names, rng.randint(1, min(3, len(names))))
    config = random_config(rng)
    before = copy.deepcopy(config)
    try:
        once = inject(specs, chosen, config)
    except CdiError as error:
        if not error.category.startswith("host-"):
            raise AssertionError(str(error)) from error
        edits = {**specs.resolve(chosen), "deviceNodes": []}
        once = copy.deepcopy(config)
        apply(complete(edits), once)  # type: ignore[arg-type]
        again = copy.deepcopy(once)
        apply(complete(edits), again)  # type: ignore[arg-type]
    else:
        again = inject(specs, chosen, once)
    if config != before:
        raise AssertionError("the input config has changed")
    for result in (once, again):
        result.pop("hooks", None)
        result.get("linux", {}).get("resources", {}).pop("devices", None)
        if result.get("mounts"):
            result["mounts"] = sorted(result["mounts"], key=lambda m: json.dumps(m["destination"]))
    if json.dumps(_deduplicated(once)) != json.dumps(_deduplicated(again)):
        raise AssertionError("twice is not once")


def _deduplicated(config: Any) -> Any:
    """Return *config* with only the last device and the last mount of each path."""
    result = copy.deepcopy(config)
    devices = result.get("linux", {}).get("devices")
    if devices:
        by_path = {device["path"]: device for device in devices}
        result["linux"]["devices"] = [by_path[path] for path in sorted(by_path)]
    if result.get("mounts"):
        by_destination = {mount["destination"]: mount for mount in result["mounts"]}
        result["mounts"] = [by_destination[path] for path in sorted(by_destination)]
    return result


REQUIREMENT_TOKENS = (
    *("cuda", "driver", "arch", "brand", "CUDA", "gpus", "é", "\0", "\n", "v", "x", "٣"),
    *("<", ">", "=", "!", "<=", ">=", "!=", ",", ",", " ", " ", "\t", "\u2028", "-", "+"),
    *("12.4", "12.8", "550.54.14", "8.0", "0", "9" * 40, "0" * 5000, ".", "tesla", "unknown"),
    *("cuda>=12.4", "cuda>=12.8 brand=tesla,driver>=470,driver<471", "brand!=grid", "gpus>=8"),
)
REQUIREMENT_HOSTS = (
    requirements.Facts(),
    requirements.Facts("12.4", "550.54.14"),
    requirements.Facts("12.4", "550.54.14", ((0, "8.0", "tesla"), (1, "9.0", "unknown"))),
    requirements.Facts("", "x", ((0, "", ""), (1, "8.0", "grid"))),
)


def require(rng: random.Random, texts: list[str], place: Path) -> None:
    """Check random requirements: malformed is malformed on every host; one unmet fails all."""
    del texts, place
    strings = ["".join(rng.choices(REQUIREMENT_TOKENS, k=rng.randint(0, 9))) for _ in range(3)]
    strings[0] *= rng.choice((1, 1, 1, 400))
    for host in REQUIREMENT_HOSTS:
        whole = _error_of_requirements(strings, host)
        single = {_error_of_requirements([text], host) for text in strings}
        for kind in ("invalid constraint", "requirements not met", ""):
            if kind in single:
                break
        if whole != kind:
            raise AssertionError(f"{whole!r}, of each {single}")
        if (kind == "invalid constraint") != (
            _error_of_requirements(strings, REQUIREMENT_HOSTS[0]) == "invalid constraint"
        ):
            raise AssertionError("it depends on the host whether it is malformed")
    version = "".join(rng.choices(("9", "0", ".", ".", "v", "x", "4294967296", "-"), k=5))
    try:
        requirement = requirements.of_cuda_version(version)
    except RequestError:
        return
    if _error_of_requirements([requirement], REQUIREMENT_HOSTS[0]):
        raise AssertionError(f"{version!r} gives {requirement!r}")


def _error_of_requirements(strings: list[str], host: requirements.Facts) -> str:
    """Return the kind of the error, or ""; raise if the messages are too long."""
    try:
        sentences = [escape(sentence) for sentence in requirements.check(strings, host)]
        kind = ""
    except RequestError as error:
        sentences = [error.lines()]
        kind = error.message.partition(":")[0]
    if sum(map(len, sentences)) > 8000:
        raise AssertionError(f"says {sum(map(len, sentences))} characters")
    return kind


NOTE_NUMBERS = (0, 1, 3, 4, 7, 12, 0x7F, 0x80, 0xFFFF, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 63)
NOTE_TEXTS = (
    *(noted.TEXT, b"", b"{}", b"[]", b"{", b"null", b"[" * 9000, b'{"Driver": [true]}', b"\xff"),
    *(b'{"Driver": [550], "CUDA Version": 12}', b'{"Driver": 550}', b'{"Driver": [' + b"9" * 5000),
)
MAX_NOTE_READ = 64 << 10


def note(rng: random.Random, texts: list[str], place: Path) -> None:
    """Read the note of a random library: few bytes are read, and the only error is NoteError."""
    del texts, place
    content = b"".join(
        noted.note(rng.choice(NOTE_TEXTS), rng.choice((noted.OWNER, noted.OWNER, b"GNU\0", b"")))
        for _ in range(rng.randint(0, 3))
    )
    data = bytearray(
        noted.of_note(
            content,
            width=rng.choice((1, 2)),
            section=rng.choice((noted.SECTION, noted.SECTION, b".note")),
        )
    )
    for _ in range(rng.choice((0, 0, 1, 1, 2, 8))):
        size = rng.choice((1, 2, 4, 8))
        # The numbers are in the header and in the table at the end.
        at = rng.choice((rng.randrange(96), len(data) - 1 - rng.randrange(192)))
        number = rng.choice(NOTE_NUMBERS) & ((1 << 8 * size) - 1)
        data[at : at + size] = number.to_bytes(size, "little")
    data = data[: rng.choice((len(data), len(data), rng.randrange(len(data) + 1)))]
    done = 0

    def read_at(offset: int, size: int) -> bytes:
        nonlocal done
        part = bytes(data[offset : offset + size])
        done += len(part)
        return part

    try:
        contents = cuda_note.read_note(read_at)
    except cuda_note.NoteError:
        contents = None
    if done > MAX_NOTE_READ:
        raise AssertionError(f"read {done} bytes")
    versions = [
        "".join(rng.choices(("575", "550", ".", ".", "08", "x", "\n"), k=3)) for _ in "abc"
    ]
    if cuda_note.is_usable(versions[0], contents, versions[1], versions[2]) and not any(
        cuda_note.parse_version(version) for version in versions[1:]
    ):
        raise AssertionError(f"used with an unknown driver version: {versions}")


def random_config(rng: random.Random) -> dict[str, Any]:
    """Return an OCI config as engines write it, with random sections missing."""
    sections: dict[str, Any] = {
        "process": {"env": ["PATH=/bin", "A=user", "A=last"], "user": {"uid": 7, "gid": 8}},
        "mounts": [{"destination": "/proc", "source": "proc"}, {"destination": "/a/b/"}],
        "linux": {
            "devices": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 3}],
            "namespaces": [{"type": rng.choice(("mount", "user"))}],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
        "hooks": {"prestart": [{"path": "/x"}]},
    }
    return {"ociVersion": "1.2.0", **{k: v for k, v in sections.items() if rng.random() < 0.7}}


TARGETS: dict[str, tuple[Callable[[random.Random, list[str], Path], None], list[str]]] = {
    "load": (load, ["cdi/document.py", "cdi/quick.py"]),
    # These parse nothing: no lines are counted.
    "save": (save, []),
    "twice": (twice, []),
    "require": (require, ["gpuruntime/request/requirements.py"]),
    "note": (note, ["gpuruntime/formats/cuda_note.py"]),
    **{
        name: (parsers.target(name), list(modules))
        for name, (_, _, modules) in parsers.PARSERS.items()
    },
    "launcher": (launcher.compare, []),
    "replay": (replay.compare, []),
}
# The coverage functions of the targets in C.
COVERED = {"launcher": launcher.covered, "replay": replay.covered}
# The least coverage of the functions in the modules of a target after a long run (percent).
LEAST_COVERED = 85


class Result:
    """The result of a target: the number of executions, and the coverage of its modules."""

    def __init__(self, name: str, executions: int, covered: dict[str, tuple[int, int]]) -> None:
        self.name = name
        self.executions = executions
        self.covered = covered

    @property
    def line(self) -> str:
        """Return the result as one line."""
        parts = [f"{path} {done}/{lines}" for path, (done, lines) in self.covered.items()]
        of = f", lines covered: {', '.join(parts)}" if parts else ""
        return f"fuzz {self.name}: {self.executions} executions{of}"

    @property
    def percent(self) -> float:
        """Return the coverage of all modules together, in percent."""
        done, lines = (sum(numbers) for numbers in zip(*self.covered.values(), strict=True))
        return 100 * done / lines


def run(name: str, seed: int, executions: int, seconds: float = 1e9) -> Result:
    """Run a target; raise if it fails."""
    target, modules = TARGETS[name]
    texts = seeds()
    measure = coverage.Coverage(data_file=None, include=[str(TREE / m) for m in modules])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "good.json").write_text(json.dumps(GOOD))
        if modules:
            measure.start()
        start = time.monotonic()
        done = 0
        try:
            while done < executions and time.monotonic() - start < seconds:
                _run_once(target, f"{name} {seed} {done}", texts, place)
                done += 1
        finally:
            measure.stop()
        covered = COVERED[name](place) if name in COVERED else {}
    for module in modules:
        _, lines, _, missing, _ = measure.analysis2(str(TREE / module))
        inside = _lines_of_functions(TREE / module) & set(lines)
        covered[module] = len(inside - set(missing)), len(inside)
    return Result(name, done, covered)


def _lines_of_functions(path: Path) -> set[int]:
    """Return the lines of function bodies: the others run on import, which is not measured."""
    return {
        line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def _run_once(target: Any, seed: str, texts: list[str], place: Path) -> None:
    start, peak = time.process_time(), _peak_kilobytes()
    try:
        target(random.Random(seed), texts, place)
    except Exception as error:
        raise AssertionError(f"seed {seed!r}: {type(error).__name__}: {error}") from error
    if time.process_time() - start > MAX_SECONDS:
        raise AssertionError(f"seed {seed!r}: took {time.process_time() - start:.1f} s")
    if _peak_kilobytes() - peak > MAX_KILOBYTES * 2:
        raise AssertionError(f"seed {seed!r}: took much memory")


def _peak_kilobytes() -> int:
    """Return the peak memory of this process, which may be a worker with other tests."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Run every target for some seconds; exit with 1 if one fails or covers too little."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30
    chosen = sys.argv[2:] or list(TARGETS)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    results, broken = [], 0
    for name in chosen:
        try:
            results.append(run(name, seed, 10**9, seconds))
            print(results[-1].line, flush=True)
        except AssertionError as error:
            broken += 1
            print(f"fuzz {name}: BROKEN: {error}", flush=True)
    little = [r for r in results if r.covered and r.percent < LEAST_COVERED]
    for result in little:
        print(f"fuzz {result.name}: covers {result.percent:.1f} %, below {LEAST_COVERED} %")
    least = min((r.percent for r in results if r.covered), default=100.0)
    print(
        f"fuzz: {len(chosen)} targets, {sum(r.executions for r in results)} executions, "
        f"{broken} broken, least covered {least:.1f} %, {len(little)} below {LEAST_COVERED} %"
    )
    sys.exit(bool(little or broken))


if __name__ == "__main__":
    main()
