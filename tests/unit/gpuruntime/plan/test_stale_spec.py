# SPDX-License-Identifier: Apache-2.0
"""A spec or a node of another driver, or with files that are gone, is told from one that fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpuruntime.errors import SpecError
from gpuruntime.plan import stale_spec

MODULE = "NVRM version: NVIDIA UNIX {} Kernel Module{}  {}  Release Build\nGCC version: 12\n"


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """Return the file in which driver 570.86.15 says its version."""
    path = tmp_path / "version"
    path.write_text(MODULE.format("x86_64", "", "570.86.15"))
    return path


def edits(*paths: Path | str, **members: str) -> Any:
    """Return edits that mount *paths*, as a spec has them."""
    return {"mounts": [{"hostPath": str(p), "containerPath": "/x", **members} for p in paths]}


def made(place: Path, *names: str) -> list[Path]:
    """Make the files."""
    for name in names:
        (place / name).touch()
    return [place / name for name in names]


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("libcuda.so.570.86.15", "libnvidia-ml.so.570.86.15"),
        # No version of the driver is in these names.
        ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-egl-gbm.so.1.1.2"),
        ("nvidia-smi", "libcudadebugger.so.1.2.3", "a.libcuda.so.1.2.3"),
    ],
)
def test_edits_of_the_loaded_driver_are_fine(
    tmp_path: Path, module: Path, names: tuple[str, ...]
) -> None:
    """Whatever else is in them."""
    stale_spec.check(edits(*made(tmp_path, *names)), str(module))


@pytest.mark.parametrize("name", ["libcuda.so.550.163.01", "libnvidia-ml.so.570.86.16"])
@pytest.mark.parametrize("text", [("x86_64", ""), ("x86_64", " for x86_64")])
def test_edits_of_another_driver_are_stale(
    tmp_path: Path, module: Path, name: str, text: tuple[str, str]
) -> None:
    """The text has both versions; the open module spells its own otherwise."""
    module.write_text(MODULE.format(*text, "570.86.15"))
    paths = made(tmp_path, "libcuda.so.570.86.15", name)
    with pytest.raises(SpecError) as caught:
        stale_spec.check(edits(*paths), str(module))
    assert caught.value.lines() == (
        f'spec: the CDI spec is stale: it mounts "{paths[1]}", the loaded driver is 570.86.15'
    )


@pytest.mark.parametrize("name", ["nvidia-smi", "libcuda.so.570.86.15", "libnvidia-cfg.so.1"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_is_gone_makes_edits_stale(
    tmp_path: Path, module: Path, name: str, is_link: bool
) -> None:
    """Also a link that leads nowhere."""
    gone = tmp_path / name
    if is_link:
        gone.symlink_to("nowhere")
    with pytest.raises(SpecError) as caught:
        stale_spec.check(edits(*made(tmp_path, "libcuda.so"), gone), str(module))
    assert (
        caught.value.message == f'the CDI spec is stale: it mounts "{gone}", which does not exist'
    )


@pytest.mark.parametrize(
    ("path", "members"),
    [("tmpfs", {"type": "tmpfs"}), ("tmpfs", {}), ("/gone/shm", {"type": "tmpfs"})],
)
def test_a_mount_that_is_no_file_is_not_looked_for(
    module: Path, path: str, members: dict[str, str]
) -> None:
    """A file system is made for the container."""
    stale_spec.check(edits(path, **members), str(module))


@pytest.mark.parametrize("kind", ["missing", "other text", "directory", "link", "bytes"])
def test_where_the_module_says_nothing_only_files_count(
    tmp_path: Path, module: Path, kind: str
) -> None:
    """As before the module is loaded, or in a virtual machine without one."""
    module.unlink()
    if kind == "other text":
        module.write_text("something else\n")
    elif kind == "directory":
        module.mkdir()
    elif kind == "link":
        (tmp_path / "real").write_text(MODULE.format("x86_64", "", "570.86.15"))
        module.symlink_to(tmp_path / "real")
    elif kind == "bytes":
        module.write_bytes(b"\xff\xfe\0" * 100)
    paths = made(tmp_path, "libcuda.so.550.163.01")
    stale_spec.check(edits(*paths), str(module))
    os.unlink(paths[0])
    with pytest.raises(SpecError):
        stale_spec.check(edits(*paths), str(module))


CTK, HOOK = "nvidia-ctk", "nvidia-cdi-hook"
TOOLKIT = "/usr/local/nvidia/toolkit"


def hooked(path: str, *args: str, stage: str = "createContainer", **members: Any) -> Any:
    """Return edits with a hook."""
    return {"hooks": [{"hookName": stage, "path": path, "args": list(args), **members}]}


@pytest.mark.parametrize("members", [{}, {"env": []}])
@pytest.mark.parametrize("stage", ["createContainer", "startContainer"])
@pytest.mark.parametrize(
    "words",
    [
        (f"/usr/bin/{HOOK}",),
        (f"/usr/bin/{CTK}", CTK, "hook"),
        (f"{TOOLKIT}/{HOOK}.real", f"{HOOK}.real", "update-ldcache"),
        (f"{TOOLKIT}/{CTK}.real",),
        ("/usr/bin/env", f"/usr/bin/{CTK}", "hook"),
        ("/opt/renamed", f"{HOOK}.real"),
    ],
)
def test_a_hook_of_the_incumbent_s_without_env_is_stale(
    module: Path, words: tuple[str, ...], stage: str, members: dict[str, Any]
) -> None:
    """ENV-12: whatever its program is called where it was installed."""
    with pytest.raises(SpecError, match=f'its hook "{words[0]}" has no env'):
        stale_spec.check(hooked(*words, stage=stage, **members), str(module))
    stale_spec.check(hooked(*words, stage=stage, env=["A=b"]), str(module))
    stale_spec.check(hooked(*words, stage="createRuntime", **members), str(module))


@pytest.mark.parametrize(
    "words",
    [
        ("/usr/bin/gpu-cdi-hook", "gpu-cdi-hook", "create-symlinks", CTK),
        ("/usr/bin/vendor-hook",),
        (f"/usr/bin/{HOOK}.real.old",),
        (f"/usr/bin/{CTK}/x", "x"),
    ],
)
def test_other_hooks_are_not_stale(module: Path, words: tuple[str, ...]) -> None:
    """They are given an environment instead."""
    stale_spec.check(hooked(*words), str(module))


def test_edits_without_mounts_are_never_stale(module: Path) -> None:
    """Such as those of a spec of features."""
    stale_spec.check({}, str(module))
    stale_spec.check({"mounts": None}, str(module))  # type: ignore[typeddict-item]
