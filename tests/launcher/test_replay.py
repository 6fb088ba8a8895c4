# SPDX-License-Identifier: Apache-2.0
"""The launcher replays the edits of Python, with the same bytes as Python, or not at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from effort import tries
from fuzz import replay as generated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher import replays
from launcher.replays import Scene

from gpuruntime.launcher import replay
from gpuruntime.request import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.conftest import Bench

ENGINES = ("containerd", "cri", "docker", "podman")
BUILDS = ("plain", "twin")
LEAST_REPLAYED = 0.3


@pytest.fixture(params=BUILDS)
def scene(request: pytest.FixtureRequest, bench: Bench) -> Scene:
    """Return a machine with a spec, and a launcher, also under the sanitisers."""
    if request.param == "twin":
        request.getfixturevalue("twin")
    return Scene.make(bench, request.param)


@pytest.fixture
def plain(bench: Bench) -> Scene:
    """Return a machine with a spec, and the launcher."""
    return Scene.make(bench, "plain")


def engines_own(document: dict[str, Any]) -> bytes:
    """Return *document* as engines write it."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace(">", "\\u003e").encode() + b"\n"


def another(data: bytes) -> bytes:
    """Return the config.json that an engine writes for another container of the same image."""
    document = json.loads(data)
    document["process"]["args"][-1] = 'a && "b" > c\\ \t'
    env = document["process"]["env"]
    document["process"]["env"] = [
        entry if "NVIDIA" in entry else f"{entry.partition('=')[0]}=other" for entry in env
    ]
    document["mounts"][-1]["source"] = "/srv/of/another"
    parent, colon, name = document["linux"]["cgroupsPath"].rpartition(":")
    document["linux"]["cgroupsPath"] = f"{parent}{colon}another" if name else "/another"
    return engines_own(document)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_engines_write_is_given_again(scene: Scene, engine: str) -> None:
    """To the same container, and to another that asks for the same."""
    data = engines_own(json.loads(replays.recorded(engine)))
    # The control: without a record, the launcher starts Python.
    assert not scene.replays(data)
    edited = scene.remember(data)
    assert edited is not None
    assert edited != data
    assert scene.replays(data)
    assert scene.replays(another(data))
    assert scene.written != edited


def test_answers_of_several_containers_are_kept(scene: Scene) -> None:
    """The last of them, each for what it was for."""
    documents = []
    for count in range(replay.MAX_FILES + 3):
        document = json.loads(replays.recorded("docker"))
        document["process"]["user"] = {"uid": count, "gid": 0}
        documents.append(json.dumps(document).encode())
        assert scene.remember(documents[-1]) is not None
    replayed = [scene.replays(data) for data in documents]
    assert not any(replayed[:3])
    assert all(replayed[3:])


@pytest.mark.property
@pytest.mark.parametrize("build", BUILDS)
def test_no_other_bytes_than_python_s(
    build: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """For generated containers: the same bytes or none, and sometimes the same."""
    if build == "twin":
        request.getfixturevalue("twin")
    scene = Scene.make(bench, build)
    replayed: list[bool] = []

    @settings(
        max_examples=tries(200),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        first = generated._container(rng)
        second = first
        for _ in range(rng.randint(0, 4)):
            second = generated._with_other_holes(rng, second)
        if rng.random() < 0.2:
            second = generated._freely_changed(rng, second)
        if rng.random() < 0.2:
            second = generated._changed(rng, second)
        if rng.random() < 0.2:
            second = generated._oddly_changed(rng, second)
        how = rng.randrange(4)
        scene.remember(generated._spelled(rng, first, how))
        try:
            data = generated._spelled(rng, second, how)
        except UnicodeEncodeError:
            return
        replayed.append(scene.replays(data))

    check()
    share = sum(replayed) / len(replayed)
    print(f"{build}: {len(replayed)} containers, {share:.0%} replayed")
    assert share >= LEAST_REPLAYED


def _user(document: dict[str, Any]) -> None:
    document["process"]["user"]["uid"] = 1000


def _no_user(document: dict[str, Any]) -> None:
    del document["process"]["user"]


def _privileged(document: dict[str, Any]) -> None:
    document["process"]["capabilities"]["bounding"].append("CAP_SYS_ADMIN")


def _device(document: dict[str, Any]) -> None:
    node = {"path": "/dev/nvidiactl", "type": "c", "major": 1, "minor": 3}
    document["linux"]["devices"] = [node]


def _rule(document: dict[str, Any]) -> None:
    document["linux"]["resources"]["devices"].append({"allow": True, "access": "rwm"})


def _asks_again(document: dict[str, Any]) -> None:
    document["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=2")


def _capability(document: dict[str, Any]) -> None:
    document["process"]["env"].append("NVIDIA_DRIVER_CAPABILITIES=all")


def _no_name(document: dict[str, Any]) -> None:
    document["process"]["env"].append("NOTHING")


def _volume(document: dict[str, Any]) -> None:
    place = "/var/run/nvidia-container-devices/2"
    document["mounts"].append({"source": "/dev/null", "destination": place})


def _annotation(document: dict[str, Any]) -> None:
    document["annotations"] = {"cdi.k8s.io/x": "nvidia.com/gpu=2"}


def _same_place(document: dict[str, Any]) -> None:
    document["mounts"].append({"source": "/own", "destination": "/usr/bin/nvidia-smi"})


def _odd_place(document: dict[str, Any]) -> None:
    document["mounts"].append({"source": "/own", "destination": "/data//x"})


def _read_only(document: dict[str, Any]) -> None:
    document["root"]["readonly"] = not document["root"].get("readonly")


def _systemd(document: dict[str, Any]) -> None:
    document["linux"]["cgroupsPath"] = "system.slice:docker:x"


def _user_namespace(document: dict[str, Any]) -> None:
    document["linux"]["namespaces"].append({"type": "user"})


def _engine_hook(document: dict[str, Any]) -> None:
    hook = {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}
    document.setdefault("hooks", {}).setdefault("prestart", []).append(hook)


def _misspelled(document: dict[str, Any]) -> None:
    document["linux"]["Devices"] = []


def _fraction(document: dict[str, Any]) -> None:
    document["linux"]["resources"]["share"] = 0.5


def _no_mounts(document: dict[str, Any]) -> None:
    del document["mounts"]


def _deep(document: dict[str, Any]) -> None:
    document["x"] = json.loads("[" * 70 + "]" * 70)


def _long_s(document: dict[str, Any]) -> None:
    # To Go this is "hooks".
    document["hook\u017f"] = {}


def _kelvin(document: dict[str, Any]) -> None:
    document["hoo\u212as"] = {}


CHANGES = (
    *(_user, _no_user, _privileged, _device, _rule, _asks_again, _capability, _no_name, _volume),
    *(_annotation, _same_place, _odd_place, _systemd, _user_namespace, _engine_hook, _misspelled),
    *(_read_only, _fraction, _no_mounts, _deep, _long_s, _kelvin),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.lstrip("_"))
def test_what_an_answer_depends_on_is_compared(
    scene: Scene, change: Callable[[dict[str, Any]], None]
) -> None:
    """One change that may change the result, or that the launcher does not understand."""
    data = replays.recorded("docker")
    scene.remember(data)
    assert scene.replays(data)
    document = json.loads(data)
    scene.remember(engines_own(document))
    assert scene.replays(engines_own(document))
    change(document)
    assert not scene.replays(engines_own(document))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"a":1,"a":1}', id="twice"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"{}\0{}", id="nul"),
        pytest.param(b'{"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"', id="cut"),
        pytest.param(b'{"x":"' + b"NVIDIA_" * 200_000 + b'"}', id="large"),
        pytest.param(b'{"NVIDIA_":' + b"[" * 100_000, id="deep"),
        pytest.param(b'{"NVIDIA_":[' + b"0," * 100_000 + b"0]}", id="many"),
    ],
)
def test_what_is_no_container_is_python_s(scene: Scene, data: bytes) -> None:
    """Whatever it is, it stays as it is."""
    scene.remember(replays.recorded("docker"))
    who = scene.create(data).who
    assert who in ("python", "lowlevel/runc")
    assert scene.written == data
    # Without one of the words, it is not looked into.
    assert (who == "python") is any(word in data for word in parse.triggers(scene.config) or ())


@pytest.mark.parametrize("kind", ["link", "link to a pipe", "link to a device", "pipe", "device"])
def test_a_config_json_that_is_no_file_is_python_s(scene: Scene, kind: str) -> None:
    """It is not followed, waited for or replaced."""
    data = replays.recorded("docker")
    scene.remember(data)
    scene.create(data)
    path, other = scene.bundle / "config.json", scene.bench.path("other/elsewhere")
    path.unlink()
    if kind == "link":
        other.write_bytes(data)
    elif kind == "link to a pipe":
        os.mkfifo(other)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        other = Path("/dev/zero")
    if kind == "device" and os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, other.stat().st_rdev)
    elif kind != "pipe":
        path.symlink_to(other)
    before = path.lstat()
    assert scene.start().who == "python"
    assert path.lstat() == before
    assert [entry.name for entry in scene.bundle.iterdir()] == ["config.json"]
    if kind == "link":
        assert other.read_bytes() == data


def _gone(runtimes: Path) -> None:
    (runtimes / "runc").unlink()


def _a_link(runtimes: Path) -> None:
    (runtimes / "runc").unlink()
    (runtimes / "runc").symlink_to("crun")


def _no_program(runtimes: Path) -> None:
    (runtimes / "runc").chmod(0o644)


@pytest.mark.parametrize(
    "change", [_gone, _a_link, _no_program], ids=lambda change: change.__name__.lstrip("_")
)
def test_an_answer_for_a_read_only_root_is_for_its_runtime(
    plain: Scene, change: Callable[[Path], None]
) -> None:
    """For some runtimes there is work to be done ahead; another root does not matter."""
    data = replays.recorded("docker")
    document = json.loads(data)
    document["root"]["readonly"] = True
    read_only = json.dumps(document).encode()
    for each in (data, read_only):
        plain.remember(each)
        assert plain.replays(each)
    change(plain.bench.path("lowlevel"))
    assert plain.create(read_only).who == "python"
    assert plain.written == read_only
    assert plain.create(data).who in ("lowlevel/runc", "lowlevel/crun")
    plain.remember(read_only)
    assert plain.create(read_only).who in ("lowlevel/runc", "lowlevel/crun")


def test_mode_and_owner_stay(scene: Scene) -> None:
    """As Python keeps them."""
    data = replays.recorded("docker")
    scene.remember(data)
    scene.create(data)
    path = scene.bundle / "config.json"
    path.write_bytes(data)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 2345)
    before = replays.mode_of(path)
    assert scene.start().who == "lowlevel/runc"
    assert scene.written != data
    assert replays.mode_of(path) == before


def test_the_file_of_the_engine_s_working_directory(plain: Scene) -> None:
    """Without --bundle, as runc has it."""
    data = replays.recorded("containerd")
    edited = plain.remember(data)
    plain.create(data)
    (plain.bundle / "config.json").write_bytes(data)
    outcome = plain.bench.runtime("create", "c1", cwd=str(plain.bundle))
    assert outcome.who == "lowlevel/runc"
    assert plain.written == edited


# How the launcher is called otherwise than before: options, variables.
CALLS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "debug": (("--debug",), {}),
    "off": ((), {"GPURUNTIME_FAST": "off"}),
    "PATH": ((), {"PATH": "/nowhere"}),
    "config": ((), {"GPURUNTIME_CONFIG": "/dev/null"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_kind_is_python_s(plain: Scene, name: str) -> None:
    """The record does not apply to it."""
    options, variables = CALLS[name]
    data = replays.recorded("docker")
    plain.remember(data)
    assert plain.replays(data)
    if "PATH" in variables:
        variables = {"PATH": f"{plain.bench.environment()['PATH']}:/nowhere"}
    assert not plain.replays(data, *options, **variables)


def test_another_file_than_config_json_is_python_s(plain: Scene) -> None:
    """The option --config of crun."""
    data = replays.recorded("docker")
    plain.remember(data)
    plain.create(data)
    other = plain.bundle / "config.json"
    other.write_bytes(data)
    bundle = ("--bundle", str(plain.bundle))
    outcome = plain.bench.runtime("create", *bundle, "--config", str(other), "c1")
    assert outcome.who == "python"
    assert plain.written == data


def test_only_says_that_nothing_is_kept(plain: Scene) -> None:
    """GPURUNTIME_FAST=only makes a call that needs Python an error, and no other call."""
    data = replays.recorded("docker")
    outcome = plain.create(data, GPURUNTIME_FAST="only")
    assert (outcome.returncode, outcome.who) == (1, None)
    assert plain.written == data
    plain.remember(data)
    assert plain.replays(data, GPURUNTIME_FAST="only")


@pytest.mark.parametrize(
    ("name", "value"), [("program", "gpu-container-runtime"), ("identity", "1:2"), ("path", "/x")]
)
def test_answers_are_for_the_caller_that_they_were_given_to(
    plain: Scene, name: str, value: str
) -> None:
    """By another name there are other modes; another launcher may have other code behind it."""
    data = replays.recorded("docker")
    plain.remember(data, plain.caller(**{name: value}))
    assert not plain.replays(data)


@pytest.mark.parametrize("habit", ["", "ignore-pipe"])
def test_python_is_told_what_is_not_known(plain: Scene, habit: str) -> None:
    """By a bit beside the ignored signals: where an answer could be used the next time."""
    del habit
    data = replays.recorded("docker")
    arguments = plain.create(data).record.arguments
    assert arguments[arguments.index(b"-c") + 2] == b"4"
    # Too large for a file.
    large = data[:-2] + b" " * (replay.MAX_BYTES + 1) + data[-2:]
    arguments = plain.create(large).record.arguments
    assert arguments[arguments.index(b"-c") + 2] == b"0"


def test_without_a_low_level_runtime_nothing_is_changed(plain: Scene) -> None:
    """It is looked for before anything is written."""
    data = replays.recorded("docker")
    plain.remember(data)
    shutil.rmtree(plain.bench.path("lowlevel"))
    outcome = plain.create(data)
    assert outcome.who == "python"
    assert plain.written == data


def test_what_cannot_be_executed_was_given_all(plain: Scene) -> None:
    """Python, which reports it, finds a container that asks for nothing more."""
    data = replays.recorded("docker")
    edited = plain.remember(data)
    assert edited is not None
    plain.bench.path("lowlevel/runc").write_bytes(b"\x7fELF")
    outcome = plain.create(data)
    assert outcome.who == "python"
    assert plain.written == edited
    assert plain.by_python(edited) == edited
