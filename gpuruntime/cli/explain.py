# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime explain`: print what the container of a config.json would get; changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import click

from cdi.wire import OciConfig
from gpuruntime.cli import explain_docker, explain_image, explain_report, explain_text
from gpuruntime.cli.explain_docker import Options
from gpuruntime.cli.explain_host import ExplainHost
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import BundleError
from gpuruntime.oci.bundle import CONFIG_NAME, MAX_CONFIG_BYTES, Bundle

_LIKE_DOCKER = (
    click.option("--env", "-e", multiple=True, metavar="NAME[=VALUE]", help="A variable."),
    click.option("--image-env", multiple=True, metavar="NAME=VALUE", help="One of the image's."),
    click.option("--privileged", is_flag=True, help="With all rights and devices."),
    click.option("--cap-add", multiple=True, metavar="NAME", help="With one more right."),
    click.option("--mount", multiple=True, metavar="KEY=VALUE,...", help="A mount."),
    click.option("--volume", "-v", multiple=True, metavar="SOURCE:PATH", help="A bind mount."),
    click.option("--annotation", multiple=True, metavar="NAME=VALUE", help="An annotation."),
    click.option("--gpus", metavar="REQUEST", help='"all", a number, or "device=0".'),
    click.option(
        "--device", multiple=True, metavar="NAME", help="A name of CDI, which the engine adds."
    ),
    click.option(
        "--userns",
        is_flag=False,
        flag_value="private",
        metavar="MODE",
        help='In a user namespace, unless that is "host".',
    ),
)


def _like_docker(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_LIKE_DOCKER):
        command = option(command)
    return command


class Text(Bundle):
    """A config.json that is in no bundle: *data*, read from *path*."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.data = data


@click.command()
@click.argument("file", required=False)
@click.option("--bundle", "-b", metavar="DIR", help="Explain the config.json of this bundle.")
@click.option("--config-json", metavar="FILE", help='Explain this config.json; "-" reads stdin.')
@explain_image.options
@_like_docker
@click.option("--config", metavar="FILE", help="The config.toml.  [default: the one in force]")
@click.option("--mode", default="", metavar="MODE", help="A mode in place of the config's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--verbose", is_flag=True, help="One line for each file.")
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    file: str | None,
    bundle: str | None,
    config_json: str | None,
    config: str | None,
    mode: str,
    *,
    as_json: bool,
    verbose: bool,
    **docker_options: Any,  # noqa: ANN401 (click's)
) -> None:
    """Print what the runtime would add to a container and why, and change nothing.

    The container is a bundle, a config.json (FILE, "-" or standard input), or what docker would
    make of options like its own. The exit status is 1 if it would not start.

    With --rootfs or --image, print what the image needs of the driver, what of that the container
    does not ask for, and what would not load. The exit status is 1 if GPU work would fail.
    """
    rootfs, image = docker_options.pop("rootfs"), docker_options.pop("image")
    options = Options(**docker_options)
    images = [name for name in (rootfs, image) if name is not None]
    if images:
        if len(images) + sum(name is not None for name in (file, bundle, config_json)) > 1:
            raise click.UsageError("give one of --rootfs, --image, FILE, --config-json, --bundle")
        explain_image.print_report(
            rootfs, image, options, config, as_json=as_json, verbose=verbose
        )
        return
    inputs = [name for name in (file, bundle, config_json) if name is not None]
    if len(inputs) + (options != Options()) > 1:
        raise click.UsageError(
            "give one of FILE, --config-json, --bundle and options like docker's"
        )
    if not inputs and options == Options() and os.isatty(0):
        raise click.UsageError(
            "nothing to explain: give a bundle, a config.json, or options, "
            "as in: gpuruntime explain --env NVIDIA_VISIBLE_DEVICES=all",
            ctx,
        )

    def source(host: ExplainHost) -> tuple[Bundle, list[str]]:
        if options != Options():
            document = explain_docker.of_options(options, os.environ)
            devices, notes = options.device, []
            if devices:
                notes = explain_docker.add_devices(document, devices, host.read_registry())
            return _encoded(document), notes
        if bundle is not None:
            return Bundle(bundle, CONFIG_NAME), []
        return _open(file or config_json or "-"), []

    report = explain_report.examine(source, config, mode)
    if as_json:
        write_stdout(f"{json.dumps(explain_text.as_object(report), indent=2)}\n")
    else:
        write_stdout(explain_text.as_lines(report, verbose=verbose))
    if report.error is not None:
        raise report.error


def _open(path: str) -> Bundle:
    """Return the config.json *path*, or standard input for `-`; raise BundleError."""
    if path == "-":
        return Text("standard input", _read_stdin())
    directory, name = os.path.split(path)
    if not name:
        raise BundleError(f'cannot read "{path}": Is a directory', 'use "--bundle" for a bundle')
    return Bundle(directory, name)


def _encoded(document: OciConfig) -> Bundle:
    """Return *document* as the engine would write it."""
    return Text("the options", json.dumps(document).encode())


def _read_stdin() -> bytes:
    data = b""
    try:
        while len(data) <= MAX_CONFIG_BYTES:
            chunk = os.read(0, MAX_CONFIG_BYTES + 1 - len(data))
            if not chunk:
                return data
            data += chunk
        why = f"larger than {MAX_CONFIG_BYTES} bytes"
    except OSError as error:
        why = str(error.strerror)
    raise BundleError(
        f"cannot read standard input: {why}",
        'give it the config.json of a bundle, as in "explain < config.json"',
    )
