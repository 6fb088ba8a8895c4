# SPDX-License-Identifier: Apache-2.0
"""The files of container engines: configured, once more, and undone."""

from __future__ import annotations

import shutil
from pathlib import Path

from recorder import DATA, WORK, Recorder

PLACE = WORK / "engine"
DEFAULT, CDI = "--set-as-default", "--cdi.enabled"
ANNOTATIONS = ("--container-annotations", "cdi.k8s.io/")
# Sample → the engine, its file, and what is asked for; in place: without a drop-in.
SAMPLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "docker-new": ("docker", "daemon.json", (DEFAULT, CDI)),
    "docker-kept": ("docker", "daemon.json", (CDI,)),
    "docker-default": ("docker-rootless", "daemon.json", (DEFAULT,)),
    "docker-one-line": ("docker", "daemon.json", ()),
    "docker-crlf": ("docker", "daemon.json", ()),
    "containerd-new": ("containerd", "config.toml", (DEFAULT, CDI)),
    "containerd-v1": ("containerd", "config.toml", (DEFAULT, CDI)),
    "containerd-v2": ("containerd", "config.toml", ANNOTATIONS),
    "containerd-v3": ("containerd", "config.toml", (DEFAULT, CDI)),
    "containerd-imports": ("containerd", "config.toml", ()),
    "containerd-in-place": ("containerd", "config.toml", ("--drop-in-config", "")),
    "microk8s": ("microk8s", "containerd-template.toml", (DEFAULT,)),
    "k0s": ("k0s", "containerd.toml", (DEFAULT,)),
    "k3s-new": ("k3s", "config.toml", ()),
    "k3s-v2": ("rke2", "config.toml.tmpl", ANNOTATIONS),
    "crio-new": ("crio", "crio.conf", (DEFAULT,)),
    "crio-drop-ins": ("crio", "crio.conf", ()),
    "crio-in-place": ("crio", "crio.conf", (DEFAULT, "--drop-in-config", "")),
    "podman-new": ("podman", "containers.conf", (DEFAULT,)),
    "podman-in-place": ("podman", "containers.conf", ("--drop-in-config", "")),
}
DROP_INS = {
    "containerd": "conf.d/99-gpuruntime.toml",
    "k0s": "containerd.d/99-gpuruntime.toml",
    "crio": "crio.conf.d/99-gpuruntime.toml",
    "podman": "containers.conf.d/99-gpuruntime.conf",
}
STEPS = (
    *(("dry-run", ("--dry-run",)), ("check", ("--check",)), ("configure", ())),
    *(("checked", ("--check",)), ("again", ()), ("undo-dry", ("--undo", "--dry-run"))),
    ("undo", ("--undo",)),
)


def samples(recorder: Recorder) -> None:
    """Every sample: as its test asks for it, and with every option."""
    directories = {path.name for path in (DATA / "engines").iterdir()}
    for name in sorted(directories - set(SAMPLES)):
        raise AssertionError(f"{name}: a sample of an engine's files that is not in SAMPLES")
    for name, (engine, file, options) in SAMPLES.items():
        drop_in = DROP_INS.get(engine)
        if drop_in and "--drop-in-config" not in options:
            options = (*options, "--drop-in-config", str(PLACE / drop_in))  # noqa: PLW2901
        words = ("--runtime", engine, "--config", str(PLACE / file), *options)
        _play(recorder, f"{name}", DATA / "engines" / name / "before", words)
        everything = ("--nvidia-runtime-name", "nvidia", DEFAULT, CDI)
        _one(recorder, f"{name}/named", DATA / "engines" / name / "before", (*words, *everything))


def _play(recorder: Recorder, name: str, before: Path, words: tuple[str, ...]) -> None:
    _place(before)
    for step, more in STEPS:
        _configure(recorder, f"{name}/{step}", (*words, *more))


def _one(recorder: Recorder, case: str, before: Path, words: tuple[str, ...]) -> None:
    _place(before)
    _configure(recorder, case, words)


def _configure(recorder: Recorder, case: str, words: tuple[str, ...]) -> None:
    recorder.call(
        case,
        *(recorder.program("gpuruntime"), "runtime", "configure"),
        *("--runtime-path", "/usr/bin/gpu-container-runtime", *words),
        files={"files": PLACE, "state": WORK / "state"},
    )


def _place(before: Path | None) -> None:
    for directory in (PLACE, WORK / "state"):
        shutil.rmtree(directory, ignore_errors=True)
    if before is not None and before.is_dir():
        shutil.copytree(before, PLACE)
    else:
        PLACE.mkdir()


def absent(recorder: Recorder) -> None:
    """Record the usual places of each engine, and what is refused."""
    ours = recorder.program("gpuruntime")
    for engine in (
        *("docker", "containerd", "crio", "podman", "k3s", "rke2", "microk8s", "k0s"),
        *("docker-rootless", "unknown"),
    ):
        _place(None)
        words = ("runtime", "configure", "--runtime", engine, "--dry-run")
        recorder.call(f"usual/{engine}", ours, *words)
        recorder.call(f"usual/{engine}-ctk", WORK / "bin/nvidia-ctk", *words)
    bad = PLACE / "bad"
    for name, text in (("json", "{"), ("toml", "a = ["), ("number", "3")):
        for engine in ("docker", "containerd", "crio", "podman"):
            _place(None)
            bad.write_text(text)
            _configure(
                recorder, f"bad/{engine}-{name}", ("--runtime", engine, "--config", str(bad))
            )
    for name, words in (
        ("hook", ("--runtime", "crio", "--config-mode", "oci-hook")),
        (
            "hook-file",
            (
                *("--runtime", "crio", "--config-mode=oci-hook"),
                *("--oci-hook-path", str(PLACE / "hook.json"), "--hook-path", "/opt/x"),
            ),
        ),
        ("mode", ("--runtime", "crio", "--config-mode", "other")),
        ("undo-nothing", ("--runtime", "docker", "--config", str(PLACE / "x"), "--undo")),
        ("source", ("--runtime", "containerd", "--config-source", "command", "--dry-run")),
        ("name", ("--runtime", "docker", "--config", str(PLACE / "x"), "--runtime-name", "a b")),
    ):
        _place(None)
        _configure(recorder, f"other/{name}", words)
