# SPDX-License-Identifier: Apache-2.0
"""Which answers are kept for the launcher; that it gives them is tests/launcher's affair."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launcher.replays import fields

from cdi import strictjson
from gpuruntime.config import Config
from gpuruntime.launcher import replay
from gpuruntime.log import Log
from gpuruntime.oci import argv
from gpuruntime.shim import main
from gpuruntime.shim.host import ShimHost
from gpuruntime.snapshots.grants import SavedGrants

RUNTIME = "nvidia-container-runtime"
CALLER = replay.Caller("/usr/bin/gpu-container-runtime", "1:2", "/usr/bin:/bin")
# A younger spec is not taken for settled.
SETTLED_S = 1.1
EDITS: dict[str, dict[str, Any]] = {
    "0": {"env": ["GPU=0"], "mounts": [{"hostPath": "/etc/hosts", "containerPath": "/a"}]},
    "odd": {"mounts": [{"hostPath": "/etc/hosts", "containerPath": "/a//b"}]},
    "deep": {"mounts": [{"hostPath": "/etc/hosts", "containerPath": "/a" * 64}]},
    "bare": {"hooks": [{"hookName": "createContainer", "path": "/usr/bin/vendor-hook"}]},
    "net": {"netDevices": [{"hostInterfaceName": "e0", "name": "e1"}]},
    "rdt": {"intelRdt": {"closID": "x"}},
    # A minor that is 0 may be left out.
    "short": {
        "deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/null", "type": "c", "major": 1}]
    },
    "hook": {
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/bin/true",
                "args": ["true", "update-container"],
                "env": ["A=b"],
            }
        ]
    },
}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of specs: ours, and one of somebody who does not say what was given."""
    place = tmp_path_factory.mktemp("specs")
    place.chmod(0o755)
    for vendor, env in (("nvidia", ["NVIDIA_VISIBLE_DEVICES=void"]), ("other", ["X=1"])):
        spec = {
            "cdiVersion": "1.1.0",
            "kind": f"{vendor}.com/gpu",
            "devices": [{"name": n, "containerEdits": found} for n, found in EDITS.items()],
            "containerEdits": {"env": env},
        }
        (place / f"{vendor}.json").write_text(json.dumps(spec))
    time.sleep(SETTLED_S)
    return place


def asking(device: str = "0") -> Document:
    """Return a config that asks for *device*."""
    return {
        "process": {
            "args": ["sh"],
            "env": [f"NVIDIA_VISIBLE_DEVICES={device}"],
            "user": {"uid": 0},
        },
        "mounts": [],
        "linux": {"resources": {}, "namespaces": [{"type": "pid"}]},
    }


def kept(
    place: Path,
    specs: Path,
    document: Document,
    values: dict[str, Any] | None = None,
    caller: replay.Caller = CALLER,
    runtime: str = "/usr/bin/runc",
) -> list[bytes]:
    """Return the answers that are kept after *document* was given what it asks for."""
    values = {
        f"{RUNTIME}.mode": "cdi",
        f"{RUNTIME}.modes.cdi.spec-dirs": [str(specs)],
        **(values or {}),
    }
    data = json.dumps(document).encode()
    bundle = place / "bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").write_bytes(data)
    place.chmod(0o755)
    config, log = Config(values, None), Log(None, json_format=False)
    saved = SavedGrants(str(place))
    saved.use(None, {})
    command = argv.parse(["create", "--bundle", str(bundle), "id"])
    host = ShimHost(config, sys.executable, caller.program, log, saved)
    outcome = main.inject(command, config, host, log, runtime)
    assert outcome.next_time in (main.PYTHON, main.REPLAY)
    if outcome.next_time == main.REPLAY:
        assert outcome.original == data
        assert (bundle / "config.json").read_bytes() != data
        replay.keep(outcome.original, config, saved.again(), caller, str(place))
    files = sorted(place.glob(f"{replay.NAME}-*"), key=lambda path: path.stat().st_mtime_ns)
    return [path.read_bytes() for path in files]


@pytest.mark.slow
def test_an_answer_is_kept_and_replaced(tmp_path: Path, specs: Path) -> None:
    """One for the same conditions, another beside it for others."""
    assert len(kept(tmp_path, specs, asking())) == 1
    assert len(kept(tmp_path, specs, asking())) == 1
    other = asking()
    other["process"]["user"] = {"uid": 1}
    found = kept(tmp_path, specs, other)
    assert len(found) == 2
    assert b'"GPU=0"' in found[0]
    free = asking()
    free["process"]["args"] = ["other"]
    assert len(kept(tmp_path, specs, free)) == 2


def test_secrets_are_for_nobody_else(tmp_path: Path, specs: Path) -> None:
    """A variable or a mount that has a word may be one; in the other files there is none."""
    document = asking()
    document["process"]["env"] += ["NVIDIA_API_KEY=SECRET1", "AUTH=nvcr.nvidia.com/:SECRET2"]
    document["mounts"] = [{"destination": "/data", "source": "/srv/nvidia.com/SECRET3"}]
    (found,) = kept(tmp_path, specs, document)
    assert all(b"SECRET%d" % number in found for number in (1, 2, 3))
    modes = {
        path.name.partition("-")[0]: stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.glob("r*")
    }
    assert modes == {"ready.json": 0o644, replay.NAME: 0o600}
    assert b"SECRET" not in (tmp_path / "ready.json").read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_cannot_read_them(tmp_path: Path, specs: Path) -> None:
    """What is there for everyone is the control."""
    kept(tmp_path, specs, asking())
    (file,) = tmp_path.glob(f"{replay.NAME}-*")
    readers = {
        name: subprocess.run(
            ["/bin/cat", name], cwd=tmp_path, user=65534, group=65534, extra_groups=(),
            capture_output=True, check=False,
        ).returncode
        for name in ("ready.json", file.name)
    }  # fmt: skip
    assert readers == {"ready.json": 0, file.name: 1}


@pytest.mark.parametrize("cgroups", ["/x", "system.slice:docker:x"])
def test_a_node_without_a_minor_has_0(tmp_path: Path, specs: Path, cgroups: str) -> None:
    """Who writes specs in Go leaves it out; for a cgroup of systemd's a warning has it."""
    document = asking("short")
    document["linux"]["cgroupsPath"] = cgroups
    assert len(kept(tmp_path, specs, document)) == (0 if ":" in cgroups else 1)
    given = json.loads((tmp_path / "bundle" / "config.json").read_bytes())
    assert given["linux"]["devices"][0]["path"] == "/dev/x"


@pytest.mark.parametrize(("name", "count"), [("runc", 1), ("crun", 0)])
@pytest.mark.parametrize("device", ["hook", "0"])
def test_a_read_only_root_has_its_runtime(
    tmp_path: Path, specs: Path, device: str, name: str, count: int
) -> None:
    """With it go the places before it; what is done ahead of it the launcher would not do."""
    runtime = tmp_path / name
    runtime.write_text("#!/bin/sh\n")
    runtime.chmod(0o755)
    values = {f"{RUNTIME}.runtimes": [f"{tmp_path}/none", str(runtime)]}
    document = asking(device)
    document["root"] = {"readonly": True}
    found = kept(tmp_path, specs, document, values)
    assert len(found) == (count if device == "hook" else 1)
    for record in found:
        start = record.index(b"\n", record.index(b"\nuser ") + 1) + 1
        probes = fields(fields(record[start:])[3])
        asked = dict(zip(probes[1::3], zip(probes[::3], probes[2::3], strict=True), strict=True))
        assert asked[os.fsencode(f"{tmp_path}/none")] == (b"identity", b"-")
        assert asked[os.fsencode(runtime)][1].split()[1] == b"%d" % runtime.stat().st_ino


@pytest.mark.catalogue("ENV-12")
def test_a_hook_without_env_is_given_one_again(tmp_path: Path, specs: Path) -> None:
    """The launcher adds the same bytes as the shim, and so no variable of the image."""
    (found,) = kept(tmp_path, specs, asking("bare"))
    hooks = json.loads((tmp_path / "bundle" / "config.json").read_bytes())["hooks"]
    (hook,) = hooks["createContainer"]
    assert hook["env"]
    assert strictjson.dumps(hook, ascii_only=False).encode() in found


def test_the_result_for_another_launcher_replaces_the_old_one(tmp_path: Path, specs: Path) -> None:
    """Its head names the launcher."""
    assert len(kept(tmp_path, specs, asking())) == 1
    caller = replay.Caller(CALLER.program, "1:3", CALLER.path)
    (found,) = kept(tmp_path, specs, asking(), caller=caller)
    assert b"\nlauncher 1:3\n" in found


@pytest.mark.slow
def test_they_have_a_limit(tmp_path: Path, specs: Path) -> None:
    """The oldest goes."""
    for uid in range(replay.MAX_FILES + 2):
        document = asking()
        document["process"]["user"] = {"uid": uid}
        found = kept(tmp_path, specs, document)
    assert len(found) == replay.MAX_FILES
    assert b'"uid":2,' in found[0] or b'"uid": 2}' in found[0]
    assert b'"uid": %d}' % (replay.MAX_FILES + 1) in found[-1]


@pytest.mark.parametrize("member", ["env", "args"])
def test_no_container_drives_out_the_others(tmp_path: Path, specs: Path, member: str) -> None:
    """A file has a limit: the result for a large config is not kept."""
    found = kept(tmp_path, specs, asking())
    for length, count in ((replay.MAX_BYTES // 4, 2), (replay.MAX_BYTES, 2)):
        document = asking()
        document["process"][member].append("NVIDIA_Q=" + "y" * length)
        now = kept(tmp_path, specs, document)
        assert len(now) == count
        assert now[0] == found[0]


@pytest.mark.parametrize("content", [b"", b"x", b"1:a\n"])
def test_a_damaged_file_is_replaced(tmp_path: Path, specs: Path, content: bytes) -> None:
    """It is not read."""
    found = kept(tmp_path, specs, asking())
    (file,) = tmp_path.glob(f"{replay.NAME}-*")
    file.write_bytes(content)
    assert kept(tmp_path, specs, asking()) == found


@pytest.mark.parametrize(
    ("device", "count"),
    [("odd", 1), ("deep", 1), ("net", 1), ("rdt", 1), ("other.com/gpu=0", 0)],
)
def test_what_would_be_added_twice_is_not_kept(
    tmp_path: Path, specs: Path, device: str, count: int
) -> None:
    """Edits of every other kind are: the launcher adds bytes."""
    assert len(kept(tmp_path, specs, asking(device))) == count


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{RUNTIME}.log-level", "debug"),
        (f"{RUNTIME}.debug", "/nowhere/log"),
        ("swarm-resource", "GERÄT"),
    ],
)
def test_some_configs_are_python_s(tmp_path: Path, specs: Path, name: str, value: str) -> None:
    """Where more is said than the launcher can, or words cannot tell."""
    assert kept(tmp_path, specs, asking(), {name: value}) == []


@pytest.mark.parametrize(
    "caller",
    [
        replay.Caller("bin/gpu-container-runtime", "1:2", "/bin"),
        replay.Caller(CALLER.program, "", "/bin"),
    ],
)
def test_a_caller_that_may_be_another_is_not_answered(
    tmp_path: Path, specs: Path, caller: replay.Caller
) -> None:
    """By its name, which may be below another directory, or without /proc."""
    assert kept(tmp_path, specs, asking(), caller=caller) == []


def _privileged(document: Document) -> None:
    document["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]


def _user_namespace(document: Document) -> None:
    document["linux"]["namespaces"].append({"type": "user"})


def _engine_hook(document: Document) -> None:
    document["hooks"] = {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}


def _feature(document: Document) -> None:
    document["process"]["env"].append("NVIDIA_GDS=enabled")


CHANGES = (_privileged, _user_namespace, _engine_hook, _feature)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.lstrip("_"))
def test_some_containers_are_python_s(tmp_path: Path, specs: Path, change: Any) -> None:
    """Where there is something to say, or to remove, or a part that the launcher needs is not."""
    document = asking()
    change(document)
    assert kept(tmp_path, specs, document) == []


def test_nothing_is_kept_where_others_write(tmp_path: Path, specs: Path) -> None:
    """The directory decides."""
    assert len(kept(tmp_path, specs, asking())) == 1
    (file,) = tmp_path.glob(f"{replay.NAME}-*")
    file.unlink()
    data = json.dumps(asking()).encode()
    values = {f"{RUNTIME}.mode": "cdi", f"{RUNTIME}.modes.cdi.spec-dirs": [str(specs)]}
    saved = SavedGrants(str(tmp_path))
    saved.use(None, {})
    other = tmp_path / "other"
    other.mkdir()
    other.chmod(0o777)
    replay.keep(data, Config(values, None), saved, CALLER, str(other))
    assert list(other.iterdir()) == []


def test_what_holds_no_more_is_not_kept(tmp_path: Path, specs: Path) -> None:
    """Nothing is kept of the machine for it."""
    data = json.dumps(asking()).encode()
    values = {f"{RUNTIME}.mode": "cdi", f"{RUNTIME}.modes.cdi.spec-dirs": [str(specs)]}
    saved = SavedGrants(str(tmp_path))
    saved.use(None, {})
    replay.keep(data, Config(values, None), saved, CALLER, str(tmp_path))
    assert not [*tmp_path.glob(f"{replay.NAME}*")]
