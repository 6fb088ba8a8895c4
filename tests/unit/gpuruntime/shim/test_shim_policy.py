# SPDX-License-Identifier: Apache-2.0
"""The shim grants what the config file allows, and says what it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuruntime.config import Config
from gpuruntime.errors import BundleError, UnresolvedDeviceError
from gpuruntime.launcher import replay
from gpuruntime.log import Log
from gpuruntime.oci import argv, lowlevel
from gpuruntime.shim import main
from gpuruntime.shim.host import ShimHost
from gpuruntime.snapshots import config_snapshot, storage
from gpuruntime.snapshots.grants import SavedGrants

SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {"name": name, "containerEdits": {"env": [f"GPU_{name}=1"]}} for name in ("0", "1", "all")
    ],
    "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
}
ENV = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
MOUNT = {"destination": "/var/run/nvidia-container-devices/1", "source": "/dev/null"}


def created(place: Path, document: dict[str, Any], **values: Any) -> tuple[list[str], str]:
    """Return the environment after a create of *document* under *values*, and the log."""
    bundle, specs, log = place / "bundle", place / "cdi", place / "log"
    bundle.mkdir()
    specs.mkdir(exist_ok=True)
    specs.chmod(0o755)
    (specs / "nvidia.json").write_text(json.dumps(SPEC))
    (bundle / "config.json").write_text(json.dumps(document))
    command = argv.parse(["--log", str(log), "create", "--bundle", str(bundle), "id"])
    runtime = "nvidia-container-runtime"
    cdi = {f"{runtime}.mode": "cdi", f"{runtime}.modes.cdi.spec-dirs": [str(specs)]}
    config = Config({**cdi, **values}, None)
    records = Log(str(log), json_format=False)
    launcher = "/usr/bin/gpu-container-runtime"
    host = ShimHost(config, sys.executable, launcher, records, SavedGrants(str(place)))
    main.inject(command, config, host, records, "/usr/bin/runc")
    result = json.loads((bundle / "config.json").read_text())
    text = log.read_text() if log.exists() else ""
    return [entry for entry in result["process"].get("env", []) if "GPU_" in entry], text


def asking(*env: str, **members: Any) -> dict[str, Any]:
    """Return an OCI config."""
    return {"ociVersion": "1.0.2", "process": {"env": list(env)}, **members}


def test_the_two_keys_decide(tmp_path: Path) -> None:
    """Policy "mounts only": the image's variable gives nothing, and that is said."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    only_mounts = {ENV: False, MOUNTS: True}
    env, log = created(tmp_path / "a", asking("NVIDIA_VISIBLE_DEVICES=all"), **only_mounts)
    assert env == []
    assert "unprivileged container" in log
    document = asking("NVIDIA_VISIBLE_DEVICES=all", mounts=[MOUNT])
    env, log = created(tmp_path / "b", document, **only_mounts)
    assert env == ["GPU_1=1"]


def test_by_default_mounts_are_ignored_and_said(tmp_path: Path) -> None:
    """Anybody who may write a pod could ask in that way."""
    env, log = created(tmp_path, asking("NVIDIA_VISIBLE_DEVICES=0", mounts=[MOUNT]))
    assert env == ["GPU_0=1"]
    assert "as-volume-mounts" in log


def test_no_spec_directories_are_the_usual_ones(tmp_path: Path) -> None:
    """The error names them."""
    with pytest.raises(UnresolvedDeviceError, match='"/etc/cdi", "/var/run/cdi"'):
        created(
            tmp_path,
            asking("NVIDIA_VISIBLE_DEVICES=example.com/none=x"),
            **{"nvidia-container-runtime.modes.cdi.spec-dirs": []},
        )


@pytest.mark.parametrize(
    ("document", "values", "expected"),
    [
        (asking("CUDA_VERSION=7.5"), {}, ["GPU_all=1"]),
        (asking("RES=1"), {"swarm-resource": "RES"}, ["GPU_1=1"]),
        (asking(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=1"}), {}, ["GPU_1=1"]),
        (
            asking(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=1"}),
            {"nvidia-container-runtime.modes.cdi.annotation-prefixes": ["my.org/"]},
            [],
        ),
        (
            asking(
                "NVIDIA_VISIBLE_DEVICES=void", annotations={"cdi.k8s.io/x": "nvidia.com/gpu=1"}
            ),
            {},
            [],
        ),
    ],
)
def test_the_ways_to_ask(
    tmp_path: Path, document: dict[str, Any], values: dict[str, Any], expected: list[str]
) -> None:
    """Through config.json, as the low-level runtime will read it."""
    assert created(tmp_path, document, **values)[0] == expected


def test_what_cannot_be_kept_for_the_launcher_stops_no_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is prepared by then; of what went wrong there is a record for who looks for it."""
    specs = tmp_path / "cdi"
    specs.mkdir(mode=0o755)
    (specs / "nvidia.json").write_text(json.dumps(SPEC))
    bundle, log = tmp_path / "config.json", tmp_path / "log"
    bundle.write_text(json.dumps(asking("NVIDIA_VISIBLE_DEVICES=0")))
    runtime = "nvidia-container-runtime"
    config = Config(
        {
            f"{runtime}.mode": "cdi",
            f"{runtime}.modes.cdi.spec-dirs": [str(specs)],
            f"{runtime}.log-level": "debug",
        },
        None,
    )
    executed = []

    def fail(*_: object) -> None:
        raise KeyError("SECRET")

    def execute(*call: object) -> None:
        executed.append(call)
        raise SystemExit(0)

    monkeypatch.setattr(config_snapshot, "load", lambda *_: config)
    monkeypatch.setattr(storage, "RUN_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setattr(main, "SavedGrants", lambda: SavedGrants(str(tmp_path / "run")))
    monkeypatch.setattr(main, "_restore", lambda _: None)
    monkeypatch.setattr(lowlevel, "find", lambda *_: "/usr/bin/runc")
    monkeypatch.setattr(lowlevel, "execute", execute)
    monkeypatch.setattr(replay, "keep", fail)
    arguments = ["--log", str(log), "create", "--bundle", str(tmp_path), "c1"]
    monkeypatch.setattr(sys, "argv", ["-c", "4", "1:2", "gpu-container-runtime", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main(sys.executable)
    assert ended.value.code == 0
    assert executed == [("/usr/bin/runc", arguments)]
    assert "GPU_0=1" in bundle.read_text()
    text = log.read_text()
    assert "level=error" not in text
    assert "nothing is kept for the launcher: KeyError" in text
    assert "SECRET" not in text


# What others may read, though we do not.
LARGE = {
    "digits": b"9" * 5000,
    "depth": b"[" * 5000 + b"]" * 5000,
}


def outcome(place: Path, data: bytes) -> main.Outcome:
    """Return the outcome of a create of *data*, which the shim leaves as it is."""
    (place / "config.json").write_bytes(data)
    command = argv.parse(["create", "--bundle", str(place), "id"])
    config, log = Config({}, None), Log(None, json_format=False)
    host = ShimHost(config, sys.executable, "gpu-container-runtime", log, SavedGrants(str(place)))
    try:
        return main.inject(command, config, host, log, "/usr/bin/runc")
    finally:
        assert (place / "config.json").read_bytes() == data


@pytest.mark.parametrize("name", LARGE)
def test_what_asks_for_nothing_is_not_refused_for_being_large(tmp_path: Path, name: str) -> None:
    """It is the low-level runtime's; what asks is read to the end."""
    assert outcome(tmp_path, b'{"x":%s}' % LARGE[name]) == main.Outcome(main.PASS)
    with pytest.raises(BundleError):
        outcome(tmp_path, b'{"NVIDIA_":%s}' % LARGE[name])


@pytest.mark.parametrize("data", [b"", b"{", b'{"a":1,}', b"{} x"])
def test_what_is_no_json_is_refused_whatever_it_asks_for(tmp_path: Path, data: bytes) -> None:
    """With the place where it is none."""
    with pytest.raises(BundleError, match="line 1 column"):
        outcome(tmp_path, data)


@pytest.mark.parametrize(
    ("next_time", "flags", "is_news"),
    [
        (main.PASS, 0, True),
        (main.REPLAY, 4, True),
        (main.REPLAY, 3, False),
        (main.PYTHON, 7, False),
    ],
)
def test_when_the_launcher_gets_new_instructions(
    next_time: str, flags: int, is_news: bool
) -> None:
    """For what it may pass on always; for a replay if it said that it lacks the record."""
    assert main.Outcome(next_time).is_news(flags) is is_news
