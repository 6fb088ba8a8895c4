# SPDX-License-Identifier: Apache-2.0
"""CDI specs: generated with every option, on several hosts, and what reads and changes them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from creates import container
from recorder import DATA, KEPT, RUNTIMES, WORK, Recorder
from requested import VISIBLE

ETC, RUN = Path("/etc/cdi"), Path("/var/run/cdi")
SPEC = WORK / "spec"
# Where lines are cut at a width: the checkout's path must not count.
HOOK_PATH = ("--hook-path", "/usr/bin/gpu-cdi-hook")
OPTIONS: dict[str, tuple[str, ...]] = {
    "usual": (),
    "index": ("--device-name-strategy", "index"),
    "uuid": ("--device-name-strategy", "uuid"),
    "type-index": ("--device-name-strategy", "type-index"),
    "two-names": ("--device-name-strategy=type-index", "--device-name-strategy=uuid"),
    "bad-name": ("--device-name-strategy", "other"),
    "no-all": ("--no-all-device",),
    "separate": ("--separate-hooks",),
    "separate-chmod": ("--separate-hooks", "--enable-hook", "chmod"),
    "separate-ldconfig": ("--separate-hooks", "--ldconfig-path", "/sbin/ldconfig.real"),
    "annotations": ("--annotations",),
    "gids": ("--additional-gids",),
    "both": ("--annotations", "--additional-gids"),
    "hook-path": ("--hook-path", "/opt/x/gpu-cdi-hook"),
    "ctk-path": ("--nvidia-ctk-path", "/usr/bin/nvidia-ctk"),
    "vendor": ("--vendor", "other.org", "--class", "card"),
    "bad-vendor": ("--vendor", "-x"),
    "device": ("--device", "0"),
    "device-mig": ("--device-id", "1:0"),
    "device-none": ("--device", "none"),
    "device-bad": ("--device", "77"),
    "library-path": ("--library-search-path", "/usr/lib/x86_64-linux-gnu"),
    "library-nowhere": ("--library-search-path", "/nowhere"),
    "config-path": ("--config-search-path", "/usr/share"),
    "root-nowhere": ("--driver-root", "/nowhere"),
    "dev-nowhere": ("--dev-root", "/nowhere"),
    "flag-ipc": ("--feature-flag", "disable-ipc-discoverer"),
    "flag-gids": ("--feature-flag", "no-additional-gids-for-device-nodes", "--additional-gids"),
    "flag-bad": ("--feature-flag", "other"),
    **{f"mode-{name}": ("--mode", name) for name in ("nvml", "management", "gds", "mofed")},
    **{f"mode-{name}": ("--mode", name) for name in ("gdrcopy", "nvswitch", "imex", "cc")},
    # This host is neither a WSL nor a Tegra; `platforms` records these.
    **{f"mode-{name}": ("--mode", name) for name in ("wsl", "csv")},
    **{
        f"capabilities-{name}": ("--driver-capabilities", name)
        for name in ("compute", "utility", "graphics", "video", "display", "ngx", "compat32")
    },
    "capabilities-two": ("--driver-capabilities", "compute,utility"),
    "capabilities-bad": ("--driver-capabilities", "other"),
    **{
        f"without-{name}": ("--disable-hook", name)
        for name in ("create-symlinks", "enable-cuda-compat", "update-ldcache", "all", "other")
    },
    "without-profile": ("--disable-hook", "update-application-profile"),
    "without-masks": ("--disable-hook", "disable-device-node-modification", "--separate-hooks"),
    "with-chmod": ("--enable-hook", "chmod"),
    **{
        f"version-{version}": ("--max-spec-version", version, "--annotations", "--additional-gids")
        for version in ("0.3.0", "0.5.0", "0.6.0", "0.7.0", "1.0.0", "9.9")
    },
    "bad-format": ("--format", "xml"),
    "bad-output": ("--output", "/proc/nowhere/x.yaml"),
}


def generated(recorder: Recorder) -> None:
    """Write the spec with every option, as YAML and a few as JSON; by the incumbent's name."""
    generate = (recorder.program("gpuruntime"), "cdi", "generate")
    for name, options in OPTIONS.items():
        recorder.call(f"generate/{name}", *generate, *options)
    for name in ("usual", "separate", "both", "mode-management", "version-0.3.0", "device-bad"):
        recorder.call(f"generate-json/{name}", *generate, "--format", "json", *OPTIONS[name])
    ctk = (WORK / "bin/nvidia-ctk", "cdi", "generate")
    recorder.call("generate-ctk/usual", *ctk)
    recorder.call("generate-ctk/one-dash", *ctk, "-device-name-strategy=uuid", "-format=json")
    for name in ("x.json", "x.yaml", "x.yml", "x"):
        path = SPEC / name
        SPEC.mkdir(exist_ok=True)
        recorder.call(f"generate-file/{name}", *generate, "--output", path, files={"spec": SPEC})
        shutil.rmtree(SPEC)
    _refreshed(recorder)


def _refreshed(recorder: Recorder) -> None:
    refresh = (recorder.program("gpuruntime"), "cdi", "refresh", *HOOK_PATH)
    for name, options in (
        ("first", ()),
        ("again", ()),
        ("other-options", ("--separate-hooks",)),
        ("back", ()),
        ("force", ("--force",)),
        # Beside the other spec, of which it has a device.
        ("json", ("--output", "/var/run/cdi/other.json", "--device", "0", "--force")),
        ("bad", ("--device", "77")),
        ("nowhere", ("--output", "/proc/nowhere/x.yaml")),
    ):
        recorder.call(f"refresh/{name}", *refresh, *options, files={"spec": RUN, "run": KEPT})
    (RUN / "nvidia.yaml").write_text("not ours\n")
    recorder.call("refresh/edited", *refresh, files={"spec": RUN, "run": KEPT})
    for path in RUN.iterdir():
        path.unlink()


def read(recorder: Recorder) -> None:
    """List, validate, inject, transform and compare, on this host's specs and recorded ones."""
    ours = recorder.program("gpuruntime")
    cdi = (ours, "cdi")
    SPEC.mkdir(exist_ok=True)
    for name, options in (("one", ()), ("two", ("--separate-hooks", "--annotations"))):
        for form in ("yaml", "json"):
            path = SPEC / f"{name}.{form}"
            recorder.call(
                f"made/{name}-{form}", *cdi, "generate", *HOOK_PATH, "--output", path, *options
            )
    shutil.copy(DATA / "oci" / "generated-550.yaml", SPEC / "old.yaml")
    (SPEC / "bad.yaml").write_text("cdiVersion: 0.5.0\nkind: x\ndevices: []\n")
    (SPEC / "empty.json").write_text("")
    shutil.copy(SPEC / "one.yaml", ETC / "nvidia.yaml")
    (ETC / "bad.json").write_text("{")
    for name, words in (("plain", ()), ("verbose", ("-v",)), ("json", ("--json",))):
        for place, more in (("usual", ()), ("conflict", ("--spec-dir", SPEC))):
            recorder.call(f"list/{place}-{name}", *cdi, "list", *words, *more)
    recorder.call("list/nowhere", *cdi, "list", "--spec-dir", "/nowhere")
    recorder.call("list/variable", *cdi, "list", GPURUNTIME_CDI_SPEC_DIRS="/nowhere")
    files = sorted(SPEC.iterdir())
    for name, words in (("plain", ()), ("strict", ("--strict",)), ("json", ("--json",))):
        recorder.call(f"validate/all-{name}", *cdi, "validate", *words, *files)
    for path in files:
        recorder.call(f"validate/{path.name}", *cdi, "validate", path)
        recorder.call(f"transform/{path.name}", *_root(cdi, path))
        recorder.call(f"diff/{path.name}", *cdi, "diff", SPEC / "one.yaml", path)
        recorder.call(f"diff/{path.name}-json", *cdi, "diff", "--json", SPEC / "one.yaml", path)
    recorder.call(
        "transform/container", *_root(cdi, SPEC / "one.json"), "--relative-to", "container"
    )
    recorder.call("transform/stdin", *_root(cdi, "-"), stdin=(SPEC / "one.json").read_bytes())
    config = (DATA / "configs" / "docker-gpu.json").read_bytes()
    for name, words in (
        ("one", ("--device", "nvidia.com/gpu=0")),
        ("two", ("--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=1:0")),
        ("unknown", ("--device", "nvidia.com/gpu=77")),
        ("unknown-json", ("--json", "--device", "nvidia.com/gpu=77", "--device", "a.b/c=d")),
        ("unqualified", ("--device", "0")),
        ("none", ()),
    ):
        recorder.call(f"inject/{name}", *cdi, "inject", *words, stdin=config)
    for name, text in (("empty", ""), ("no-json", "{"), ("list", "[]")):
        words = ("--json", "--device", "nvidia.com/gpu=0")
        recorder.call(f"inject/input-{name}", *cdi, "inject", *words, stdin=text)


def _root(cdi: tuple[str, ...], path: Path | str) -> tuple[str, ...]:
    words = ("transform", "root", "--from", "/usr", "--to", "/run/driver/usr")
    return (*cdi, *words, "--input", str(path))


def cases(recorder: Recorder) -> None:
    """Every recorded case of CDI: validate and list its specs, and inject its devices."""
    ours = recorder.program("gpuruntime")
    paths = sorted((DATA / "cdi").glob("*.json"))
    assert paths
    for path in paths:
        case = json.loads(path.read_text())
        place = WORK / "cases" / path.stem
        words = []
        for number in range(case.get("dirs") or _directories(case)):
            (place / str(number)).mkdir(parents=True)
            words += ["--spec-dir", str(place / str(number))]
        for spec in case.get("specs", ()):
            file = place / str(spec["dir"]) / spec["filename"]
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(spec["text"].encode("utf-8", "surrogatepass"))
        if case["op"] == "inject" and "devices" in case:
            names = [word for name in case["devices"] for word in ("--device", name)]
            text = json.dumps(case.get("oci", {}))
            words = ["cdi", "inject", "--json", *words, *names]
            recorder.call(f"inject/{path.stem}", ours, *words, stdin=text)
    files = [file for file in sorted((WORK / "cases").rglob("*")) if file.is_file()]
    recorder.call("validate/text", ours, "cdi", "validate", *files)
    recorder.call("validate/json", ours, "cdi", "validate", "--json", *files)


def _directories(case: dict[str, Any]) -> int:
    return max((spec["dir"] + 1 for spec in case.get("specs", ())), default=0)


def plain(recorder: Recorder) -> None:
    """Record the spec of another host, and what the other commands say."""
    ours = recorder.program("gpuruntime")
    for name in ("usual", "type-index", "separate", "both", "mode-management"):
        recorder.call(f"generate/{name}", ours, "cdi", "generate", *OPTIONS[name])
    recorder.call("info", ours, "info", "--json")
    recorder.call("driver", ours, "driver", "list", "--json")
    recorder.call("cli-info", WORK / "bin/nvidia-container-cli", "info")
    recorder.call("cli-list", WORK / "bin/nvidia-container-cli", "list")
    recorder.call("explain", ours, "explain", "--gpus", "all", "--json")


def separate(recorder: Recorder) -> None:
    """Have a driver root apart from /."""
    from creates import container, spec  # noqa: PLC0415 (it needs no host)

    ours, root = recorder.program("gpuruntime"), os.environ["SIMHOST_ROOT"]
    roots = ("--driver-root", root, "--dev-root", "/")
    for name in ("usual", "separate", "both", "mode-management"):
        recorder.call(f"generate/{name}", ours, "cdi", "generate", *roots, *OPTIONS[name])
    recorder.config(
        **{"nvidia-container-cli.root": root, "nvidia-container-runtime.runtimes": ["runc"]}
    )
    spec(recorder)
    recorder.cold("create/all", container(f"{VISIBLE}=all"))
    recorder.create("create/named", container(f"{VISIBLE}=nvidia.com/gpu=0"))
    recorder.call("info", ours, "info", "--json")
    recorder.call("doctor", ours, "doctor", "--json")
    recorder.call("driver", ours, "driver", "list", "--json")
    recorder.call("cli-list", WORK / "bin/nvidia-container-cli", "--root", root, "list")


def _prepare_imports() -> None:
    """Let the modules beside this folder be imported, which make the trees of these tests.

    The trees are inputs, so they are not made by the checkout's own code.
    """
    tests = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests), str(tests.parent)]


def platforms(recorder: Recorder) -> None:
    """Miniature roots of WSL and of a Tegra (../platform_roots.py): specs, and containers."""
    _prepare_imports()
    import platform_roots  # noqa: PLC0415

    roots = WORK / "platforms"
    generate = (recorder.program("gpuruntime"), "cdi", "generate")
    for name, build in (("wsl", platform_roots.wsl), ("tegra", platform_roots.tegra)):
        root = build(roots / name).path
        words = (*generate, "--driver-root", root)
        recorder.call(f"generate/{name}", *words)
        recorder.call(f"generate/{name}-separate", *words, "--separate-hooks")
        for mode in ("wsl", "csv", "nvml"):
            recorder.call(f"generate/{name}-as-{mode}", *words, "--mode", mode)
        for mode in ("auto", "csv"):
            recorder.config(
                **{
                    "nvidia-container-cli.root": str(root),
                    "nvidia-container-runtime.mode": mode,
                    RUNTIMES: ["runc"],
                }
            )
            recorder.create(f"create/{name}-{mode}", container(f"{VISIBLE}=0"))
    csv_file = f"{roots}/tegra{platform_roots.CSV}/drivers.csv"
    devices = ("--csv.file", f"{roots}/tegra{platform_roots.CSV}/devices.csv")
    words = (*generate, "--driver-root", roots / "tegra", *devices, "--csv.file", csv_file)
    recorder.call("generate/tegra-files", *words)
    recorder.call("generate/tegra-ignored", *words, "--csv.ignore-pattern", "**/libcuda.so")


def layouts(recorder: Recorder) -> None:
    """Each distribution's layout of the driver (../driver_roots.py), with the fake NVML in it."""
    _prepare_imports()
    from driver_roots import LAYOUTS, build  # noqa: PLC0415

    ours = recorder.program("gpuruntime")
    real = (Path("/") / f"usr/lib/{os.uname().machine}-linux-gnu/libnvidia-ml.so.1").resolve()
    for layout in LAYOUTS:
        root = WORK / "roots" / layout
        build(root, layout)
        words = ("--driver-root", root)
        recorder.call(f"driver/{layout}", ours, "driver", "list", *words, "--json")
        recorder.call(f"driver/{layout}-lines", ours, "driver", "list", *words)
        recorder.call(f"generate/{layout}-no-nvml", ours, "cdi", "generate", *words)
        for library in root.rglob("libnvidia-ml.so.*"):
            if library.is_file() and not library.is_symlink():
                library.write_bytes(real.read_bytes())
                shutil.copy(real.with_name("fakenvml.conf"), library.parent)
        recorder.call(f"generate/{layout}", ours, "cdi", "generate", *words, "--dev-root", "/")
        recorder.call(
            f"generate/{layout}-separate",
            *(ours, "cdi", "generate", *words, "--dev-root", "/", "--separate-hooks"),
            *("--format", "json"),
        )
