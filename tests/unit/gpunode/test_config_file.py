# SPDX-License-Identifier: Apache-2.0
"""The config file v1: what is accepted, and each refusal with its line and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpunode.config import file as files
from gpunode.config import settings
from gpunode.config.effective import Config, OptionText, effective
from gpunode.config.file import ConfigFile
from gpunode.config.schema_check import CHECKER
from gpunode.config.sharing import SharedResource, Sharing, SharingKind
from gpunode.watch.child_handle import import_path
from gpuruntime.errors import ArgumentError, ConfigError

WHOLE = """\
version: v1
flags:
  migStrategy: mixed
  failOnInitError: false
  mpsRoot: /run/nvidia/mps
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  useNodeFeatureAPI: true
  deviceDiscoveryStrategy: nvml
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [volume-mounts, cdi-cri]
    deviceIDStrategy: index
    cdiAnnotationPrefix: cdi.k8s.io/
    nvidiaCTKPath: /usr/bin/nvidia-ctk
    containerDriverRoot: /driver
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: false
    noTimestamp: false
    sleepInterval: infinite
    outputFile: /etc/gfd
    machineTypeFile: /sys/class/dmi/id/product_name
resources:
  gpus: [{pattern: "*", name: gpu}]
  mig:  [{pattern: "1g.5gb", name: small}]
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: false
    resources:
    - name: nvidia.com/gpu
      rename: nvidia.com/gpu.part
      devices: [0, "1:0", GPU-6e2a1f00-0000-0000-0000-000000000000]
      replicas: 4
imex: {channelIDs: [0], required: true}
"""


def _config(text: str, **options: str) -> Config:
    given = {name: OptionText(value, f"--{name}") for name, value in options.items()}
    return effective(given, files.parse(text, "c.yaml"))


def _sharing(rest: str, kind: str = "timeSlicing") -> str:
    return f"sharing:\n  {kind}:\n    resources:\n    - name: gpu\n      {rest}\n"


def test_every_key_is_read() -> None:
    """No key of the published file may be lost on the way."""
    config = _config(WHOLE)
    assert config == Config(
        mig_strategy="mixed",
        fail_on_init_error=False,
        mps_root="/run/nvidia/mps",
        nvidia_driver_root="/run/nvidia/driver",
        nvidia_dev_root="/",
        gdrcopy_enabled=True,
        gds_enabled=True,
        mofed_enabled=True,
        device_discovery_strategy="nvml",
        pass_device_specs=True,
        device_list_strategy=("volume-mounts", "cdi-cri"),
        device_id_strategy="index",
        nvidia_cdi_hook_path="/usr/bin/nvidia-ctk",
        container_driver_root="/driver",
        shared_devices_allocation_policy="packed",
        imex_channel_ids=(0,),
        imex_required=True,
        sharing=Sharing(
            SharingKind.TIME_SLICING,
            (
                SharedResource(
                    name="nvidia.com/gpu",
                    new_name="nvidia.com/gpu.part",
                    replicas=4,
                    devices=("0", "1:0", "GPU-6e2a1f00-0000-0000-0000-000000000000"),
                ),
            ),
            fail_requests_greater_than_one=False,
        ),
        warnings=('"resources" of the config file has no effect: names are fixed',),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "{}",
        "version: v1",
        "flags:\nsharing:\n",
        "# a\n---\nversion: v1\n---\n# b\n",
    ],
)
def test_an_empty_file_is_all_defaults(text: str) -> None:
    """Templates leave keys without a value."""
    assert _config(text) == Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: v2\n", 'line 1: unknown version: "v2"'),
        ("version: 1\n", "line 1: unknown version: 1"),
        ("flags:\n  migStrategie: none\n", 'line 2: unknown key "flags.migStrategie"'),
        ("flags:\n  plugin:\n    x: 1\n", 'line 3: unknown key "flags.plugin.x"'),
        ("a: 1\n", 'line 1: unknown key "a"'),
        ("flags:\n  migStrategy: both\n", '"flags.migStrategy" is "both", not one of none,'),
        ("flags:\n\n  failOnInitError: 'no'\n", 'line 3: "flags.failOnInitError" is "no", not'),
        ("flags: []\n", '"flags" is [], not a map of flags'),
        ("- 1\n", "the file is [1], not a map of settings"),
        ("flags:\n  nvidiaDriverRoot: run\n", 'is "run", not an absolute path'),
        ("flags: {plugin: {deviceListStrategy: []}}", "is [], not one of auto, envvar"),
        ("flags: {plugin: {deviceListStrategy: cdi}}", 'is "cdi", not one of auto, envvar'),
        ("flags: {plugin: {healthQuietTime: 5x}}", 'is "5x", not a duration'),
        ("imex: {channelIDs: [1]}", '"imex.channelIDs[0]" is 1, not 0'),
        ("sharing: {timeSlicing: {}}", '"sharing.timeSlicing" has no "resources"'),
        ("sharing: {mps: {resources: []}}", "is [], not a list of at least one resource"),
        (_sharing("replicas: 0"), 'line 5: "sharing.timeSlicing.resources[0].replicas" is 0, not'),
        (_sharing("replicas: -1"), 'line 5: "sharing.timeSlicing.resources[0].replicas" is -1'),
        (_sharing('replicas: "2"'), 'line 5: "sharing.timeSlicing.resources[0].replicas" is "2"'),
        (_sharing("replicas: 2.5"), "is 2.5, not a whole number"),
        (_sharing("replicas: 99999999999"), "is 99999999999, not a whole number from 2 to 10000"),
        (_sharing("devices: all"), '"sharing.timeSlicing.resources[0]" has no "replicas"'),
        (_sharing("{devices: some, replicas: 2}").replace("gpu\n      {", "gpu, ")
         .replace("- name", "- {name"), 'devices" is "some", not all, a number of devices'),
        (_sharing("replicas: 2").replace("gpu", "n" * 60), "71 characters long"),
        (_sharing("replicas: 2").replace("gpu", "Gpu"), '"Gpu", not the name of a resource'),
        (_sharing("replicas: 2").replace("gpu", "a/b/c"), '"a/b/c", not the name of a resource'),
        (
            f"""sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - name: {"n" * 48}
      replicas: 2
""",
            'line 5: "sharing.timeSlicing.resources[0].name" is "nvidia.com/nnn',
        ),
        (
            _sharing("replicas: 2") + "    - name: nvidia.com/gpu\n      replicas: 3\n",
            'line 6: two entries share devices of "nvidia.com/gpu"',
        ),
        (
            _sharing("replicas: 2") + "  mps:\n    resources: [{name: gpu, replicas: 2}]\n",
            'line 6: "sharing.timeSlicing" and "sharing.mps" exclude each other',
        ),
        ("flags: {a: 1", ": line "),
        ("a: 1\na: 1\n", "line 2"),
        ("version: v1\n---\nversion: v1\n", "more than one document"),
        ("a: &a [1]\nb: *c\n", "line 2"),
        ("\x00", "cannot use the config file"),
        ("[" * 200, "nested too deeply"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_line_and_key(text: str, expected: str) -> None:
    """One line that names the place, and a hint."""
    with pytest.raises(ConfigError) as caught:
        _config(text)
    assert expected in caught.value.message
    assert "c.yaml" in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}\n",
        "\nflags: {plugin: {nonsense: 1}, migStrategy: 7}\nversin: v1\n",
    ],
)
def test_a_child_checks_as_this_process_does(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that lives long leaves it to a child, for its memory."""

    def result() -> ConfigFile | str:
        try:
            return files.parse(text, "c.yaml")
        except ConfigError as error:
            return error.lines()

    expected = result()
    monkeypatch.setattr(CHECKER, "import_path", import_path())
    assert result() == expected


def test_a_child_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a config without problems."""
    monkeypatch.setattr(CHECKER, "import_path", [])
    with pytest.raises(ConfigError, match="the process that checks config files has failed"):
        files.parse("version: v1\n", "c.yaml")


def test_an_alias_bomb_is_refused() -> None:
    """Nine lines that stand for 10^9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="aliases expanded"):
        _config("\n".join(lines))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """None of these may block, or be read without a limit."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"#" * (files.MAX_BYTES + 1))
    (tmp_path / "latin").write_bytes(b"a: \xe9")
    for name, expected in [
        ("missing", "No such file"),
        ("fifo", "not a regular file"),
        (".", "irectory"),
        ("large", "larger than 1048576 bytes"),
        ("latin", "not UTF-8 at byte 3"),
    ]:
        with pytest.raises(ConfigError, match=expected) as caught:
            files.read(str(tmp_path / name))
        assert caught.value.hint


def test_one_replica_is_no_sharing() -> None:
    """Report 1548 of the device plugin: "replicas: 1" crashed it again and again."""
    assert _config(_sharing("replicas: 1")).sharing is None


def test_rename_by_default_and_defaults_of_sharing() -> None:
    """A name without a domain gets ours; requests of several units are refused by default."""
    text = (
        "sharing: {mps: {renameByDefault: true, resources: [{name: gpu, replicas: 3, devices: 2},"
        " {name: a.b/c, rename: d, replicas: 2}]}}"
    )
    assert _config(text, mps_root="/mps").sharing == Sharing(
        SharingKind.MPS,
        (
            SharedResource("nvidia.com/gpu", "nvidia.com/gpu.shared", 3, count=2),
            SharedResource("a.b/c", "nvidia.com/d", 2),
        ),
    )


MPS = _sharing("replicas: 2", "mps")


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (
            MPS,
            {"mig_strategy": "mixed", "mps_root": "/mps"},
            "using --mig-strategy=mixed is not supported with MPS",
        ),
        (MPS, {}, "--mps-root is not set"),
        (
            MPS.replace("gpu", "mig-1g.5gb"),
            {"mps_root": "/mps"},
            "sharing using MPS is not supported for MIG devices",
        ),
        ("", {"mps_root": "mps"}, 'is "mps", not an absolute path'),
        ("", {"kubelet_socket": "k.sock"}, "not an absolute path"),
        ("", {"device_list_strategy": "auto,envvar"}, 'is "auto,envvar"'),
        ("", {"device_list_strategy": ","}, 'is ""'),
        ("", {"device_list_strategy": "envvar,cdi"}, 'is "envvar,cdi", not one of auto, envvar'),
        ("", {"device_discovery_strategy": "tegra"}, "not supported"),
        ("", {"imex_channel_ids": "0,1"}, 'is "0,1"'),
        ("", {"imex_channel_ids": "x"}, 'is "x", not whole numbers'),
        ("", {"mig_strategy": ""}, 'is "", not one of none'),
        ("", {"pass_device_specs": "yes"}, 'is "yes", not true or false'),
        ("", {"cdi_annotation_prefix": "cdi"}, "not the beginning of annotations"),
        ("", {"cdi_disable_hooks": "x"}, 'has the unknown hook "x"'),
        ("", {"health_quiet_time": "10"}, 'is "10", not a duration'),
        ("", {"nvidia_driver_root": "x"}, 'is "x", not an absolute path'),
        ("flags: {mpsRoot: mps}", {}, 'line 1: "flags.mpsRoot" is "mps"'),
    ],
)
def test_settings_that_exclude_each_other(
    text: str, options: dict[str, str], expected: str
) -> None:
    """Refused at start, by the names of both."""
    with pytest.raises(ConfigError) as caught:
        _config(text, **options)
    assert expected in caught.value.message
    assert caught.value.hint


def test_an_option_is_a_usage_error_of_its_origin() -> None:
    """A wrong option ends with the code of wrong usage, a wrong file does not."""
    with pytest.raises(ArgumentError) as caught:
        effective({"mig_strategy": OptionText("x", "MIG_STRATEGY")}, files.ConfigFile())
    assert caught.value.message == 'MIG_STRATEGY is "x", not one of none, single, mixed'
    assert caught.value.exit_code == 2


def test_options_go_before_the_file_and_the_file_before_the_default() -> None:
    """Precedence of the published command line."""
    text = "flags: {migStrategy: single, gdsEnabled: true, plugin: {deviceListStrategy: cdi-cri}}"
    config = _config(text, mig_strategy="mixed", gds_enabled="false")
    assert config == Config(mig_strategy="mixed", device_list_strategy=("cdi-cri",))


def test_the_device_root_is_the_driver_root_by_default() -> None:
    """A containerised driver has its nodes below its root."""
    assert _config("", nvidia_driver_root="/run/d").nvidia_dev_root == "/run/d"


def test_a_prefix_that_engines_do_not_read_is_a_warning() -> None:
    """Report 481 of the device plugin."""
    (warning,) = _config("", cdi_annotation_prefix="nvidia.cdi.k8s.io/").warnings
    assert 'no annotation with the prefix "nvidia.cdi.k8s.io/"' in warning


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("10m", 600), ("1h30m", 5400), ("1.5s", 1.5), (2_000_000_000, 2), ("0", 0), ("5", None),
     ("", None), ("5m\n", None)],
)  # fmt: skip
def test_durations(value: str | int, seconds: float | None) -> None:
    """The forms of Go's durations, and nanoseconds."""
    result = settings.duration(value)
    assert result == seconds if seconds is None else result == pytest.approx(seconds)
