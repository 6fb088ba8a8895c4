# SPDX-License-Identifier: Apache-2.0
"""On the simulated host, each create that the launcher passes on or answers is looked at again.

All tests of this directory that start containers there rely on it; here is the control.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shim_host import LAUNCHER, ShimHost, asking

pytestmark = pytest.mark.system
BUILT = Path(LAUNCHER).resolve()
COMPANION = "/run/gpuruntime/launcher"
REPLAY = "/run/gpuruntime/replay-*"
FORGOTTEN = f"sed -i -E '/^word (NVIDIA_|CUDA_VERSION)$/d' {COMPANION}"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShimHost]:
    """Return a simulated host."""
    with ShimHost(tmp_path_factory.mktemp("watched")) as found:
        yield found


@pytest.fixture(autouse=True)
def companion(host: ShimHost) -> None:
    """Have a companion for the config file of the tests."""
    host.shell(f"rm -f {COMPANION}")
    assert host.create(asking()).config["process"]["env"] == ["PATH=/bin"]
    host.shell(f"test -f {COMPANION}")


def test_a_create_is_passed_on_and_watched(host: ShimHost) -> None:
    """Nothing is wrong with one that asks for nothing; Python may not even be asked."""
    call = host.create(asking(), GPURUNTIME_FAST="only")
    assert (call.returncode, call.stderr, call.before) == (0, "", call.after)
    assert call.arguments is not None


def test_one_that_asks_is_not_passed_on(host: ShimHost) -> None:
    """The variable proves it."""
    call = host.create(asking("NVIDIA_VISIBLE_DEVICES=0"), GPURUNTIME_FAST="only")
    assert call.returncode == 1
    assert "only Python can answer this call" in call.stderr
    assert host.create(asking("NVIDIA_VISIBLE_DEVICES=0")).gpus == [0]


@pytest.mark.parametrize("ask", ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_VERSION=7.0"])
def test_one_that_is_passed_on_by_mistake_is_seen(ask: str, host: ShimHost) -> None:
    """The control: of a word that was forgotten."""
    host.shell(FORGOTTEN)
    call = host.create(asking(ask))
    assert call.returncode == 70
    assert call.arguments is None
    assert "is asked of the machine" in call.stderr


def test_one_that_is_answered_by_mistake_is_seen(host: ShimHost) -> None:
    """The control: of an answer in which somebody has changed a byte."""
    ask = {**asking("NVIDIA_VISIBLE_DEVICES=1"), "mounts": [], "linux": {"resources": {}}}
    first = host.create(ask)
    second = host.create(ask, GPURUNTIME_FAST="only")
    assert second.config == first.config
    assert second.gpus == [1]
    host.shell(f"sed -i 's,:\"/dev/nvidiactl,:\"/dev/nvidiactm,' {REPLAY}")
    call = host.create(ask)
    assert call.returncode == 70
    assert call.arguments is None
    assert "the shim would write something else" in call.stderr


def test_the_unwatched_one_would_start_it_without_its_gpu(host: ShimHost, tmp_path: Path) -> None:
    """So it is the watching that has found it."""
    host.shell(FORGOTTEN)
    unwatched = tmp_path / "gpu-container-runtime"
    script = f"umount {BUILT}; cp {BUILT} {unwatched}"
    host.shell(f"unshare --mount --propagation private sh -euc '{script}'")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text('["NVIDIA_VISIBLE_DEVICES=0"]')
    done = host.run(
        *(str(unwatched), "create", "--bundle", str(bundle), "id"),
        GPURUNTIME_CONFIG=str(host.place / "config.toml"),
        RECORD=str(tmp_path / "record"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "record").exists()
