# SPDX-License-Identifier: Apache-2.0
"""The prestart hook on a machine without a driver: states, configs and config files of all kinds.

In a mount namespace, where what it keeps in /run goes with the process.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system("unshare", "mount")

BIN = Path(__file__).parents[2] / ".venv" / "bin"
HOOK = "gpu-container-runtime-hook"
PRIVATE = ("unshare", "--mount", "--propagation=private", "sh", "-ec")
SCRIPT = 'mount -t tmpfs -o mode=755 run /run; exec "$@"'
CONFIG = {
    "ociVersion": "1.0.2",
    "process": {"env": ["PATH=/bin"]},
    "root": {"path": "rootfs"},
}


def call(*words: str, state: str) -> tuple[int, str, str]:
    """Return status, output and error of the hook that reads *state*."""
    done = subprocess.run(
        [*PRIVATE, SCRIPT, "sh", str(BIN / HOOK), *words],
        input=state,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a bundle that asks for nothing."""
    (tmp_path / "rootfs").mkdir()
    write(tmp_path, **CONFIG)
    return tmp_path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a config file: that of the machine has no part in it."""
    path = tmp_path / "config.toml"
    path.write_text("")
    return path


def write(bundle: Path, **members: object) -> None:
    """Write the config.json of *bundle*."""
    (bundle / "config.json").write_text(json.dumps(members))


def state_of(bundle: Path, **members: object) -> str:
    """Return a state of a container of *bundle*."""
    return json.dumps({"ociVersion": "1.0.2", "pid": 1, "bundle": str(bundle), **members})


@pytest.mark.parametrize("command", [["prestart"], ["-debug", "prestart"], ["prestart", "more"]])
@pytest.mark.parametrize("pid", [1, 0, None, "1"])
def test_who_asks_for_nothing_passes_silently(
    bundle: Path, config: Path, command: list[str], pid: object
) -> None:
    """Also on a machine without a driver: some engines have the hook for every container."""
    state = state_of(bundle, pid=pid)
    assert call("-config", str(config), *command, state=state) == (0, "", "")


def test_a_state_of_old_is_read(bundle: Path, config: Path) -> None:
    """Before OCI 1.0 the bundle had another name."""
    state = json.dumps({"pid": 1, "bundlePath": str(bundle)})
    assert call("-config", str(config), "prestart", state=state) == (0, "", "")


@pytest.mark.parametrize(
    "state",
    [
        *("", "{", "[]", "1", '"x"', "null", "{}", "\0", '{"bundle": 1}', '{"bundle": "."}'),
        *('{"bundle": "/"}', '{"bundle": "/../etc"}', '{"bundle": "/\\u0000"}', "[" * 100_000),
        *('{"bundle": "/\\udfff"}', '{"bundle": "/no/such/place"}', " " * ((1 << 20) + 1)),
    ],
)
def test_a_state_that_cannot_be_read(config: Path, state: str) -> None:
    """Two lines, and the container does not start."""
    assert_refused(call("-config", str(config), "prestart", state=state), "bundle")


@pytest.mark.parametrize("member", ["ociVersion", "process", "root"])
def test_a_config_without_its_members_is_refused(bundle: Path, config: Path, member: str) -> None:
    """As the incumbent does."""
    write(bundle, **{name: value for name, value in CONFIG.items() if name != member})
    answer = call("-config", str(config), "prestart", state=state_of(bundle))
    assert_refused(answer, "bundle")
    assert f'has no "{member}"' in answer[2]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"root": 1, "root": 2}', '{"Root": {}}', '{"linux": 1}']
)
def test_a_config_that_cannot_be_read_is_refused(bundle: Path, config: Path, text: str) -> None:
    """What is granted must be sure."""
    (bundle / "config.json").write_text(text)
    answer = call("-config", str(config), "prestart", state=state_of(bundle))
    assert_refused(answer, "bundle")


@pytest.mark.parametrize("text", [None, "mode = ", 'nvidia-container-cli = "x"'])
def test_a_config_file_that_is_named_must_be_one(
    bundle: Path, config: Path, text: str | None
) -> None:
    """Another one in its place would be a surprise."""
    config.unlink() if text is None else config.write_text(text)
    answer = call(f"--config={config}", "prestart", state=state_of(bundle))
    assert_refused(answer, "configuration")
    assert str(config) in answer[2]


@pytest.mark.parametrize("mode", ["cdi", "jit-cdi", "csv", "no-such"])
def test_other_modes_are_refused_for_who_asks(bundle: Path, config: Path, mode: str) -> None:
    """And for nobody else."""
    config.write_text(f'[nvidia-container-runtime]\nmode = "{mode}"\n')
    words = ["-config", str(config), "prestart"]
    assert call(*words, state=state_of(bundle)) == (0, "", "")
    process = {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}
    write(bundle, **{**CONFIG, "process": process})
    answer = call(*words, state=state_of(bundle))
    assert_refused(answer, "configuration")
    assert f'not supported in the mode "{mode}"' in answer[2]
    assert 'hint: use "docker run --runtime gpuruntime"' in answer[2]


@pytest.mark.parametrize("asks", ["all", "0", "GPU-5f3b8c1e-0000-0000-0000-000000000000"])
@pytest.mark.parametrize("value", ["error", "warn", None])
def test_b015_a_gpu_that_is_not_there(
    bundle: Path, config: Path, asks: str, value: str | None
) -> None:
    """One file for hosts with and without: `missing-gpu = "warn"`, which the hook honours too."""
    if value is not None:
        config.write_text(f'missing-gpu = "{value}"\n')
    write(bundle, **{**CONFIG, "process": {"env": [f"NVIDIA_VISIBLE_DEVICES={asks}"]}})
    answer = call("-config", str(config), "prestart", state=state_of(bundle))
    if value != "warn":
        assert_refused(answer, "initialization")
        return
    status, output, error = answer
    assert (status, output) == (0, "")
    assert error.startswith(f"{HOOK}: warning: starts without what it asks for: initialization: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "asks", "phase"),
    [
        ("", "0," * 100_000, "request"),
        ('[nvidia-container-runtime]\nmode = "cdi"\n', "all", "configuration"),
    ],
)
def test_b015_what_cannot_be_is_no_missing_gpu(
    bundle: Path, config: Path, text: str, asks: str, phase: str
) -> None:
    """Whoever lets containers start without a GPU has not allowed everything else."""
    config.write_text(f'missing-gpu = "warn"\n{text}')
    write(bundle, **{**CONFIG, "process": {"env": [f"NVIDIA_VISIBLE_DEVICES={asks}"]}})
    answer = call("-config", str(config), "prestart", state=state_of(bundle))
    assert_refused(answer, phase)


def assert_refused(answer: tuple[int, str, str], phase: str) -> None:
    """Assert that the hook has failed, with one line of *phase* and a hint."""
    status, output, error = answer
    assert (status, output) == (1, "")
    assert error.startswith(f"{HOOK}: {phase}: ")
    assert error.count("\n") == 2
    assert "\nhint: " in error
