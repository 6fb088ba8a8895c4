# SPDX-License-Identifier: Apache-2.0
"""`gpu-node mig` on the fake NVML, each command a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from node.node_host import NodeHost, bus_id

from gpunode.mig import journal

CONFIGS = """\
version: v1
mig-configs:
  all-disabled:
  - {devices: all, mig-enabled: false}
  small:
  - {devices: all, mig-enabled: true, mig-devices: {"1g.10gb": 7}}
  mixed:
  - {devices: [0], mig-enabled: true, mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "1c.3g.40gb": 3}}
  too-much:
  - {devices: [0], mig-enabled: true, mig-devices: {"3g.40gb": 2, "1g.10gb": 1}}
"""


_PROGRAM = "from gpunode.cli.main import main; main()"


class Mig:
    """The commands on a host of two GPUs, the first in MIG mode."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = NodeHost(directory, 2, migs=[0])
        self.file = directory / "configs.yaml"
        self.file.write_text(CONFIGS)
        self.data = next(self.host.root.rglob("fakenvml.conf"))

    def say(self, *lines: str) -> None:
        """Append *lines* to what NVML reports."""
        with self.data.open("a") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    def forget(self, word: str) -> None:
        """Remove the lines that begin with *word*."""
        lines = self.data.read_text().splitlines(keepends=True)
        self.data.write_text("".join(line for line in lines if not line.startswith(word)))

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Return how `gpu-node mig ARGUMENTS` ended."""
        return subprocess.run(
            [
                *(sys.executable, "-c", _PROGRAM, "mig"),
                *("--nvidia-driver-root", str(self.host.root)),
                *("--state-directory", str(self.directory / "state")),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def apply(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Return how the config *name* was applied."""
        return self.run("apply", "-f", str(self.file), "-c", name, *options)

    def instances(self) -> list[str]:
        """Return the lines of instances in the data file."""
        words = ("gpuinstance", "computeinstance", "migmode")
        return sorted(x for x in self.data.read_text().splitlines() if x.startswith(words))


@pytest.fixture
def mig(tmp_path: Path) -> Mig:
    """Return the commands on a host."""
    return Mig(tmp_path)


def test_a_config_is_applied_and_asserted(mig: Mig) -> None:
    """Apply changes the covered GPU; assert then holds, and names the GPU it ignores."""
    held = mig.run("assert", "-f", str(mig.file), "-c", "mixed")
    assert held.returncode == 1
    assert "Assertion failure: selected configuration not currently applied" in held.stderr
    result = mig.apply("mixed")
    assert result.returncode == 0, result.stderr
    held = mig.run("assert", "-f", str(mig.file), "-c", "mixed")
    assert held.returncode == 0
    assert "GPU 1: not covered" in held.stderr
    exported = mig.run("export")
    assert "1c.3g.40gb: 3" in exported.stdout


def test_a_mode_change_comes_before_the_layout(mig: Mig) -> None:
    """A GPU without MIG mode gets the mode, then the layout; and loses both again."""
    result = mig.apply("small")
    assert result.returncode == 0, result.stderr
    assert sum(line.startswith("computeinstance 1 ") for line in mig.instances()) == 7
    assert mig.apply("all-disabled").returncode == 0
    assert mig.instances() == ["migmode 0 0", "migmode 1 0"]


def test_a_dry_run_prints_the_steps_and_changes_nothing(mig: Mig) -> None:
    """The steps of both GPUs are printed."""
    before = mig.data.read_text()
    result = mig.apply("small", "--dry-run")
    assert "GPU 1: enable MIG mode" in result.stdout
    assert result.stdout.count("create 1g.10gb at slice") == 14
    assert mig.data.read_text() == before


def test_an_instance_in_use_is_refused_before_the_first_delete(mig: Mig) -> None:
    """The process that holds the instance is named."""
    assert mig.apply("mixed").returncode == 0
    instance = next(line for line in mig.instances() if line.startswith("gpuinstance 0"))
    mig.say(f"process 0 1 100 {instance.split()[2]} 0")
    before = mig.instances()
    result = mig.apply("small")
    assert result.returncode == 1
    assert "process 1 (" in result.stderr
    assert mig.instances() == before


def test_too_many_instances_say_what_would_fit(mig: Mig) -> None:
    """The error names the GPU and the part that fits."""
    result = mig.apply("too-much")
    assert result.returncode == 1
    assert "GPU 0: " in result.stderr
    assert "these fit together: 2 x 3g.40gb" in result.stderr


def test_a_mode_that_waits_for_a_reset_has_its_own_exit_code(mig: Mig) -> None:
    """A pending mode is exit code 3."""
    mig.say("migreset 1")
    result = mig.apply("small", "--skip-reset")
    assert result.returncode == 3
    assert "GPU 1" in result.stderr


def test_a_failed_step_is_rolled_back(mig: Mig) -> None:
    """The layout after an error of NVML is the old one."""
    assert mig.apply("mixed").returncode == 0
    before = mig.run("export").stdout
    mig.say("fault write-fails 9 999")
    result = mig.apply("small")
    assert result.returncode == 1
    assert mig.run("export").stdout == before


def test_a_driver_that_hangs_ends_the_command(mig: Mig) -> None:
    """The deadline of a call is kept."""
    mig.say("fault hangs nvmlDeviceGetMigMode")
    result = mig.run("--timeout", "2", "export")
    assert result.returncode == 1
    assert 'did not return from "state" within 2 s' in result.stderr


def test_no_permission_is_one_error_line(mig: Mig) -> None:
    """The hint says to be root."""
    mig.say("fault fails nvmlDeviceCreateGpuInstanceWithPlacement 4")
    result = mig.apply("mixed")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 2
    assert "run the command as root" in result.stderr


def test_a_checkpoint_is_restored(mig: Mig, tmp_path: Path) -> None:
    """Mode and layout come back."""
    assert mig.apply("mixed").returncode == 0
    before = mig.run("export").stdout
    assert mig.run("checkpoint", "-f", str(tmp_path / "point")).returncode == 0
    assert mig.apply("all-disabled").returncode == 0
    assert mig.run("restore", "-f", str(tmp_path / "point")).returncode == 0
    assert mig.run("export").stdout.splitlines()[:3] == before.splitlines()[:3]


def test_hooks_run_at_their_points_and_the_last_always(mig: Mig, tmp_path: Path) -> None:
    """The last hook runs after an error too."""
    log = tmp_path / "log"
    points = ("apply-start", "pre-apply-mode", "pre-apply-config", "apply-exit")
    lines = [
        f'  {point}: [{{command: /bin/sh, args: [-c, "echo {point} '
        f'$MIG_PARTED_SELECTED_CONFIG >> {log}"]}}]\n'
        for point in points
    ]
    hooks = tmp_path / "hooks.yaml"
    hooks.write_text("version: v1\nhooks:\n" + "".join(lines))
    assert mig.apply("small", "-k", str(hooks)).returncode == 0
    assert log.read_text().split("\n")[:4] == [f"{point} small" for point in points]
    log.unlink()
    mig.apply("too-much", "-k", str(hooks))
    assert log.read_text() == "apply-start too-much\napply-exit too-much\n"


def test_configs_are_generated(mig: Mig) -> None:
    """The usual configs are in the file."""
    result = mig.run("generate-config")
    assert "all-1g.10gb.me:" in result.stdout
    assert "all-balanced:" in result.stdout
    # An older NVML, which describes profiles by another structure.
    mig.say("profileversion 2")
    assert mig.run("generate-config").stdout == result.stdout


def test_a_reset_completes_a_pending_mode(mig: Mig) -> None:
    """By the nvidia-smi of the driver root, which gets the PCI address."""
    mig.say("migreset 1")
    program = mig.host.root / "usr/bin/nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.unlink(missing_ok=True)
    program.write_text(
        f'#!/bin/sh\ntest "$*" = "-r -i {bus_id(1)}" || exit 1\n'
        f"sed -i s/^migpending/migmode/ {mig.data}\necho 'migpending 1 1' >> {mig.data}\n"
    )
    program.chmod(0o755)
    result = mig.apply("small")
    assert result.returncode == 0, result.stderr
    assert mig.run("assert", "-f", str(mig.file), "-c", "small").returncode == 0


def test_a_second_manager_is_refused_by_name(mig: Mig) -> None:
    """The holder of the lock is named, and nothing changes."""
    before = mig.data.read_text()
    with journal.lock(str(mig.directory / "state")):
        result = mig.apply("small")
    assert result.returncode == 1
    assert f"MIG is being changed by process {os.getpid()}" in result.stderr
    assert mig.data.read_text() == before


def test_a_change_that_was_cut_off_is_undone_by_the_next_call(mig: Mig) -> None:
    """The process that calls NVML is killed, in the rollback too."""
    assert mig.apply("mixed").returncode == 0
    before = mig.run("export").stdout
    mig.say("fault write-killed 2")
    result = mig.apply("small")
    assert result.returncode == 1
    assert "could not be restored" in result.stderr
    assert "cut off" in mig.run("status").stdout
    mig.forget("fault")
    result = mig.apply("mixed")
    assert "undone" in result.stderr
    assert mig.run("export").stdout == before


def test_a_gpu_that_does_not_answer_is_not_left_out(mig: Mig) -> None:
    """A config for all GPUs is refused, and a change that was cut off waits for the GPU."""
    mig.say("fault write-killed 2")
    assert "could not be restored" in mig.apply("small").stderr
    mig.forget("fault")
    mig.say("fault lost 0")
    result = mig.apply("small")
    assert result.returncode == 1
    assert "does not answer" in result.stderr
    assert "cut off" in mig.run("status").stdout
    mig.forget("fault")
    assert mig.apply("small").returncode == 0
    mig.say("fault lost 1")
    result = mig.apply("small")
    assert (result.returncode, "GPU 1 does not answer" in result.stderr) == (1, True)


def test_errors_of_the_file_have_line_and_key(mig: Mig) -> None:
    """A profile that the GPU lacks names the nearest one; a wrong key names its line."""
    mig.file.write_text(CONFIGS.replace("1g.10gb", "1g.5gb"))
    assert "1g.10gb" in mig.apply("small").stderr
    mig.file.write_text(CONFIGS.replace("mig-enabled: false", "mig-enable: false"))
    result = mig.apply("small")
    assert "line 4" in result.stderr
    assert "mig-enable" in result.stderr


def test_a_gpu_that_comes_into_use_during_the_change_is_a_refusal(mig: Mig) -> None:
    """NVML refuses a step after the last look; the old layout comes back."""
    assert mig.apply("mixed").returncode == 0
    before = mig.run("export").stdout
    # The first change of the process that calls NVML, with NVML_ERROR_IN_USE.
    mig.say("fault write-fails 1 19")
    result = mig.apply("small")
    assert result.returncode == 1
    assert "GPU 1 came into use during the change" in result.stderr
    assert mig.run("export").stdout == before


def test_a_mode_that_a_reset_does_not_change_is_put_back(mig: Mig) -> None:
    """Nothing stays pending, and no GPU has a new layout."""
    before = mig.run("export").stdout
    mig.say("migreset 1")
    program = mig.host.root / "usr/bin/nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.unlink(missing_ok=True)
    program.write_text("#!/bin/sh\necho GPU 1 is in use; exit 2\n")
    program.chmod(0o755)
    result = mig.apply("small")
    assert result.returncode == 3
    assert "GPU 1 is in use" in result.stderr
    assert "--skip-reset" in result.stderr
    status = mig.run("status").stdout
    assert "after a reset" not in status
    assert mig.run("export").stdout == before
