# SPDX-License-Identifier: Apache-2.0
"""The command line of the device plugin: options, variables, precedence, wrong usage."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gpunode.cli import device_plugin as cli
from gpunode.cli.main import root
from gpunode.config import settings
from gpunode.config.effective import Config
from gpuruntime.errors import ConfigError

TREE = Path(__file__).parents[3]


def _config(arguments: list[str], variables: dict[str, str], text: str, tmp_path: Path) -> Config:
    """Return the config of a command line, an environment and a config file."""
    (tmp_path / "c.yaml").write_text(text)
    configs = []

    @click.command()
    @cli.setting_options
    @click.pass_context
    def command(ctx: click.Context, /, **values: object) -> None:
        options = cli.option_texts(ctx, values, variables)
        configs.append(cli.load_config(str(tmp_path / "c.yaml"), options))

    result = CliRunner().invoke(command, arguments, env=variables, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return configs[0]


@pytest.mark.parametrize(
    ("arguments", "variables", "text", "expected"),
    [
        ([], {}, "", "none"),
        ([], {}, "flags: {migStrategy: single}", "single"),
        ([], {"MIG_STRATEGY": "mixed"}, "flags: {migStrategy: single}", "mixed"),
        (
            ["--mig-strategy=none"],
            {"MIG_STRATEGY": "mixed"},
            "flags: {migStrategy: single}",
            "none",
        ),
        ([], {"MIG_STRATEGY": ""}, "flags: {migStrategy: single}", "single"),
    ],
)
def test_precedence(
    arguments: list[str],
    variables: dict[str, str],
    text: str,
    expected: str,
    tmp_path: Path,
) -> None:
    """Command line, environment, file, default; an empty variable is none."""
    assert _config(arguments, variables, text, tmp_path).mig_strategy == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--pass-device-specs"], Config(pass_device_specs=True)),
        (
            ["--pass-device-specs=true", "--gds-enabled"],
            Config(pass_device_specs=True, gds_enabled=True),
        ),
        (["--fail-on-init-error=false"], Config(fail_on_init_error=False)),
        (
            ["--device-list-strategy=envvar,cdi-cri", "--device-list-strategy", "cdi-cri"],
            Config(device_list_strategy=("envvar", "cdi-cri")),
        ),
        (["--kubelet-socket="], Config(kubelet_socket="")),
        (["--imex-channel-ids", "0"], Config(imex_channel_ids=(0,))),
        (["--health-quiet-time", "1m30s"], Config(health_quiet_time=90)),
        (
            ["--nvidia-driver-root=/run/d"],
            Config(nvidia_driver_root="/run/d", nvidia_dev_root="/run/d"),
        ),
    ],
)
def test_options(arguments: list[str], expected: Config, tmp_path: Path) -> None:
    """As the incumbent's command line has them."""
    assert _config(arguments, {}, "", tmp_path) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"DEVICE_LIST_STRATEGY": "volume-mounts,cdi-cri"},
            Config(device_list_strategy=("volume-mounts", "cdi-cri")),
        ),
        ({"FAIL_ON_INIT_ERROR": "false"}, Config(fail_on_init_error=False)),
        ({"DRIVER_ROOT_CTR_PATH": "/x"}, Config(container_driver_root="/x")),
        (
            {"CONTAINER_DRIVER_ROOT": "/y", "DRIVER_ROOT_CTR_PATH": "/x"},
            Config(container_driver_root="/y"),
        ),
        (
            {"NVIDIA_CTK_PATH": "/usr/bin/nvidia-ctk"},
            Config(nvidia_cdi_hook_path="/usr/bin/nvidia-ctk"),
        ),
        ({"KUBELET_SOCKET": ""}, Config(kubelet_socket="")),
        ({"CDI_DISABLE_HOOKS": "all"}, Config(cdi_disable_hooks=("all",))),
    ],
)
def test_variables(variables: dict[str, str], expected: Config, tmp_path: Path) -> None:
    """An empty socket means that the plugin never registers."""
    assert _config([], variables, "", tmp_path) == expected


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        (["--mig-strategy", "x"], {}, '--mig-strategy is "x"'),
        ([], {"MIG_STRATEGY": "x"}, 'MIG_STRATEGY is "x"'),
        ([], {"GDS_ENABLED": "yes"}, 'GDS_ENABLED is "yes", not true or false'),
        (["--config-file", "/nowhere/c.yaml"], {}, "No such file"),
        (["--healthz", "x"], {}, '--healthz is "x"'),
        (["--kubelet-socket", "/nowhere/kubelet.sock"], {}, '"/nowhere"'),
        (["--kubelet-socket", f"/{'x' * 120}/kubelet.sock"], {}, "134 bytes"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(
    arguments: list[str], variables: dict[str, str], expected: str
) -> None:
    """Before anything is served or registered."""
    result = CliRunner().invoke(root, ["device-plugin", *arguments], env=variables)
    error = result.exception
    assert isinstance(error, Exception)
    assert expected in str(error)
    assert "\n" not in str(error)
    assert error.hint  # type: ignore[attr-defined]
    if not arguments or arguments[0] == "--mig-strategy":
        assert isinstance(error, ConfigError)
        assert error.exit_code == 2


def test_the_page_has_every_option_and_key() -> None:
    """A setting that is not documented is not used."""
    page = (TREE / "docs" / "kubernetes" / "device-plugin.md").read_text()
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    documented = {option: (variables, key) for option, variables, key, _ in rows}
    for setting in settings.SETTINGS:
        variables, key = documented.pop(setting.option)
        assert re.findall(r"`([A-Z_]+)`", variables) == list(setting.variables)
        assert re.findall(r"`([A-Za-z.]+)`", key) == ([setting.key] if setting.key else [])
    assert sorted(documented) == ["config-file", "healthz", "log-format"]
