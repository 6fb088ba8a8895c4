# SPDX-License-Identifier: Apache-2.0
"""Each fact that a snapshot was made from is seen when it changes, alone and with others.

The names of the changes are those of the field, as operators meet them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import host_trees
import pytest
from effort import tries
from host_trees import GPUS, LIBRARIES, MIG, Change, relink, renew, rewrite, touch, write
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuruntime import probes

pytestmark = pytest.mark.property

PCI = "sys/bus/pci/devices"
DEV = "dev/dev"

# Change in the field → the part that has to tell, and how it comes about.
CHANGES: dict[str, tuple[str, Change]] = {
    # module unloaded and loaded, same version
    "module loaded again": ("modules", lambda h: renew(h / "sys/module/nvidia")),
    "module nvidia_uvm loaded again": ("modules", lambda h: renew(h / "sys/module/nvidia_uvm")),
    "module nvidia_drm loaded": ("modules", lambda h: (h / "sys/module/nvidia_drm").mkdir()),
    "majors moved": (
        "majors",
        lambda h: write(h / "proc/devices", "195 nvidia\n510 nvidia-uvm\n"),
    ),
    "module of another version loaded": (
        "module version",
        lambda h: write(h / "proc/driver/nvidia/version", "NVRM version: 1.3\n"),
    ),
    # GPU bound to vfio, hot-removed, added, fallen and rescanned
    "GPU bound to vfio": (
        "drivers of GPUs",
        lambda h: relink(h / PCI / GPUS[0] / "driver", "../../drivers/vfio-pci"),
    ),
    "GPU unbound": ("drivers of GPUs", lambda h: (h / PCI / GPUS[1] / "driver").unlink()),
    "GPU hot-removed": (
        "GPUs",
        lambda h: shutil.rmtree(h / "proc/driver/nvidia/gpus" / GPUS[1]),
    ),
    "GPU added": (
        "GPUs",
        lambda h: write(h / "proc/driver/nvidia/gpus/0000:03:00.0/information"),
    ),
    "DRM driver bound": ("DRM devices", lambda h: (h / PCI / GPUS[0] / "drm/renderD128").mkdir()),
    "DRM link elsewhere": (
        "DRM links",
        lambda h: relink(h / DEV / f"dri/by-path/pci-{GPUS[0]}-card", "../card7"),
    ),
    # user space upgraded, module old
    "libcuda upgraded": (
        "libraries",
        lambda h: relink(h / LIBRARIES / "libcuda.so.1", "libnvidia-ml.so.1.2"),
    ),
    "libnvidia-ml written in place": (
        "libraries",
        lambda h: rewrite(h / LIBRARIES / "libnvidia-ml.so.1.2", "y"),
    ),
    # split package added
    "split package added": (
        "library directories",
        lambda h: write(h / LIBRARIES / "libnvidia-encode.so.1.2"),
    ),
    "loader cache written": ("loader cache", lambda h: touch(h / "driver/etc/ld.so.cache")),
    "library directory configured": (
        "loader configuration",
        lambda h: write(h / "driver/etc/ld.so.conf.d/more.conf", "/opt/more\n"),
    ),
    "library directory configured in place": (
        "loader configuration",
        lambda h: rewrite(h / "driver/etc/ld.so.conf.d/usual.conf", "/opt/more"),
    ),
    "configured library directory made": (
        "library directories",
        lambda h: write(h / "driver/opt/driver/lib/libcuda.so.1"),
    ),
    # driver container restarted, same version, same path
    "driver container restarted": ("driver root", lambda h: renew(h / "driver")),
    # NVreg_DeviceFile{Mode,UID,GID}, chgrp, VirtualGL
    "mode of a node": ("device nodes", lambda h: (h / DEV / "nvidia0").chmod(0o600)),
    "node gone": ("device nodes", lambda h: (h / DEV / "nvidiactl").unlink()),
    "node made": ("device nodes", lambda h: write(h / DEV / "nvidia-uvm")),
    # MIG destroyed and made again
    "MIG device made": ("MIG devices", lambda h: (h / MIG / "gi1/ci1").mkdir()),
    "MIG instance made": ("MIG devices", lambda h: write(h / MIG / "gi7/ci0/access")),
    "MIG mode enabled": (
        "MIG devices",
        lambda h: (h / "proc/driver/nvidia/capabilities/gpu0").mkdir(),
    ),
    "MIG minors moved": (
        "MIG capabilities",
        lambda h: write(h / "proc/driver/nvidia-caps/mig-minors", "config 1\nmonitor 3\n"),
    ),
    "capability node made": (
        "device nodes",
        lambda h: write(h / DEV / "nvidia-caps/nvidia-cap12"),
    ),
    # fabricmanager, persistenced, MPS, IMEX started later
    "fabricmanager started": (
        "sockets",
        lambda h: write(h / "driver/run/nvidia-fabricmanager/socket"),
    ),
    "persistenced started": (
        "sockets",
        lambda h: write(h / "driver/var/run/nvidia-persistenced/socket"),
    ),
    "MPS started": ("sockets", lambda h: (h / "driver/tmp/nvidia-mps").mkdir(parents=True)),
    "IMEX channel made": (
        "device nodes",
        lambda h: write(h / DEV / "nvidia-caps-imex-channels/channel0"),
    ),
    # GDS, GDRCopy, MOFED nodes
    "GDS node made": ("device nodes", lambda h: write(h / DEV / "nvidia-fs0")),
    "GDRCopy node made": ("nodes of features", lambda h: write(h / DEV / "gdrdrv")),
    "MOFED node made": ("nodes of features", lambda h: write(h / DEV / "infiniband/uverbs0")),
    "MOFED connection manager": (
        "nodes of features",
        lambda h: write(h / DEV / "infiniband/rdma_cm"),
    ),
    "NVSwitch node made": ("device nodes", lambda h: write(h / DEV / "nvidia-nvswitchctl")),
    "GDS configured": ("files of features", lambda h: write(h / "driver/etc/cufile.json")),
    # config read from another place
    "config read from another place": (
        "config",
        lambda h: write(h / "xdg/gpuruntime/config.toml", "x = 1\n"),
    ),
    "config edited": ("config", lambda h: rewrite(h / "etc/gpuruntime/config.toml", "x = 2\n")),
    # CDI specs compiled
    "CDI spec added": ("CDI specs", lambda h: write(h / "specs/other.json")),
    "CDI spec written, time restored": (
        "CDI specs",
        lambda h: rewrite(h / "specs/vendor.json", "[]"),
    ),
    # clock set back, equal mtime
    "older file under the same name": (
        "libraries",
        lambda h: touch(h / LIBRARIES / "libcuda.so.1.2"),
    ),
    "clock set back": ("library directories", lambda h: touch(h / LIBRARIES)),
    # other files of the driver
    "ICD added": (
        "other files",
        lambda h: write(h / "driver/usr/share/vulkan/icd.d/nvidia_icd.json"),
    ),
    "ICD in a directory of its own": (
        "other files",
        lambda h: write(h / "driver/etc/glvnd/egl_vendor.d/10_nvidia.json"),
    ),
    "module of Xorg added": (
        "other files",
        lambda h: write(h / "driver/usr/lib/xorg/modules/drivers/nvidia_drv.so"),
    ),
    "firmware added": ("other files", lambda h: (h / "driver/lib/firmware/nvidia/1.3").mkdir()),
    "firmware removed": (
        "other files",
        lambda h: (h / "driver/lib/firmware/nvidia/1.2/gsp.bin").unlink(),
    ),
    "firmware from another place": (
        "firmware path",
        lambda h: write(h / "sys/module/firmware_class/parameters/path", "/opt/firmware\n"),
    ),
    "program replaced": ("programs", lambda h: touch(h / "driver/usr/bin/nvidia-smi")),
    "program added": ("programs", lambda h: write(h / "driver/usr/bin/nvidia-imex")),
}
if os.geteuid() == 0:
    CHANGES["group of a node"] = (
        "device nodes",
        lambda h: os.chown(h / DEV / "dri/card0", 0, 44),
    )
# What happens all the time and matters to nobody here.
NO_CHANGES: dict[str, Change] = {
    "other device": lambda h: (h / DEV / "sda").chmod(0o600),
    "other devices node made": lambda h: write(h / DEV / "sdb"),
    "account added": lambda h: write(h / "driver/etc/passwd", "root:x:0:0\nx:x:1:1\n"),
    "temporary file": lambda h: write(h / "driver/tmp/x"),
    "process file": lambda h: write(h / "driver/run/x.pid"),
    "other module loaded": lambda h: (h / "sys/module/loop").mkdir(),
}


def state_of(host: Path) -> object:
    """Return the state of *host* as it comes back from a snapshot."""
    state: object = json.loads(json.dumps(probes.read(host_trees.plan(host))))
    assert probes.changed(state) == []
    return state


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen_and_named(tmp_path: Path, what: str) -> None:
    """A container would get what is not there, or not what is, with nobody to notice."""
    host = host_trees.build(tmp_path)
    state = state_of(host)
    part, change = CHANGES[what]
    change(host)
    assert part in probes.changed(state)
    # And it is the state from now on.
    state_of(host)


@settings(max_examples=tries(60), deadline=None)
@given(st.lists(st.sampled_from(sorted(CHANGES)), unique=True, max_size=6))
def test_changes_are_seen_together_in_any_order(chosen: list[str]) -> None:
    """No change hides another; and without one there is none."""
    with tempfile.TemporaryDirectory() as directory:
        host = host_trees.build(Path(directory))
        state = state_of(host)
        for change in NO_CHANGES.values():
            change(host)
        assert probes.changed(state) == []
        for what in chosen:
            CHANGES[what][1](host)
        seen = probes.changed(state)
        assert {CHANGES[what][0] for what in chosen} <= set(seen)
        assert bool(seen) == bool(chosen)


# After the first, the directory of the second is no longer configured.
UNDONE = ("library directory configured in place", "configured library directory made")


@settings(max_examples=tries(30), deadline=None)
@given(st.sampled_from(sorted(CHANGES)), st.sampled_from(sorted(CHANGES)))
def test_a_second_change_is_seen_as_well(first: str, second: str) -> None:
    """What was planned after one change still sees the next."""
    with tempfile.TemporaryDirectory() as directory:
        host = host_trees.build(Path(directory))
        CHANGES[first][1](host)
        state = state_of(host)
        if first == second or (first, second) == UNDONE:
            return
        try:
            CHANGES[second][1](host)
        except FileNotFoundError:
            # The first has taken away what the second would change.
            return
        assert CHANGES[second][0] in probes.changed(state)


@pytest.mark.parametrize("what", [probes.VERSION, "discover/driver_table.py"])
def test_another_version_of_the_program_is_a_change(tmp_path: Path, what: str) -> None:
    """Its table of files, too: what another one has written is not to be believed."""
    state = probes.read(host_trees.plan(host_trees.build(tmp_path)))
    assert state[probes.PROGRAM][1][what]
    state[probes.PROGRAM][1][what] = "another"
    assert probes.changed(state) == [probes.PROGRAM]


def test_a_lost_gpu_is_not_seen(tmp_path: Path) -> None:
    """Xid 79: all files stay, and no look at them can tell; the container starts, as with a spec.

    Whoever wants that seen has to ask NVML, at each create.
    """
    host = host_trees.build(tmp_path)
    state = state_of(host)
    write(host / "proc/driver/nvidia/gpus" / GPUS[0] / "information", "GPU UUID: GPU-????????\n")
    assert probes.changed(state) == []


def test_mig_devices_made_again_with_equal_ids_are_not_seen(tmp_path: Path) -> None:
    """Their UUIDs may be others: requests for MIG devices ask NVML."""
    host = host_trees.build(tmp_path)
    state = state_of(host)
    shutil.rmtree(host / MIG / "gi1")
    assert "MIG devices" in probes.changed(state)
    write(host / MIG / "gi1/ci0/access", "DeviceFileMinor: 12\n")
    assert probes.changed(state) == []


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("\0"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    JUNK
    | st.dictionaries(
        st.sampled_from(["a", probes.PROGRAM]),
        JUNK | st.tuples(st.sampled_from(["place", "nodes", "program"]), JUNK).map(list),
    )
)
def test_what_is_no_state_has_changed(junk: object) -> None:
    """A file of another version, or a damaged one, is no reason to die, nor to be believed."""
    assert probes.changed(junk)


@pytest.mark.parametrize("kind", sorted(probes._OPERATIONS))
@pytest.mark.parametrize("argument", ["\ud800", "\0", "", "=", "x" * 5000])
def test_what_is_no_name_of_anything_has_changed(kind: str, argument: str) -> None:
    """Half a surrogate pair is what JSON can have, and no system call takes."""
    assert probes.changed({"a": [kind, {argument: "?"}]})
