# SPDX-License-Identifier: Apache-2.0
"""Which creates the launcher passes on by itself: those that ask for nothing, and no other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from effort import tries
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher.bundles import (
    PASSED,
    WORDS,
    companion_text,
    write_bundle,
    write_companion,
    write_config,
)

from gpuruntime.config import Config
from gpuruntime.launcher import companion
from gpuruntime.request import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.conftest import Bench

CHUNK = 1 << 16
MOST = 4 << 20
BUILDS = pytest.mark.parametrize("build", ["plain", "twin"])


@pytest.fixture
def bundle(bench: Bench) -> Path:
    """Return a bundle whose create is passed on: no config file, and a companion that says so."""
    write_companion(bench, companion_text(None, "runc"))
    return write_bundle(bench)


def create(bench: Bench, bundle: Path, **how: Any) -> str | None:
    """Return the program that the launcher starts for a create of *bundle*."""
    return bench.runtime("create", "--bundle", str(bundle), "c1", **how).who


def text_of(length: int, end: str = "") -> bytes:
    """Return a config.json of *length* bytes, *end* the last of them."""
    return PASSED.encode().ljust(length - len(end)) + end.encode()


@BUILDS
def test_a_create_that_asks_for_nothing_is_passed_on(
    build: str, bench: Bench, bundle: Path, request: pytest.FixtureRequest
) -> None:
    """With unchanged arguments, under the name of the runtime."""
    if build == "twin":
        request.getfixturevalue("twin")
    words = ["--root", "/r", "--log=/l", "create", "--pid-file", "/p", "c1", "-b", str(bundle)]
    outcome = bench.runtime(*words, build=build)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"", b"")
    assert outcome.who == "lowlevel/runc"
    runc = bench.path("lowlevel/runc")
    assert outcome.record.arguments == [os.fsencode(word) for word in (runc, *words)]


@pytest.mark.parametrize("name", ["", ".cdi", ".legacy"])
def test_the_names_with_a_mode_pass_on_the_same(name: str, bench: Bench, bundle: Path) -> None:
    """A mode decides what a request brings; whether there is one does not depend on it."""
    program = f"nvidia-container-runtime{name}"
    assert create(bench, bundle, name=program) == "lowlevel/runc"
    write_bundle(bench, '["NVIDIA_VISIBLE_DEVICES=all"]')
    assert create(bench, bundle, name=program) == "python"


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("place", [0, 1, 700, CHUNK, 3 * CHUNK])
@BUILDS
def test_each_word_is_found_wherever_it_is(
    build: str, place: int, word: str, bench: Bench, bundle: Path, request: pytest.FixtureRequest
) -> None:
    """At both ends of the file, and where two pieces of it meet: before, across and after that."""
    if build == "twin":
        request.getfixturevalue("twin")
    first = place if place % CHUNK else place - len(word)
    for start in range(max(0, first), place + 1):
        write_bundle(bench, b" " * start + word.encode())
        assert create(bench, bundle, build=build) == "python", start
        write_bundle(bench, b" " * start + word[:-1].encode())
        assert create(bench, bundle, build=build) == "lowlevel/runc", start


# Text → whether it may hide one of WORDS.
ESCAPES = {
    r"\u004eVIDIA": True,
    r"\u004EVIDIA": True,
    r"\u002f": True,
    r"\u002d\u003c": True,
    r"\u003c\u003A": True,
    r"\u003d": True,
    r"\u005f": True,
    r"\u007a": True,
    r"nvidia.com\/gpu": True,
    r"\\u004e": True,
    r"\u003c\u003e\u0026": False,
    r"\u2028\u2029\u4e00\u00e9\u0130": False,
    r"\u0007\u0020\u002a\u002c": False,
    r"\u003b\u003e\u0040\u005b\u005e\u0060\u007b\u007f\u0080": False,
    r"\n\t\"\\": False,
    r"\u00": False,
    r"\u004": False,
    "\\": False,
    r"\u": False,
    r"\u00g1\u001g": False,
}


@pytest.mark.parametrize("text", ESCAPES)
@BUILDS
def test_an_escape_that_may_hide_a_word_is_python_s_affair(
    build: str, text: str, bench: Bench, bundle: Path, request: pytest.FixtureRequest
) -> None:
    """JSON can spell each character in six; what Go escapes by habit must not cost a start."""
    if build == "twin":
        request.getfixturevalue("twin")
    for start in (0, CHUNK - 5, CHUNK - 3, CHUNK):
        write_bundle(bench, b" " * start + text.encode())
        started = create(bench, bundle, build=build)
        assert started == ("python" if ESCAPES[text] else "lowlevel/runc"), start


@pytest.mark.parametrize("value", range(0x80))
def test_each_escaped_character_is_judged_as_python_does(
    value: int, bench: Bench, bundle: Path
) -> None:
    """The list of characters is written twice, since one is C."""
    data = rf'["\u{value:04x}"]'
    write_bundle(bench, data)
    expected = "python" if parse.may_ask(data.encode(), Config({}, None)) else "lowlevel/runc"
    assert create(bench, bundle) == expected


@pytest.mark.parametrize(
    ("length", "started"),
    [
        *((0, "lowlevel/runc"), (1, "lowlevel/runc"), (CHUNK - 1, "lowlevel/runc")),
        *((CHUNK, "lowlevel/runc"), (CHUNK + 1, "lowlevel/runc"), (MOST, "lowlevel/runc")),
        *((MOST + 1, "python"), (64 << 20, "python")),
    ],
)
@BUILDS
def test_a_config_of_more_than_four_mebibytes_is_python_s_affair(
    build: str,
    length: int,
    started: str,
    bench: Bench,
    bundle: Path,
    request: pytest.FixtureRequest,
) -> None:
    """No engine writes one."""
    if build == "twin":
        request.getfixturevalue("twin")
    write_bundle(bench, text_of(length) if length >= len(PASSED) else b" " * length)
    assert create(bench, bundle, build=build) == started


@pytest.mark.parametrize("kind", ["absent", "link", "dangling", "directory", "fifo", "device"])
@BUILDS
def test_a_config_that_is_no_file_is_python_s_affair(
    build: str, kind: str, bench: Bench, bundle: Path, request: pytest.FixtureRequest
) -> None:
    """It reports that, and nobody waits for a FIFO."""
    if build == "twin":
        request.getfixturevalue("twin")
    path = bundle / "config.json"
    real = path.rename(bundle / "real.json")
    if kind == "link":
        path.symlink_to(real)
    elif kind == "dangling":
        path.symlink_to("nothing")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    assert create(bench, bundle, build=build) == "python"


PLACES: dict[str, Callable[[str], list[str]]] = {
    "b": lambda place: ["-b", place, "c1"],
    "attached": lambda place: [f"--bundle={place}", "c1"],
    "one-dash": lambda place: ["-bundle", place, "c1"],
    "slash": lambda place: ["--bundle", f"{place}/", "c1"],
    "behind": lambda place: ["c1", "--bundle", place],
    "last": lambda place: ["--bundle", "/elsewhere", "-b", place, "c1"],
    "config": lambda place: ["--bundle", "/elsewhere", "--config", f"{place}/config.json", "c1"],
    "f": lambda place: ["c1", "-f", f"{place}/config.json"],
    "empty-config": lambda place: ["-b", place, "--config", "", "c1"],
}


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES.keys())
def test_the_bundle_is_where_the_runtime_looks(
    words: Callable[[str], list[str]], bench: Bench, bundle: Path
) -> None:
    """A look at another file would pass on what asks."""
    # There is another one in the working directory, and it says the opposite.
    config = bench.path("empty/config.json")
    for asks, data in ((False, PASSED), (True, '"NVIDIA_"')):
        write_bundle(bench, data)
        config.write_text(PASSED if asks else '"NVIDIA_"')
        started = bench.runtime("create", *words(str(bundle))).who
        assert started == ("python" if asks else "lowlevel/runc")


@pytest.mark.parametrize(
    "words", [["c1"], ["--bundle", "", "c1"], ["-b=", "c1"], ["-b", ".", "c1"]]
)
def test_without_a_bundle_it_is_the_working_directory(
    words: list[str], bench: Bench, bundle: Path
) -> None:
    """As for runc."""
    assert bench.runtime("create", *words, cwd=str(bundle)).who == "lowlevel/runc"
    assert bench.runtime("create", *words).who == "python"


@pytest.mark.parametrize(
    "words",
    [
        *(["--shiny"], ["-x"], ["--help"], ["-h"], ["--bundle"], ["--pid-file"], ["--no-pivot="]),
        *(["-bsomewhere"], ["---bundle"], ["--config", "/"], ["--Bundle", "/"]),
    ],
)
def test_an_option_that_is_not_known_is_python_s_affair(
    words: list[str], bench: Bench, bundle: Path
) -> None:
    """It may be one that takes another bundle; `--no-pivot=` is known, and the control."""
    outcome = bench.runtime("create", "--bundle", str(bundle), "c1", *words)
    assert outcome.who == ("lowlevel/runc" if words == ["--no-pivot="] else "python")


@BUILDS
def test_a_bundle_with_too_long_a_path_is_python_s_affair(
    build: str, bench: Bench, bundle: Path, request: pytest.FixtureRequest
) -> None:
    """A path that was cut could name another file."""
    if build == "twin":
        request.getfixturevalue("twin")
    for length in (1000, 1990, 2048, 4090, 4096, 30000):
        outcome = bench.runtime("create", f"--bundle={bundle}{'/.' * length}", build=build)
        assert outcome.who == ("lowlevel/runc" if length < 2000 else "python"), length


def test_without_a_companion_each_create_is_python_s_affair(bench: Bench, bundle: Path) -> None:
    """What an operator has configured, it alone can say; other calls know the usual runtimes."""
    assert create(bench, bundle) == "lowlevel/runc"
    bench.path("run/launcher").unlink()
    assert create(bench, bundle) == "python"
    assert bench.runtime("state", "c1").who == "lowlevel/runc"


def test_a_companion_counts_for_its_config_alone(bench: Bench, bundle: Path) -> None:
    """A missing file is recorded as missing, and is no more when one appears."""
    path = write_config(bench)
    assert create(bench, bundle) == "python"
    write_companion(bench, companion_text(path, "runc"))
    assert create(bench, bundle) == "lowlevel/runc"
    path.write_text("# changed since\n")
    assert create(bench, bundle) == "python"
    path.unlink()
    assert create(bench, bundle) == "python"
    write_companion(bench, companion_text(None, "runc"))
    assert create(bench, bundle) == "lowlevel/runc"


def test_a_companion_may_keep_every_create_from_being_passed(bench: Bench, bundle: Path) -> None:
    """Then no words can tell; other calls are passed on as ever."""
    path = write_config(bench)
    write_companion(bench, companion_text(path, "crun", words=None))
    assert create(bench, bundle) == "python"
    assert bench.runtime("state", "c1").who == "lowlevel/crun"


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (("x",), "python"),
        (("NVIDIA_", "y"), "python"),
        ((), "lowlevel/runc"),
        (tuple(f"WORD-{i}" for i in range(companion.MAX_WORDS)), "lowlevel/runc"),
        (tuple(f"WORD-{i}" for i in range(companion.MAX_WORDS + 1)), "python"),
        (("x" * companion.MAX_WORD_BYTES,), "lowlevel/runc"),
        (("x" * (companion.MAX_WORD_BYTES + 1),), "python"),
        (("\\u004e",), "python"),
        (("\\/", "NVIDIA_"), "python"),
    ],
)
@BUILDS
def test_words_beyond_the_limits_are_python_s_affair(
    build: str,
    words: tuple[str, ...],
    started: str,
    bench: Bench,
    bundle: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Buffers are fixed; a word that was forgotten would cost a container its GPU."""
    if build == "twin":
        request.getfixturevalue("twin")
    write_companion(bench, companion_text(None, "runc", words=words))
    assert create(bench, bundle, build=build) == started
    # The first ones and the last ones: each is looked for in a create of its own.
    for word in dict.fromkeys((*words[:2], *words[-2:])):
        write_bundle(bench, b" " * (CHUNK - 1) + word.encode())
        assert create(bench, bundle, build=build) == "python"


@pytest.mark.parametrize("before", [1, 2, 128, companion.MAX_WORD_BYTES - 1])
@BUILDS
def test_the_longest_word_is_found_between_two_pieces(
    build: str, before: int, bench: Bench, bundle: Path, request: pytest.FixtureRequest
) -> None:
    """However much of it is in the first one."""
    if build == "twin":
        request.getfixturevalue("twin")
    word = "".join(f"{i:02x}" for i in range(companion.MAX_WORD_BYTES // 2))
    write_companion(bench, companion_text(None, "runc", words=(word,)))
    for end in (CHUNK, 2 * CHUNK):
        write_bundle(bench, b" " * (end - before) + word.encode())
        assert create(bench, bundle, build=build) == "python"
        write_bundle(bench, b" " * (end - before) + word[:-1].encode())
        assert create(bench, bundle, build=build) == "lowlevel/runc"


@pytest.mark.parametrize(
    ("value", "passed", "asking"),
    [
        ("off", ("python", "python"), "python"),
        ("only", ("lowlevel/runc", "lowlevel/runc"), None),
        *((other, ("lowlevel/runc", "lowlevel/runc"), "python") for other in ("", "on", "offf")),
    ],
)
def test_a_variable_says_who_answers(
    value: str, passed: tuple[str, str], asking: str | None, bench: Bench, bundle: Path
) -> None:
    """So that a test can prove it."""
    env = bench.environment(GPURUNTIME_FAST=value)
    assert create(bench, bundle, env=env) == passed[0]
    assert bench.runtime("state", "c1", env=env).who == passed[1]
    write_bundle(bench, '"NVIDIA_"')
    outcome = bench.runtime("create", "--bundle", str(bundle), "c1", env=env)
    assert outcome.who == asking
    if asking is None:
        assert outcome.returncode == 1
        assert outcome.stderr.decode() == (
            "gpu-container-runtime: runtime: only Python can answer this call, and "
            "GPURUNTIME_FAST=only forbids it\nhint: unset GPURUNTIME_FAST, which is for tests\n"
        )


@pytest.mark.parametrize("value", ["off", "only"])
def test_no_hook_reads_that_variable(value: str, bench: Bench) -> None:
    """Its environment is the image's."""
    assert bench.hook("update-container", env={"GPURUNTIME_FAST": value}).who == "python"


def test_closed_descriptors_keep_nothing_from_being_passed(bench: Bench, bundle: Path) -> None:
    """Files that are looked at get the lowest numbers then, and give them back."""
    write_companion(bench, companion_text(write_config(bench), "runc"))
    words = ("create", "--bundle", str(bundle), "c1")
    outcome = bench.runtime(*words, habits=("no-stdio",))
    assert outcome.who == "lowlevel/runc"
    direct = bench.start([str(bench.path("lowlevel/runc")), *words], habits=("no-stdio",))
    assert outcome.record.descriptors.keys() == direct.record.descriptors.keys()


def test_a_mebibyte_of_arguments_is_passed_on(bench: Bench, bundle: Path) -> None:
    """Argument lists are limited by the kernel alone."""
    many = ["x" * 1023] * 1024
    outcome = bench.runtime("create", "--bundle", str(bundle), *many)
    assert outcome.who == "lowlevel/runc"
    assert outcome.record.arguments[4:] == [word.encode() for word in many]


PIECES = st.sampled_from(
    [
        *WORDS,
        *(word[:-1] for word in WORDS),
        *(word[1:] for word in WORDS),
        *("N", "NV", "nv", "\\\\", "\\n", "\\u004e", "\\u003c", "\\u00e9", "\\/", "/", " ", "é"),
    ]
)


@pytest.mark.property
@settings(
    max_examples=tries(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pieces=st.lists(PIECES, max_size=12), start=st.sampled_from([0, CHUNK - 20, CHUNK - 3]))
def test_the_launcher_finds_what_is_there(
    pieces: list[str], start: int, bench: Bench, bundle: Path
) -> None:
    """Whatever the spelling; and only an escape makes it see what is not."""
    data = b'"%s"' % (" " * start + "".join(pieces)).encode()
    write_bundle(bench, data)
    text: str = json.loads(data)
    passed = create(bench, bundle) == "lowlevel/runc"
    assert not (passed and any(word in text for word in WORDS))
    assert passed or b"\\" in data or any(word in text for word in WORDS)
