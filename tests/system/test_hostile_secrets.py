# SPDX-License-Identifier: Apache-2.0
"""LOG-03: what a container is given in its environment and arguments is in no log of ours.

Logs go to collectors that more people read than the container's config.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shim_host import TREE, Call, ShimHost, asking

pytestmark = [pytest.mark.system("unshare"), pytest.mark.catalogue("LOG-03")]
BIN = TREE / ".venv" / "bin"
SECRET = "s3cr3t-t0ken-of-the-container"
MODE = "nvidia-container-runtime.mode"
LEVEL = "nvidia-container-runtime.log-level"
DEBUG = "nvidia-container-runtime.debug"
# A shim that says what it does with all that it has to do it with.
WEAK = f"""
import sys
sys.path.append({str(TREE)!r})
from gpuruntime.request import parse
from gpuruntime.errors import BundleError
def from_container(container):
    raise BundleError(f"cannot serve {{container.document}}")
parse.from_container = from_container
from gpuruntime.shim.main import main
main({str(BIN / "python")!r})
"""
PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", WEAK)


def document(*env: object, **members: Any) -> dict[str, Any]:
    """Return a config that has the secret in each place where programs are given one."""
    made = asking(f"PASSWORD={SECRET}", f"{SECRET}=1", *env, **members)  # type: ignore[arg-type]  # also wrong ones
    made["process"]["args"] = ["sh", f"--password={SECRET}", SECRET]
    made["annotations"] = {"io.example.token": SECRET}
    made["hostname"] = SECRET
    made["hooks"] = {
        "poststop": [{"path": "/bin/true", "args": ["true", SECRET], "env": [f"A={SECRET}"]}]
    }
    return made


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "jit-cdi": (document("NVIDIA_VISIBLE_DEVICES=0"), {MODE: "jit-cdi"}),
    "legacy": (document("NVIDIA_VISIBLE_DEVICES=0"), {MODE: "legacy"}),
    "cdi": (document("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"), {}),
    "nothing asked": (document(), {}),
    "no such GPU": (document("NVIDIA_VISIBLE_DEVICES=99"), {}),
    "no such GPU, warn": (document("NVIDIA_VISIBLE_DEVICES=99"), {"missing-gpu": "warn"}),
    "malformed": (document("NVIDIA_VISIBLE_DEVICES=" + "0," * 100_000), {}),
    "requirement": (
        document("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=99"), {MODE: "jit-cdi"}
    ),
    "a variable that is none": (document("NVIDIA_VISIBLE_DEVICES=0", 7), {}),
    "a list that is none": (
        document("NVIDIA_VISIBLE_DEVICES=0", mounts={"a": SECRET}, Hooks={}), {}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShimHost]:
    """Return a host with a spec."""
    with ShimHost(tmp_path_factory.mktemp("host"), "--gpus", "2") as started:
        started.shell(f"{BIN / 'gpuruntime'} cdi generate --output /etc/cdi/nvidia.json")
        yield started


def leaks(text: str) -> bool:
    """Return whether *text* has the secret, as it is or as programs like to write it."""
    forms = (
        SECRET,
        SECRET[::-1],
        SECRET.encode().hex(),
        base64.b64encode(SECRET.encode()).decode(),
    )
    return any(form[:12] in text for form in forms)


def play(host: ShimHost, name: str, **how: Any) -> tuple[Call, str]:
    """Return one call with everything recorded, and all that was said."""
    asked, config = CASES[name]
    debug = host.place / f"debug-{host._calls}"
    call = host.create(asked, {**config, LEVEL: "debug", DEBUG: str(debug)}, **how)
    told = debug.read_text() if debug.exists() else ""
    return call, f"{call.stderr}\n{json.dumps(call.records)}\n{told}"


@pytest.mark.parametrize("name", CASES)
def test_the_shim_records_no_secret(host: ShimHost, name: str) -> None:
    """At no level, to no place, whether the container starts or not."""
    call, said = play(host, name)
    assert leaks(call.before.decode())
    assert not leaks(said)
    # It does record: what it does, or why not.
    if name != "nothing asked":
        assert call.records
        assert ("hint: " in said) is (call.returncode != 0)


def test_control_a_shim_that_says_too_much(host: ShimHost) -> None:
    """The same container, the same logs."""
    call, said = play(host, "jit-cdi", prefix=PYTHON)
    assert call.returncode != 0
    assert leaks(said)


@pytest.mark.parametrize(
    "command",
    [
        ["gpu-cdi-hook", "--debug", "update-container", "--link", "a::/opt/b"],
        ["gpu-cdi-hook", "--debug", "update-container", "--link", "a::/proc"],
        ["gpu-cdi-hook", "--debug", "update-ldcache", "--folder", "/usr/lib"],
        ["gpu-container-runtime-hook", "-debug", "prestart"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_the_hooks_say_no_secret(tmp_path: Path, command: list[str]) -> None:
    """They read the same config; on a machine without a driver one of them fails."""
    (tmp_path / "rootfs" / "proc").mkdir(parents=True)
    config = document("NVIDIA_VISIBLE_DEVICES=0")
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {
        "ociVersion": "1.0.2",
        "pid": 1,
        "bundle": str(tmp_path),
        "annotations": {"a": SECRET},
    }
    private = ["unshare", "--mount", "--propagation=private", "sh", "-ec"]
    script = 'mount -t tmpfs -o mode=755 run /run; exec "$@"'
    done = subprocess.run(
        [*private, script, "sh", str(BIN / command[0]), *command[1:]],
        input=json.dumps(state), capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert not leaks(done.stdout + done.stderr)
    assert done.stderr or command[2] == "update-ldcache"
