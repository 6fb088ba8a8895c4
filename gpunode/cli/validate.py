# SPDX-License-Identifier: Apache-2.0
"""`gpu-node validate`: report whether this node can run pods with GPUs."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

import click

from gpunode.cli import options
from gpunode.cli.device_plugin import load_config
from gpunode.config import settings
from gpunode.config.effective import OptionText
from gpuruntime.cli.comma_option import CommaOption
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import ArgumentError

OUTPUT_DIRECTORY = "/run/nvidia/validations"
_WAIT = "150s"
_WORDS = {"true": _WAIT, "false": "0"}
# Options that say how the device plugin of this node is configured.
_PLUGIN_OPTIONS = ("device_list_strategy", "pass_device_specs", "cri_socket")


def _seconds(option: str, text: str) -> float:
    """Return the seconds of the duration *text*; raise ArgumentError."""
    seconds = settings.duration(_WORDS.get(text.lower(), text))
    if seconds is None:
        raise ArgumentError(f'{option} is "{text}", not a duration', "use 5m, for example")
    return seconds


@click.command()
@click.option(
    *("--component", "names"),
    cls=CommaOption,
    envvar="COMPONENT",
    metavar="NAME",
    help="Check only this component; repeatable.  [default: driver, toolkit, cuda, delivery; "
    "with a node name also plugin and dra]",
)
@click.option("--json", "is_json", is_flag=True, help="Print an object.")
@click.option(
    "--wait",
    is_flag=False,
    flag_value=_WAIT,
    default="0",
    envvar="WITH_WAIT",
    metavar="DURATION",
    help=f"Check again what fails, for this time at most; {_WAIT} without a value.",
)
@click.option(
    "--interval",
    default="5",
    envvar="SLEEP_INTERVAL_SECONDS",
    metavar="SECONDS",
    help="Time between two checks.  [default: 5]",
)
@click.option(
    "--output-dir",
    default=OUTPUT_DIRECTORY,
    envvar="OUTPUT_DIR",
    metavar="DIR",
    help=f"Directory of the ready files, empty for none.  [default: {OUTPUT_DIRECTORY}]",
)
@click.option(
    "--host-root",
    default="/",
    envvar="HOST_ROOT",
    metavar="DIR",
    help="Root directory of the host, as this program sees it.  [default: /]",
)
@options.node_name
@options.kubeconfig
@click.option(
    "--device-list-strategy",
    envvar="DEVICE_LIST_STRATEGY",
    metavar="WORDS",
    help="That of the device plugin.  [default: envvar]",
)
@click.option(
    "--pass-device-specs",
    is_flag=False,
    flag_value="true",
    envvar="PASS_DEVICE_SPECS",
    metavar="BOOLEAN",
    help="That of the device plugin.  [default: false]",
)
@click.option(
    "--cri-socket",
    envvar="CRI_SOCKET",
    metavar="PATH",
    help="Socket of the engine.  [default: the first that exists]",
)
@click.option(
    "--config-file",
    default="",
    envvar="CONFIG_FILE",
    metavar="FILE",
    help="Config file of the device plugin, version v1.",
)
@click.pass_context
def validate(
    ctx: click.Context,
    /,
    *,
    names: tuple[str, ...],
    is_json: bool,
    output_dir: str,
    host_root: str,
    node_name: str,
    **values: Any,  # noqa: ANN401 (by the option)
) -> None:
    """Report whether this node can run pods with GPUs.

    Each component has one line: ok, warn or fail, a sentence, and an action. The file
    COMPONENT-ready is there while the component is valid. The exit status is 0 if no component
    fails, 1 if one does, 2 for a wrong option.
    """
    from gpunode.api.client import connect  # noqa: PLC0415
    from gpunode.api.node_view import NodeView  # noqa: PLC0415
    from gpunode.services import validation  # noqa: PLC0415
    from gpunode.validation.ready_files import ReadyFiles  # noqa: PLC0415
    from gpuruntime.cli.checks import finding  # noqa: PLC0415
    from gpuruntime.cli.checks.examined_machine import ExaminedMachine  # noqa: PLC0415

    unknown = [name for name in names if name not in validation.COMPONENTS]
    if unknown:
        raise ArgumentError(
            f'unknown component "{unknown[0]}"', f"name one of {', '.join(validation.COMPONENTS)}"
        )
    chosen = names or validation.default_components(has_node=bool(node_name))
    of_cluster = [name for name in chosen if name in validation.OF_CLUSTER]
    if of_cluster and not node_name:
        raise ArgumentError(
            f"the name of the node is empty, and {of_cluster[0]} needs it",
            "set NODE_NAME from spec.nodeName of the pod",
        )
    wait_s, interval_s = _seconds("--wait", values["wait"]), _interval(values["interval"])
    options = {
        name: OptionText(values[name], f"--{name.replace('_', '-')}")
        for name in _PLUGIN_OPTIONS
        if values[name] is not None
    }
    # An option that is wrong is an error before the first check.
    config = load_config(values["config_file"], options)
    environment = os.environ if os.path.realpath(host_root) == "/" else {}
    machine = ExaminedMachine(host_root, environment)
    cluster = NodeView(lambda: connect(values["kubeconfig"]), node_name) if of_cluster else None
    # Ends the checks, which are processes of their own.
    signal.signal(signal.SIGTERM, _end)
    findings = validation.Validation(
        validation.checks_of(chosen, cluster, config),
        machine,
        ReadyFiles(output_dir) if output_dir else None,
    ).run(wait_s, interval_s)
    if is_json:
        text = json.dumps(validation.as_json(findings), indent=2)
    else:
        text = "\n".join([*(item.line() for item in findings), finding.summary(findings)])
    write_stdout(f"{text}\n")
    ctx.exit(int(any(item.status == finding.FAIL for item in findings)))


def _interval(text: str) -> float:
    """Return the seconds of *text*, a number or a duration; raise ArgumentError."""
    is_number = text.isascii() and text.isdecimal()
    return _seconds("--interval", f"{text}s" if is_number else text)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
