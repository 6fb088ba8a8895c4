# SPDX-License-Identifier: Apache-2.0
"""The companion: what Python writes is what the launcher reads, and it is there when needed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuruntime.config import Config
from gpuruntime.launcher import companion
from gpuruntime.request import parse

TREE = Path(__file__).parents[4]
BIN = TREE / ".venv" / "bin"
RUNTIME = "nvidia-container-runtime"
PREFIXES = f"{RUNTIME}.modes.cdi.annotation-prefixes"
# Its own /run, and no config file of this machine's; both go away with the process.
SETUP = """
mount -t tmpfs -o mode=755 run /run
for directory in /etc/gpuruntime /etc/nvidia-container-runtime; do
  [ ! -d "$directory" ] || mount -t tmpfs none "$directory"
done
eval "$1"
"""
OWN_RUN = ("unshare", "--mount", "--propagation", "private", "sh", "-euc", SETUP, "sh")
# The start path's interpreter is gone: who still answers is the launcher alone.
NO_PYTHON = "mount --bind /bin/false /usr/bin/python3"
OTHER = '{"process": {"env": ["PATH=/bin"]}}'

system = pytest.mark.system


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run *script* with a /run of its own."""
    return subprocess.run(
        [*OWN_RUN, script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment},
    )


@pytest.fixture
def lowlevel(tmp_path: Path) -> Path:
    """Return a directory with a runc that says how it was called."""
    directory = tmp_path / "low level"
    directory.mkdir()
    runc = directory / "runc"
    runc.write_text('#!/bin/sh\necho "runtime $*"\n')
    runc.chmod(0o755)
    return directory


@pytest.fixture
def configured(tmp_path: Path, lowlevel: Path) -> Path:
    """Return a config file that names one recording runtime, which is there."""
    toml = tmp_path / "config.toml"
    toml.write_text(f'[{RUNTIME}]\nruntimes = ["no-such", "{lowlevel}/runc"]\n')
    return toml


@pytest.fixture
def create(tmp_path: Path) -> str:
    """Return the command that creates a container which asks for nothing."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(OTHER)
    return f"'{BIN}/gpu-container-runtime' create --bundle '{bundle}' one"


def called(create: str) -> str:
    """Return what the recording runtime says of *create*."""
    return f"runtime {' '.join(shlex.split(create)[1:])}\n"


@system
def test_the_launcher_believes_a_compiled_config(configured: Path, create: str) -> None:
    """Then other calls, and creates that ask for nothing, go straight to the runtime."""
    done = run(
        f"'{BIN}/gpuruntime' config compile; {NO_PYTHON}; "
        f"'{BIN}/gpu-container-runtime' state one; {create}",
        GPURUNTIME_CONFIG=str(configured),
    )
    assert (done.returncode, done.stdout) == (0, f"runtime state one\n{called(create)}"), done
    assert done.stderr == f'compiled "{configured}"\n'


@system
@pytest.mark.parametrize("python", [True, False])
def test_a_changed_config_is_python_s_affair(configured: Path, python: bool) -> None:
    """The control: the launcher alone does not believe it; Python compiles it again."""
    done = run(
        f"'{BIN}/gpuruntime' config compile; echo '# changed' >> '{configured}'; "
        f"{':' if python else NO_PYTHON}; '{BIN}/gpu-container-runtime' state one",
        GPURUNTIME_CONFIG=str(configured),
    )
    assert done.stdout == ("runtime state one\n" if python else ""), done.stderr
    assert (done.returncode == 0) is python


@system
@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("name", ["gpu-container-runtime", f"{RUNTIME}.legacy"])
def test_after_the_first_create_the_next_are_passed_on(
    name: str, has_config: bool, configured: Path, lowlevel: Path, create: str, tmp_path: Path
) -> None:
    """Also where there is no config file, which is how most begin; whatever mode it was for."""
    (tmp_path / name).symlink_to((BIN / "gpu-container-runtime").resolve())
    first = create.replace(f"{BIN}/gpu-container-runtime", f"{tmp_path}/{name}")
    environment = {"PATH": f"{lowlevel}:/usr/sbin:/usr/bin:/sbin:/bin"}
    if has_config:
        environment["GPURUNTIME_CONFIG"] = str(configured)
    script = f"{first}; ls -l /run/gpuruntime/launcher >&2; {NO_PYTHON}; {create}"
    done = run(script, **environment)
    assert (done.returncode, done.stdout) == (0, called(create) * 2), done.stderr
    assert done.stderr.startswith("-rw-r--r-- ")
    # The control: the first one had to have Python.
    assert run(f"{NO_PYTHON}; {create}", **environment).returncode != 0


@system
def test_without_a_config_file_the_defaults_can_be_compiled(lowlevel: Path, create: str) -> None:
    """Who packages a node image does so before the first container."""
    done = run(
        f"'{BIN}/gpuruntime' config compile; {NO_PYTHON}; {create}",
        PATH=f"{lowlevel}:/usr/sbin:/usr/bin:/sbin:/bin",
    )
    assert (done.returncode, done.stdout) == (0, called(create)), done.stderr
    assert done.stderr == "no config file: the defaults are in force\n"


SPOILED = {
    "missing": "rm $companion",
    "empty": ": > $companion",
    "cut": "truncate --size=40 $companion",
    "of another format": "sed -i s/launcher.3/launcher\\ 2/ $companion",
    "of another version": "sed -i '1s/$/.1/' $companion",
    "stale": "sed -i '2s/.*/config \\/elsewhere/' $companion",
    "a link": "mv $companion /run/other; ln -s /run/other $companion",
    "a FIFO": "rm $companion; mkfifo $companion",
    "for others to write": "chmod 666 $companion",
    "another's": "chown 1234 $companion",
    "of a directory that is gone": "rm -r /run/gpuruntime",
}


@system
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_companion_that_is_not_believed_is_made_again(
    spoil: str, lowlevel: Path, create: str
) -> None:
    """One create is slow, each after it is not; and no call is ever wrong."""
    spoiled = f"companion=/run/gpuruntime/launcher; {create}; {spoil}"
    path = {"PATH": f"{lowlevel}:/usr/sbin:/usr/bin:/sbin:/bin"}
    done = run(f"{spoiled}; {create}; {NO_PYTHON}; {create}", **path)
    assert (done.returncode, done.stdout, done.stderr) == (0, called(create) * 3, "")
    # The control: it was spoiled.
    assert run(f"{spoiled}; {NO_PYTHON}; {create}", **path).returncode != 0


UNWRITABLE = {
    "read-only": "mount -o remount,ro /run",
    "full": "cat /dev/zero > /run/x || :",
    "a directory in its place": "mkdir -p /run/gpuruntime/launcher",
    "a file in the place of its directory": "touch /run/gpuruntime",
    "a directory for others to write": "mkdir -m 777 /run/gpuruntime",
}


@system
@pytest.mark.parametrize("spoil", UNWRITABLE.values(), ids=UNWRITABLE.keys())
def test_where_no_companion_can_be_written_python_answers(
    spoil: str, lowlevel: Path, create: str
) -> None:
    """Slower, and without a word."""
    small = "mount -t tmpfs -o size=64k,nr_inodes=16,mode=755 small /run"
    done = run(
        f"{small}; {{ {spoil}; }} 2>/dev/null; {create}; {create}",
        PATH=f"{lowlevel}:/usr/sbin:/usr/bin:/sbin:/bin",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, called(create) * 2, "")


@system
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("rm $config; truncate --size=64M $config", "larger than 16777216 bytes"),
        ("rm $config; mkfifo $config", "not a regular file"),
        ("rm $config; mkdir $config", "not a regular file"),
        ("mv $config /run/x; ln -s /run/x $config", "Too many levels of symbolic links"),
    ],
)
def test_a_config_json_that_is_none_is_one_line(
    kind: str, reason: str, lowlevel: Path, create: str, tmp_path: Path
) -> None:
    """The launcher leaves it to Python, which reads no more than there may be, and says so."""
    config = tmp_path / "bundle" / "config.json"
    done = run(
        f"config='{config}'; {create}; {kind}; {create}",
        PATH=f"{lowlevel}:/usr/sbin:/usr/bin:/sbin:/bin",
    )
    assert (done.returncode, done.stdout) == (1, called(create))
    assert done.stderr == (
        f'gpu-container-runtime: bundle: cannot read "{config}": {reason}\n'
        "hint: give the bundle a config.json that is a file\n"
    )


def lines(config: Config, stamp: list[Any] | None = None) -> list[str]:
    """Return the lines of the companion for *config*."""
    data = companion.content(config, stamp)
    assert data is not None
    return data.decode().splitlines()


def test_the_words_are_those_that_a_request_is_looked_for_by() -> None:
    """A word that the launcher did not know would cost a container its GPU."""
    config = Config({"swarm-resource": "DOCKER_RESOURCE_GPU, OTHER", PREFIXES: ["x.io/"]}, None)
    words = parse.triggers(config)
    assert words is not None
    assert lines(config) == [
        *(companion.HEAD, "missing", "runtime runc", "runtime crun", "creates pass"),
        *(f"word {word.decode()}" for word in words),
        "end",
    ]
    assert {b"DOCKER_RESOURCE_GPU", b"OTHER", b"x.io/"} < set(words)
    assert b"cdi.k8s.io/" not in words


def test_the_words_are_all_that_the_reference_names() -> None:
    """A too wide list costs time, a too narrow one a GPU."""
    expected = {
        *("NVIDIA_", "CUDA_VERSION", "cdi.k8s.io/", "nvidia.com/", "nvidia-container-devices"),
        *("nvidia-container-runtime-hook", "nvidia-container-toolkit"),
        *("gpu-container-runtime-hook", "gpu-cdi-hook", "nvidia-cdi-hook"),
    }
    assert {word.encode() for word in expected} == set(parse.triggers(Config({}, None)) or ())


@pytest.mark.parametrize(
    "values",
    [
        {f"{RUNTIME}.mode": "csv"},
        {PREFIXES: [""]},
        {PREFIXES: ["é.io/"]},
        {PREFIXES: ["a b"]},
        {PREFIXES: ['"']},
        {"swarm-resource": "X"},
        {"swarm-resource": "X" * 257},
        {"swarm-resource": "A\nB"},
        {PREFIXES: [f"x{i}.io/" for i in range(200)]},
    ],
)
def test_where_words_cannot_tell_no_create_is_passed_on(values: dict[str, Any]) -> None:
    """Whatever it has, it is Python that looks; and what Python looks for is the same."""
    config = Config(values, None)
    assert lines(config)[-2:] == ["creates python", "end"]
    if parse.triggers(config) is None:
        assert parse.may_ask(b"{}", config)


def test_an_empty_prefix_makes_every_annotation_ask() -> None:
    """It is the operator's word, if a strange one."""
    config = Config({PREFIXES: [""]}, None)
    document = {"annotations": {"a": "vendor.com/class=x"}}
    assert parse.from_oci(document, config)
    assert parse.may_ask(json.dumps(document).encode(), config)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({f"{RUNTIME}.runtimes": ["a\nb"]}, None),
        ({f"{RUNTIME}.runtimes": [""]}, None),
        ({}, "/a\nb"),
        ({f"{RUNTIME}.runtimes": ["x" * 4000] * 20}, None),
    ],
)
def test_what_the_format_cannot_say_is_not_written(
    values: dict[str, Any], path: str | None
) -> None:
    """Half of it would be another config."""
    assert companion.content(Config(values, path), None if path is None else [path, 1, 2]) is None


def test_a_path_of_any_bytes_is_written_as_it_is() -> None:
    """The launcher compares bytes."""
    path = os.fsdecode(b"/\xff\xc3\xa9")
    data = companion.content(Config({}, path), [path, 1, 2, 3, 4])
    assert data is not None
    assert data.partition(b"\n")[2].startswith(b"config /\xff\xc3\xa9\nstat 1 2 3 4\n")
