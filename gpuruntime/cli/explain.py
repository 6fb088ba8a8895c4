# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime explain`: print what a container would get, and why; changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from gpuruntime.cli import (
    explain_docker,
    explain_input,
    explain_reasons,
    explain_report,
    explain_text,
)
from gpuruntime.cli.explain_candidate import Described
from gpuruntime.cli.explain_docker import Options
from gpuruntime.cli.explain_host import ExplainHost
from gpuruntime.cli.explain_report import Input
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import BundleError, UnresolvedDeviceError
from gpuruntime.oci.bundle import CONFIG_NAME, MAX_CONFIG_BYTES, Bundle

_LIKE_DOCKER = (
    click.option(
        *("--env", "-e"),
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Set a variable; NAME alone passes on the caller's variable.",
    ),
    click.option(
        "--image-env",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set a variable of the image, which --env overrides.",
    ),
    click.option("--privileged", is_flag=True, help="Assume a privileged container."),
    click.option(
        "--cap-add", multiple=True, metavar="NAME", help="Add a Linux capability, as SYS_ADMIN."
    ),
    click.option(
        "--mount",
        multiple=True,
        metavar="KEY=VALUE,...",
        help="Add a mount: type=bind,source=PATH,target=PATH.",
    ),
    click.option("--volume", "-v", multiple=True, metavar="SOURCE:PATH", help="Add a bind mount."),
    click.option("--annotation", multiple=True, metavar="NAME=VALUE", help="Set an annotation."),
    click.option(
        "--gpus",
        metavar="REQUEST",
        help='Request GPUs as docker does: "all", a number, or "device=0".',
    ),
    click.option(
        "--device",
        multiple=True,
        metavar="NAME",
        help="Add the CDI device NAME, as the engine does.",
    ),
    click.option(
        "--userns",
        is_flag=False,
        flag_value="private",
        metavar="MODE",
        help='Use a user namespace, unless MODE is "host".',
    ),
)


_OF_IMAGE = (
    click.option(
        "--rootfs", metavar="DIR", help="Check what the image in DIR needs of the driver."
    ),
    click.option("--image", metavar="REF", help="Check an image that docker or podman has."),
)


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed((*_OF_IMAGE, *_LIKE_DOCKER)):
        command = option(command)
    return command


class Text(Bundle):
    """A config.json that is not in a bundle: *data*, read from *path*."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.data = data


@dataclass(frozen=True, slots=True)
class Inputs:
    """What names the container, or the image, to explain; None for an input that is not named."""

    file: str | None
    bundle: str | None
    config_json: str | None
    container: str | None
    rootfs: str | None
    image: str | None
    options: Options

    @property
    def is_image(self) -> bool:
        """Whether an image is explained."""
        return self.rootfs is not None or self.image is not None

    @property
    def is_like_docker(self) -> bool:
        """Whether options describe the container; --image-env also completes a FILE."""
        others = replace(self.options, image_env=())
        return others != Options() or bool(self.options.image_env and self.file is None)

    def check(self) -> None:
        """Raise UsageError for inputs that exclude each other."""
        files = (self.file, self.bundle, self.config_json)
        names = [name for name in (self.rootfs, self.image, *files) if name is not None]
        if self.is_image and len(names) > 1:
            raise click.UsageError("give one of --rootfs, --image, FILE, --config-json, --bundle")
        if not self.is_image and len(names) + self.is_like_docker > 1:
            raise click.UsageError(
                "give one of FILE, --config-json, --bundle and options like docker's"
            )
        if self.container is not None and (self.file is None and (names or self.is_like_docker)):
            raise click.UsageError("--container is for a FILE that has several containers")
        if not (names or self.is_like_docker) and os.isatty(0):
            raise click.UsageError(
                "nothing to explain: give a bundle, a file, or options, "
                "as in: gpuruntime explain --env NVIDIA_VISIBLE_DEVICES=all"
            )

    def read(self, host: ExplainHost) -> Input:
        """Return the config.json to explain; raise GpuRuntimeError."""
        if self.is_like_docker:
            document = explain_docker.of_options(self.options, os.environ)
            return _of_engine(Described(document, list(self.options.device)), "", host)
        if self.bundle is not None:
            return Input(Bundle(self.bundle, CONFIG_NAME))
        if self.config_json is not None:
            return Input(_open(self.config_json))
        opened = _open(self.file or "-")
        candidate = explain_input.candidate(
            opened.path, opened.data, self.container, self.options.image_env, os.environ
        )
        if candidate is None:
            return Input(opened)
        return _of_engine(candidate.describe(), candidate.title, host)


@click.command()
@click.argument("file", required=False)
@click.option("--bundle", "-b", metavar="DIR", help="Explain the config.json of the bundle DIR.")
@click.option(
    "--config-json", metavar="FILE", help='Explain the config.json FILE; "-" is standard input.'
)
@click.option(
    "--container", metavar="NAME", help="Explain the container NAME of a FILE that has several."
)
@_with_options
@click.option(
    "--config",
    metavar="FILE",
    help="Use the config.toml FILE.  [default: the one in force]",
)
@click.option("--mode", default="", metavar="MODE", help="Assume this mode of the runtime.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--verbose", is_flag=True, help="Print each file on a line of its own.")
def explain(
    config: str | None,
    mode: str,
    *,
    as_json: bool,
    verbose: bool,
    **values: Any,  # noqa: ANN401 (click's)
) -> None:
    """Print what the runtime would add to a container and why, and change nothing.

    FILE, or standard input, is a config.json, the output of "docker inspect", a pod or another
    object of Kubernetes, or a compose file. Instead of a file, options like docker's describe the
    container. The exit status is 1 if it would not start.

    With --rootfs or --image, print which driver libraries the image needs, which of them the
    container does not request, and which would not load. The exit status is 1 if GPU work would
    fail.
    """
    named = {member.name: values.pop(member.name) for member in fields(Inputs)[:-1]}
    inputs = Inputs(**named, options=Options(**values))
    inputs.check()
    if inputs.is_image:
        # Its ELF reader costs more to import than all else here.
        from gpuruntime.cli import explain_image  # noqa: PLC0415

        explain_image.print_report(
            inputs.rootfs,
            inputs.image,
            inputs.options,
            config,
            as_json=as_json,
            verbose=verbose,
        )
        return
    report = explain_report.examine(inputs.read, config, mode)
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
    try:
        return Bundle(directory, name)
    except BundleError as error:
        hint = 'name a regular file, or redirect it: "gpuruntime explain < FILE"'
        raise BundleError(error.message, hint) from error


def _of_engine(described: Described, title: str, host: ExplainHost) -> Input:
    """Return *described* as the engine would write it, with its CDI devices added."""
    document, devices, notes, whys = described.config, described.devices, described.notes, {}
    if devices:
        specs = host.read_registry()
        try:
            notes = [*notes, *explain_docker.add_devices(document, devices, specs)]
        except UnresolvedDeviceError as error:
            # A spec does not say why a GPU is not in it.
            for device in host.left_out(name.partition("=")[2] for name in devices):
                raise UnresolvedDeviceError(f"{error.message}; {device}", device.hint) from error
            raise
        whys = explain_reasons.of_devices(devices, specs, devices)
    return Input(Text(title or "the options", json.dumps(document).encode()), title, notes, whys)


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
        'redirect a file to it, as in "gpuruntime explain < config.json"',
    )
