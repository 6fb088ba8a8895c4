# SPDX-License-Identifier: Apache-2.0
"""The whole spec of each platform that is not Linux with NVML, by the options of the command.

`GPURUNTIME_WRITE_GOLDEN=1` writes the files anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_cli
import platform_roots
import pytest
from driver_roots import Tree

PROGRAM = Path(sys.executable).with_name("gpuruntime")
GOLDEN = Path(__file__).parents[3] / "data" / "golden"
ORIN = (
    "gpu 0a1b2c3d-0000-4000-8000-000000000001 0 0:0:0 1 0 Orin (nvgpu)",
    "fault nobusid 0",
)


@pytest.fixture(autouse=True)
def without_leftovers(tmp_path: Path) -> Iterator[None]:
    """Remove the device nodes of the test."""
    yield
    shutil.rmtree(tmp_path)


def tegra(path: Path) -> Tree:
    """Return a Jetson without NVML."""
    return platform_roots.tegra(path)


def orin(path: Path) -> Tree:
    """Return a Jetson whose NVML lists its GPU."""
    return platform_roots.tegra(path, *ORIN)


def generated(tree: Tree, *options: str) -> str:
    """Return the spec of *tree*, with its path replaced."""
    fixed = ("--driver-root", str(tree.path), "--hook-path", "/usr/bin/gpu-cdi-hook")
    result = subprocess.run(
        [PROGRAM, "cdi", "generate", *fixed, *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = result.stdout.splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("#"))
    return text.replace(str(tree.path), "/driver-root").replace(platform_roots.native(), "NATIVE")


@pytest.mark.parametrize(
    ("name", "build"),
    [("wsl", platform_roots.wsl), ("tegra", tegra), ("tegra-orin", orin)],
)
def test_the_golden_spec_of_a_platform(
    name: str, build: Callable[[Path], Tree], tmp_path: Path
) -> None:
    """Found by `auto`: node, files, links, loader cache and the steps that have an effect."""
    text = generated(build(tmp_path))
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("GPURUNTIME_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_incumbents_hooks_have_their_arguments(tmp_path: Path) -> None:
    """As version 1.20 of the toolkit calls them on a Jetson Orin."""
    text = generated(
        orin(tmp_path),
        *("--separate-hooks", "--csv.compat-container-root", "/opt/compat"),
        *("--csv.ignore-pattern", "**/libcuda.so,**/*.fw"),
    )
    assert '"--host-cuda-version=12.6"' in text
    assert '"--cuda-compat-container-root=/opt/compat"' in text
    assert "disable-device-node-modification" not in text
    assert "update-application-profile" not in text
    assert "nvhost.fw" not in text


def test_wsl_has_the_device_all_alone(tmp_path: Path) -> None:
    """B101: whichever ids are named."""
    tree = platform_roots.wsl(tmp_path)
    assert generated(tree, "--device-id", "0", "--no-all-device") == generated(tree)


def test_a_jetson_has_no_name_by_uuid_alone(tmp_path: Path) -> None:
    """The hint is an option that gives a name."""
    words = ("cdi", "generate", "--driver-root", tegra(tmp_path).path)
    result = forked_cli.run(*words, "--device-name-strategy", "uuid")
    assert result.returncode == 1
    error, hint = result.stderr.splitlines()[-2:]
    assert "no device has a name by the strategy uuid" in error
    assert '"--device-name-strategy index"' in hint


def test_explain_names_each_step_for_a_jetson(tmp_path: Path) -> None:
    """Newer CUDA libraries of an image count by the CUDA version there."""
    config = tmp_path / "config.toml"
    root = orin(tmp_path / "root").path
    config.write_text(f'nvidia-container-cli.root = "{root}"\n')
    words = ("--config", config, "explain", "--env", "NVIDIA_VISIBLE_DEVICES=0")
    report = forked_cli.run(*words).stdout
    (hook,) = (line for line in report.splitlines() if line.startswith("hook"))
    for step in ("makes links", "prefers newer CUDA", "adds the libraries to the loader cache"):
        assert step in hook
    assert 'note          the platform is Tegra: NVML lists the GPU "Orin (nvgpu)"' in report
