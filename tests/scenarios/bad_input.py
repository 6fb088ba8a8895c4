# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D103, D401 (the name of a case says what it does)
"""Call the runtime with each kind of bad input, on the simulated host; print what came of it.

Standard output is one JSON object: case → status, stderr, last log record in both formats, whether
the recording runc was started, whether config.json is what and where it was, seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BIN = Path(__file__).parents[2] / ".venv" / "bin"
RUNTIME = str(BIN / "gpu-container-runtime")
SPEC = Path("/etc/cdi/nvidia.json")
DEADLINE_S = 30
STANDARD_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")


class Case:
    """A bundle that asks for GPU 0, a spec, a recording runc; a case changes one of them."""

    def __init__(self, work: Path, spec: str) -> None:
        self.work = work
        self.bundle = work / "bundle"
        self.bundle.mkdir(parents=True)
        self.config = self.bundle / "config.json"
        self.document = {
            "ociVersion": "1.0.2",
            "process": {"args": ["/x"], "cwd": "/", "env": []},
            "root": {"path": "rootfs"},
        }
        self.ask("0")
        self.record = work / "runc-was-started"
        programs = work / "bin"
        programs.mkdir()
        for name in ("runc", "crun"):
            (programs / name).write_text(f'#!/bin/sh\necho "$@" >> {self.record}\n')
            (programs / name).chmod(0o755)
        # Where no word asks, the low-level runtime refuses, once the launcher has a companion.
        self.environment = {"PATH": f"{programs}:/usr/bin:/bin", "GPURUNTIME_FAST": "off"}
        self.spec_directory(spec)

    def spec_directory(self, spec: str) -> None:
        """Have the one good spec in /etc/cdi."""
        for name in os.listdir("/etc/cdi"):
            os.unlink(f"/etc/cdi/{name}")
        SPEC.write_text(spec)

    def write(self, text: str | bytes | None = None) -> None:
        """Write config.json: *text*, or the document."""
        data = json.dumps(self.document) if text is None else text
        self.config.write_bytes(data if isinstance(data, bytes) else data.encode())

    def ask(self, devices: str) -> None:
        """Ask for other *devices* of the spec, by their names in it or by qualified ones."""
        names = [name if "/" in name else f"nvidia.com/gpu={name}" for name in devices.split(",")]
        value = ",".join(names) if devices else ""
        self.document["process"]["env"] = [f"NVIDIA_VISIBLE_DEVICES={value}"]  # type: ignore[index]
        self.write()

    def toml(self, text: str) -> None:
        """Have a config file."""
        path = self.work / "config.toml"
        path.write_text(text)
        self.environment["GPURUNTIME_CONFIG"] = str(path)


def good(case: Case) -> None:
    """Change nothing: the control, which must reach runc."""


def no_runc(case: Case) -> None:
    case.toml('[nvidia-container-runtime]\nruntimes = ["/no/such/runc", "nowhere-runc"]\n')


def no_runc_anywhere(case: Case) -> None:
    """Neither on PATH nor in the standard directories, and no config file that names one."""
    shutil.rmtree(case.work / "bin")
    for name in ("runc", "crun"):
        for place in STANDARD_PATH:
            if os.path.isfile(f"{place}/{name}"):
                subprocess.run(["mount", "--bind", "/dev/null", f"{place}/{name}"], check=True)


def runc_of_another_machine(case: Case) -> None:
    (case.work / "bin" / "runc").write_text("no program at all")


def config_missing(case: Case) -> None:
    case.config.unlink()


def config_empty(case: Case) -> None:
    case.write("")


def config_truncated(case: Case) -> None:
    case.write(json.dumps(case.document)[:-20])


def config_cut_before_the_request(case: Case) -> None:
    case.write('{"ociVersion": "1.0.2", "process": {')


def config_directory(case: Case) -> None:
    case.config.unlink()
    case.config.mkdir()


def config_fifo(case: Case) -> None:
    case.config.unlink()
    os.mkfifo(case.config)


def config_link(case: Case) -> None:
    case.config.rename(case.work / "elsewhere.json")
    case.config.symlink_to(case.work / "elsewhere.json")


def config_device(case: Case) -> None:
    case.config.unlink()
    os.mknod(case.config, 0o020666, os.makedev(1, 5))


def config_duplicate_key(case: Case) -> None:
    case.write(json.dumps(case.document)[:-1] + ', "hooks": {}, "hooks": {}}')


def config_deep_duplicate_key(case: Case) -> None:
    case.write(json.dumps(case.document).replace('"cwd"', '"cwd": "/a", "cwd"'))


def config_invalid_utf8(case: Case) -> None:
    case.write(json.dumps(case.document).encode().replace(b"/x", b"/\xff"))


def config_other_case(case: Case) -> None:
    case.document["HOOKS"] = {}
    case.write()


def config_utf16(case: Case) -> None:
    case.write(json.dumps(case.document).encode("utf-16"))


def config_byte_order_mark(case: Case) -> None:
    case.write(b"\xef\xbb\xbf" + json.dumps(case.document).encode())


def config_trailing_garbage(case: Case) -> None:
    case.write(json.dumps(case.document) + " x")


def config_nan(case: Case) -> None:
    case.write(json.dumps(case.document)[:-1] + ', "x": NaN}')


def config_number_out_of_range(case: Case) -> None:
    case.write(json.dumps(case.document)[:-1] + ', "x": 1e999}')


def config_number_of_10000_digits(case: Case) -> None:
    case.write(json.dumps(case.document)[:-1] + f', "x": {"9" * 10_000}}}')


def config_100000_brackets(case: Case) -> None:
    case.write(json.dumps(case.document)[:-1] + f', "x": {"[" * 100_000}{"]" * 100_000}}}')


def config_100_levels(case: Case) -> None:
    case.write(json.dumps(case.document)[:-1] + f', "x": {"[" * 100}{"]" * 100}}}')


def config_lone_surrogate(case: Case) -> None:
    case.write(json.dumps(case.document)[:-1] + r', "x": "\ud800"}')


def config_64_mib(case: Case) -> None:
    with case.config.open("ab") as stream:
        stream.truncate(64 << 20)


def config_list(case: Case) -> None:
    case.write('["NVIDIA_VISIBLE_DEVICES=0"]')


def mounts_null_entry(case: Case) -> None:
    case.document["mounts"] = [None]
    case.write()


def linux_a_string(case: Case) -> None:
    case.document["linux"] = "x"
    case.write()


def env_a_map(case: Case) -> None:
    case.document["process"]["env"] = {"NVIDIA_VISIBLE_DEVICES": "0"}  # type: ignore[index]
    case.write()


def uid_a_boolean(case: Case) -> None:
    case.document["process"]["user"] = {"uid": True}  # type: ignore[index]
    case.write()


def bundle_missing(case: Case) -> None:
    shutil.rmtree(case.bundle)


def no_spec(case: Case) -> None:
    SPEC.unlink()


def broken_spec_alone(case: Case) -> None:
    SPEC.write_text("{")


def broken_yaml_spec_alone(case: Case) -> None:
    SPEC.rename("/etc/cdi/nvidia.yaml").write_text("a: [")


def device_of_a_broken_spec(case: Case) -> None:
    """The spec of the GPUs is good, the one with the device that is asked for is not."""
    Path("/etc/cdi/card.json").write_text('{"cdiVersion": "0.5.0", "kind": "example.com/card"')
    case.ask("0,example.com/card=0")


def untrusted_spec(case: Case) -> None:
    SPEC.chmod(0o666)


def spec_is_a_fifo(case: Case) -> None:
    SPEC.unlink()
    os.mkfifo(SPEC)


def spec_with_unknown_member(case: Case) -> None:
    SPEC.write_text(SPEC.read_text().replace('"kind"', '"colour": 1, "kind"'))


def two_specs_of_one_kind(case: Case) -> None:
    Path("/etc/cdi/other.json").write_text(SPEC.read_text())


def spec_names_a_missing_node(case: Case) -> None:
    SPEC.write_text(SPEC.read_text().replace("/dev/nvidiactl", "/dev/nvidia-missing"))


def spec_names_a_file_as_node(case: Case) -> None:
    SPEC.write_text(SPEC.read_text().replace("/dev/nvidiactl", "/etc/passwd"))


def gpu_9_of_8(case: Case) -> None:
    case.ask("9")


def one_of_two_unknown(case: Case) -> None:
    case.ask("0,9")


def unknown_uuid(case: Case) -> None:
    case.ask("GPU-00000000-1111-2222-3333-444444444444")


def path_as_device(case: Case) -> None:
    case.ask("../../dev/sda")


def all_of_another_vendor(case: Case) -> None:
    case.ask("example.com/gpu=all")


def control_characters(case: Case) -> None:
    case.ask("0,\x1b[2J\nlevel=info msg=forged")


def a_megabyte_of_devices(case: Case) -> None:
    case.ask("x" * (1 << 20))


def config_toml_broken(case: Case) -> None:
    case.toml("this is = not toml [")


def config_toml_of_wrong_type(case: Case) -> None:
    case.toml("[nvidia-container-runtime]\nruntimes = 1\n")


def config_toml_no_runtimes(case: Case) -> None:
    case.toml("[nvidia-container-runtime]\nruntimes = []\n")


def mode_not_there(case: Case) -> None:
    case.toml('[nvidia-container-runtime]\nmode = "tegra"\n')


def broken_spec_beside(case: Case) -> None:
    """A broken file must not hide the good one: this reaches runc."""
    Path("/etc/cdi/broken.json").write_text("{")
    Path("/etc/cdi/broken.yaml").write_text("a: [")
    os.mkfifo("/etc/cdi/fifo.json")


def unknown_key_in_toml(case: Case) -> None:
    """A key from a newer version is a warning: this reaches runc."""
    case.toml('[nvidia-container-runtime]\nlog-levle = "debug"\n')


def mode_not_there_without_gpu(case: Case) -> None:
    """A container without a GPU does not depend on the mode: this reaches runc."""
    case.toml('[nvidia-container-runtime]\nmode = "tegra"\n')
    case.ask("")


def odd_config_without_gpu(case: Case) -> None:
    """What we do not edit is not ours to refuse: this reaches runc."""
    case.write(b'{"hooks": {}, "hooks": {}, "x": "\xff"}')


def yaml_spec(case: Case) -> None:
    """A spec that only the slow path can read: this reaches runc."""
    text = subprocess.run(
        [BIN / "gpuruntime", "cdi", "generate"], capture_output=True, text=True, check=True
    ).stdout
    SPEC.unlink()
    Path("/etc/cdi/nvidia.yaml").write_text(text)


CASES: tuple[Callable[[Case], None], ...] = (
    no_runc, no_runc_anywhere, runc_of_another_machine,
    config_missing, config_empty, config_truncated,
    config_cut_before_the_request, config_directory, config_fifo, config_link, config_device,
    config_duplicate_key, config_deep_duplicate_key, config_invalid_utf8, config_other_case,
    config_utf16, config_byte_order_mark, config_trailing_garbage, config_nan,
    config_number_out_of_range, config_number_of_10000_digits, config_100000_brackets,
    config_100_levels, config_lone_surrogate, config_64_mib, config_list, mounts_null_entry,
    linux_a_string, env_a_map, uid_a_boolean, bundle_missing, no_spec, broken_spec_alone,
    broken_yaml_spec_alone, device_of_a_broken_spec,
    untrusted_spec, spec_is_a_fifo, spec_with_unknown_member,
    two_specs_of_one_kind, spec_names_a_missing_node, spec_names_a_file_as_node, gpu_9_of_8,
    one_of_two_unknown, unknown_uuid, path_as_device, all_of_another_vendor, control_characters,
    a_megabyte_of_devices, config_toml_broken, config_toml_of_wrong_type,
    config_toml_no_runtimes, mode_not_there,
)  # fmt: skip
WORKING: tuple[Callable[[Case], None], ...] = (
    good, broken_spec_beside, unknown_key_in_toml, mode_not_there_without_gpu,
    odd_config_without_gpu, yaml_spec,
)  # fmt: skip
# The bytes of these reach runc as they are.
UNCHANGED = ("mode_not_there_without_gpu", "odd_config_without_gpu")


def identity(path: Path) -> list[object] | None:
    """Return what tells a file that nobody touched."""
    try:
        status = path.lstat()
    except OSError:
        return None
    content = path.read_bytes().hex() if path.is_file() and status.st_size < 1 << 20 else ""
    return [status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode, content]


def observe(case: Case, log_format: str) -> dict[str, object]:
    """Call create once; return what came of it."""
    log = case.work / f"log.{log_format}"
    before = identity(case.config)
    start = time.monotonic()
    command = [RUNTIME, "--log", str(log), "--log-format", log_format, "create"]
    try:
        done = subprocess.run(
            [*command, "--bundle", str(case.bundle), "one"],
            capture_output=True, check=False, timeout=DEADLINE_S, env=case.environment,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"status": "hangs"}
    return {
        "status": done.returncode,
        "stdout": done.stdout.decode(errors="replace"),
        "stderr": done.stderr.decode(errors="replace"),
        "log": log.read_text().splitlines() if log.exists() else [],
        "started": case.record.exists(),
        "untouched": before == identity(case.config),
        "left": sorted(os.listdir(case.bundle)) if case.bundle.exists() else [],
        "seconds": time.monotonic() - start,
    }


def main() -> None:
    """Run every case and print what came of it."""
    generate = [str(BIN / "gpuruntime"), "cdi", "generate", "--format", "json"]
    spec = subprocess.run(generate, capture_output=True, text=True, check=True).stdout
    results = {}
    for prepare in (*CASES, *WORKING):
        with tempfile.TemporaryDirectory() as work:
            case = Case(Path(work), spec)
            prepare(case)
            results[prepare.__name__] = {f: observe(case, f) for f in ("json", "text")}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
