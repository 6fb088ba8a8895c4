# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime info`: enough for a report, nothing that must not be in one."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import forked_cli
import pytest
from shim_host import PROGRAM, TREE, ShimHost

from gpuruntime import __version__
from gpuruntime.snapshots import inventory_json

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

SECRET = "s3cret-of-the-environment"


def info(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return forked_cli.run("info", *arguments, env={"PATH": "/usr/bin:/bin", **environ})


def test_no_secrets(tmp_path: Path) -> None:
    """A report is read by everybody."""
    config = tmp_path / "config.toml"
    config.write_text(
        f'[nvidia-container-cli]\nenvironment = ["TOKEN={SECRET}"]\ndebug = "/var/log/x"\n'
    )
    done = info("--json", "--no-driver", TOKEN=SECRET, GPURUNTIME_CONFIG=str(config))
    assert (done.returncode, done.stderr) == (0, "")
    assert SECRET not in done.stdout
    told = json.loads(done.stdout)
    assert told["config"] == {
        "path": str(config),
        "values": {
            "nvidia-container-cli.debug": "/var/log/x",
            "nvidia-container-cli.environment": ["TOKEN=..."],
        },
    }


def test_what_a_report_needs() -> None:
    """Versions, kernel, cgroups, user namespace; also where there is no driver."""
    told = json.loads(info("--json", "--no-driver").stdout)
    assert told["gpuruntime"] == __version__
    assert told["kernel"] == os.uname().release
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["user_namespace"]["euid"] == os.geteuid()
    assert told["inventory"] is None
    assert {"cgroups", "driver", "specs", "engines", "runtimes", "programs"} <= set(told)


def test_lines_say_the_same() -> None:
    """For people, one line a value."""
    lines = info("--no-driver").stdout.splitlines()
    assert f"gpuruntime: {__version__}" in lines
    assert all(": " in line for line in lines)


@pytest.mark.system("unshare")
def test_a_test_can_load_it(tmp_path: Path) -> None:
    """The inventory of a report is that of a snapshot."""
    with ShimHost(tmp_path, "--gpus", "2", "--mig", "1:1") as host:
        host.shell(f"{PROGRAM} cdi refresh --output /etc/cdi/nvidia.yaml 2>/dev/null")
        told = json.loads(host.run(PROGRAM, "info", "--json").stdout)
    inventory = inventory_json.decode(told["inventory"])
    assert [item.gpu.index for item in inventory.gpus] == [0, 1]
    assert len(inventory.gpus[1].mig) == 1
    assert told["driver"]["module"] == inventory.driver.version
    (spec,) = told["specs"]
    assert spec["path"] == "/etc/cdi/nvidia.yaml"
    assert spec["driver_versions"] == [inventory.driver.version]
    assert any("195:255 /dev/nvidiactl" in line for line in told["devices"])


@pytest.mark.system("unshare")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("info",), "inventory_problem: -\n"),
        (("explain", "-e", "NVIDIA_VISIBLE_DEVICES=0"), "/dev/nvidia0"),
    ],
)
def test_the_driver_is_asked_as_from_a_package(
    tmp_path: Path, words: tuple[str, ...], shown: str
) -> None:
    """There the program runs with an interpreter that does not know where gpuruntime is."""
    library = tmp_path / "lib"
    library.mkdir()
    for name in ("cdi", "gpuruntime", "hooks"):
        (library / name).symlink_to(TREE / name)
    (library / "venv").symlink_to(sys.prefix)
    program = tmp_path / "gpuruntime"
    program.write_text(
        f"#!{os.path.realpath(sys.executable)} -ISB\nimport sys\n"
        f"sys.path += {[str(library), *site.getsitepackages()]!r}\n"
        "from gpuruntime.cli.main import main\nmain()\n"
    )
    program.chmod(0o755)
    for name in ("gpu-container-runtime", "gpu-cdi-hook"):
        (tmp_path / name).symlink_to(Path(PROGRAM).with_name(name))
    with ShimHost(tmp_path, "--gpus", "1") as host:
        done = host.run(str(program), *words)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.system("unshare")
def test_a_driver_that_fails_is_told(tmp_path: Path) -> None:
    """That is when a report is written."""
    with ShimHost(tmp_path, "--gpus", "1", "--fault", "init-fails 9") as host:
        done = host.run(PROGRAM, "info", "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["inventory"] is None
    assert told["inventory_problem"].startswith("initialization: ")
