# SPDX-License-Identifier: Apache-2.0
"""Where a fingerprint looks: below which root, at which cost, under which environment.

That it sees each change is shown in tests/property/test_host_state.py.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import host_trees
import pytest
from host_trees import LIBRARIES

from gpuruntime import probes
from gpuruntime.discover import fingerprint
from gpuruntime.errors import DiscoveryError


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Return a host as a tree of files."""
    return host_trees.build(tmp_path)


@pytest.mark.parametrize("name", ["XDG_DATA_DIRS", "CUDA_MPS_PIPE_DIRECTORY"])
def test_the_environment_is_asked_on_demand(
    host: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's environment is not that of whoever made the snapshot."""
    monkeypatch.delenv(name, raising=False)
    with_it = probes.read(host_trees.plan(host))
    without = probes.read(host_trees.plan(host, environment=False))
    monkeypatch.setenv(name, "/opt/other")
    assert probes.changed(with_it) == ["environment"]
    assert probes.changed(without) == []
    assert host_trees.plan(host, environment=False).keys() == without.keys()
    other = str(host / "driver/opt/other")
    asked = {word for _, words in host_trees.plan(host).values() for word in words}
    assert any(word.startswith(other) for word in asked)
    assert "/opt/other" not in str(host_trees.plan(host, environment=False))


def test_what_the_variables_name_is_asked(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file below another directory of data, and the pipes of MPS in another place."""
    monkeypatch.setenv("XDG_DATA_DIRS", "/opt/data")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/opt/mps")
    state = probes.read(host_trees.plan(host))
    host_trees.write(host / "driver/opt/data/vulkan/icd.d/nvidia.json")
    assert "other files" in probes.changed(state)
    state = probes.read(host_trees.plan(host))
    (host / "driver/opt/mps").mkdir()
    assert "sockets" in probes.changed(state)


def test_search_paths_are_in_place_of_the_usual(host: Path) -> None:
    """As they are for discovery."""
    host_trees.write(host / "mine/libcuda.so.1", "x")
    host_trees.write(host / "data/vulkan/icd.d/x.json")
    options = {"search_paths": [str(host / "mine")], "config_search_paths": [str(host / "data")]}
    state = probes.read(host_trees.plan(host, **options))
    host_trees.write(host / LIBRARIES / "libnvidia-encode.so.1.2")
    host_trees.write(host / "driver/usr/share/vulkan/icd.d/nvidia.json")
    assert probes.changed(state) == []
    host_trees.write(host / "mine/libnvidia-encode.so.1.2")
    host_trees.write(host / "data/vulkan/icd.d/nvidia.json")
    # Programs are searched for beside the libraries as well.
    assert probes.changed(state) == ["library directories", "programs", "other files"]


def test_links_of_a_root_are_its_own(host: Path) -> None:
    """Where /opt/driver/lib is a link to /data/lib, that means the root's, not this machine's."""
    real = host / "driver/data/lib"
    host_trees.write(real / "libcuda.so.1", "x")
    (host / "driver/opt/driver").mkdir(parents=True)
    (host / "driver/opt/driver/lib").symlink_to("/data/lib")
    state = probes.read(host_trees.plan(host))
    host_trees.write(real / "libnvidia-encode.so.1.2")
    assert probes.changed(state) == ["library directories"]
    state = probes.read(host_trees.plan(host))
    host_trees.rewrite(real / "libcuda.so.1", "y")
    assert probes.changed(state) == ["libraries"]


def test_alternatives_of_debian_are_asked(host: Path) -> None:
    """Its drivers have directories of their own, also for programs and modules of Xorg."""
    private = "driver/usr/lib/x86_64-linux-gnu/nvidia/current"
    host_trees.write(host / private / "libcuda.so.1.2", "x")
    host_trees.relink(host / LIBRARIES / "libcuda.so.1", "nvidia/current/libcuda.so.1.2")
    host_trees.write(host / "driver/usr/lib/nvidia/current/other")
    state = probes.read(host_trees.plan(host))
    host_trees.write(host / private / "libnvidia-encode.so.1.2")
    assert "library directories" in probes.changed(state)
    state = probes.read(host_trees.plan(host))
    host_trees.write(host / "driver/usr/lib/nvidia/current/nvidia-smi")
    assert probes.changed(state) == ["other files"]


def test_the_numbers_of_a_node_are_part_of_it(host: Path) -> None:
    """After another load of the module, the same name may be another device."""
    node = host / "dev/dev/nvidia-uvm"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(511, 0))
    except PermissionError:
        pytest.skip("device nodes cannot be made here: needs root with CAP_MKNOD")
    state = probes.read(host_trees.plan(host))
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(510, 0))
    assert probes.changed(state) == ["device nodes"]
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(511, 0))
    assert probes.changed(state) == []


def test_the_cost_is_that_of_directories(host: Path) -> None:
    """More files in them are not more questions, nor are more directories that are not there."""
    before = sum(len(words) for _, words in host_trees.plan(host).values())
    assert before < 120
    for number in range(50):
        host_trees.write(host / LIBRARIES / f"libnvidia-{number}.so.1.2")
        host_trees.write(host / "driver/lib/firmware/nvidia" / f"chip{number}/gsp.bin")
    host_trees.write(host / "driver/etc/ld.so.conf.d/more.conf", "/gone/a\n/gone/b\n/gone/c/d\n")
    after = host_trees.plan(host)
    assert sum(len(words) for _, words in after.values()) == before + 2
    assert str(host / "driver/gone") in after["library directories"][1]
    state = probes.read(after)
    (host / "driver/gone/c/d").mkdir(parents=True)
    assert "library directories" in probes.changed(state)


def test_a_root_may_be_a_link_to_another_tomorrow(host: Path) -> None:
    """As /run/nvidia/driver can be one; and relative paths are those of now."""
    (host / "link").symlink_to("driver")
    plan = dict(fingerprint.plan(str(host / "link"), "dev", ["lib"], proc=str(host / "proc")))
    plan.pop("environment")
    paths = [path for part, (_, paths) in plan.items() if part != "program" for path in paths]
    assert all(path.startswith("/") for path in paths)
    state = probes.read(plan)
    (host / "other").mkdir()
    host_trees.relink(host / "link", "other")
    assert probes.changed(state) == ["driver root"]


def test_a_driver_root_that_is_not_there_is_an_error(host: Path) -> None:
    """There is nothing to look at then."""
    with pytest.raises(DiscoveryError, match="cannot open the driver root"):
        fingerprint.plan(str(host / "nowhere"), str(host / "dev"))


def test_a_host_without_anything_has_a_state(tmp_path: Path) -> None:
    """What is not there is an answer as well, of which the next change is seen."""
    (tmp_path / "driver").mkdir()
    state = probes.read(host_trees.plan(tmp_path))
    assert probes.changed(state) == []
    host_trees.write(tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information")
    assert probes.changed(state) == ["GPUs"]


def test_the_id_of_this_boot(tmp_path: Path) -> None:
    """None is "", where the kernel does not tell."""
    host_trees.write(tmp_path / "sys/kernel/random/boot_id", "0d5f\n")
    assert fingerprint.boot_id(str(tmp_path)) == "0d5f"
    assert fingerprint.boot_id(str(tmp_path / "nowhere")) == ""
