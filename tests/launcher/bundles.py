# SPDX-License-Identifier: Apache-2.0
"""Files that the launcher reads: a config file, its companion, a bundle; written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from launcher.conftest import VERSION

if TYPE_CHECKING:
    from launcher.conftest import Bench

# Independent of gpuruntime.request.parse: the launcher treats all words alike.
WORDS = ("NVIDIA_", "nvidia.com/", "createContainer", "cdi.k8s.io/")
PASSED = '{"ociVersion": "1.0.2", "process": {"env": ["PATH=/bin"]}}'


def write_config(bench: Bench, name: str = "etc/gpuruntime/config.toml") -> Path:
    """Write a config file where the launcher looks for it."""
    path = bench.path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# never read here\n")
    return path


def companion_text(
    config: Path | None, *runtimes: str, words: tuple[str, ...] | None = WORDS
) -> str:
    """Return the companion for the current file *config*; None: no config file exists.

    Creates pass unless config.json contains one of *words*; with None no create passes.
    """
    lines = [f"gpuruntime-launcher 3 {VERSION}"]
    if config is None:
        lines.append("missing")
    else:
        status = config.stat()
        numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        stamp = " ".join(map(str, (status.st_dev, status.st_ino, *numbers)))
        lines += [f"config {config}", f"stat {stamp}"]
    lines += [f"runtime {runtime}" for runtime in runtimes]
    lines.append("creates python" if words is None else "creates pass")
    lines += [f"word {word}" for word in words or ()]
    return "".join(f"{line}\n" for line in [*lines, "end"])


def write_companion(bench: Bench, text: str) -> Path:
    """Write the companion file where the launcher of the tests looks for it."""
    path = bench.path("run/launcher")
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o644)
    return path


def write_bundle(bench: Bench, data: bytes | str = PASSED, name: str = "config.json") -> Path:
    """Create and return a bundle whose config.json contains *data*."""
    bundle = bench.path("other/bundle")
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return bundle
