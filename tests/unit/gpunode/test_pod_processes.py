# SPDX-License-Identifier: Apache-2.0
"""Which pod a process belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.mig.operations import holder_name
from gpunode.pod_processes import pod_of, pods_by_uid, uid_of

UID = "0a1b2c3d-1111-2222-3333-0123456789ab"


@pytest.mark.parametrize(
    ("cgroups", "uid"),
    [
        (f"0::/kubepods/burstable/pod{UID}/abc\n", UID),
        (f"4:memory:/kubepods/pod{UID}\n0::/\n", UID),
        (
            f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-abc.scope\n",
            UID,
        ),
        ("0::/user.slice/user-0.slice/session-1.scope\n", ""),
        ("0::/kubepods/pod123\n", ""),
        ("", ""),
    ],
)
def test_the_uid_is_in_the_cgroup(cgroups: str, uid: str) -> None:
    """As cgroupfs and systemd write it."""
    assert uid_of(cgroups) == uid


def test_a_process_without_a_cgroup_file_is_in_no_pod(tmp_path: Path) -> None:
    """It has ended, or belongs to another namespace."""
    assert pod_of(1, str(tmp_path)) == ""


def test_the_name_is_in_the_directory_of_logs(tmp_path: Path) -> None:
    """Other directories are skipped; without any, no pod has a name."""
    for name in (f"ns_train-0_{UID}", "ns_static_0123456789abcdef0123456789abcdef", "x"):
        (tmp_path / name).mkdir()
    assert pods_by_uid(str(tmp_path)) == {UID: ("ns", "train-0")}
    assert pods_by_uid(str(tmp_path / "none")) == {}


def test_what_uses_a_mig_device_is_named_with_its_pod(tmp_path: Path) -> None:
    """By namespace and name, or by the UID where the logs of the pod are not here."""
    uid = "0f5e3d3c-1b2a-4c5d-8e9f-0a1b2c3d4e5f"
    process = tmp_path / "7"
    process.mkdir()
    (process / "comm").write_text("python3\n")
    (process / "cgroup").write_text(f"0::/kubepods/burstable/pod{uid}/c\n")
    pods = {uid: ("team", "train-0")}
    proc = str(tmp_path)
    assert holder_name(7, pods, proc) == "process 7 (python3) of the pod team/train-0"
    assert holder_name(7, {}, proc) == f"process 7 (python3) of the pod {uid}"
    assert holder_name(8, pods, proc) == "process 8"
