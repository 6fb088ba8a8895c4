# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi inject`: add devices to an OCI config."""

from __future__ import annotations

import json
from typing import Any

import click

from cdi import reasons
from cdi.errors import CdiError
from cdi.inject import inject as injected
from cdi.registry import Registry
from gpuruntime.cli import spec_dirs as directories
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import BundleError, GpuRuntimeError, UnresolvedDeviceError, escape
from gpuruntime.oci import bundle

# The most names whose reasons are printed.
MAX_REASONS = 8


class _Refusal(Exception):  # noqa: N818 (a result, not an error)
    """The injection is refused at *stage* for the reason *category*."""

    def __init__(
        self, category: str, stage: str, error: GpuRuntimeError, unresolved: list[str]
    ) -> None:
        super().__init__(error)
        self.category = category
        self.stage = stage
        self.error = error
        self.unresolved = unresolved


@click.command()
@directories.options
@click.option(
    "--device", "devices", multiple=True, metavar="NAME", help="Qualified name to add; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Describe a failure as a JSON object.")
def inject(
    spec_dirs: tuple[str, ...],
    allow_untrusted: bool,  # noqa: FBT001 (click's flags)
    devices: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
) -> None:
    """Read an OCI config from standard input, add devices, and print the new config.

    Nothing is printed if a device cannot be added. With --json the failure is an object with the
    members error (a category), stage (config, load, resolve or inject), unresolved (names),
    message and hint.
    """
    try:
        config = _read_config()
        registry = directories.load(spec_dirs, allow_untrusted=allow_untrusted)
        result = _inject(registry, devices, config)
    except _Refusal as refusal:
        if as_json:
            write_stdout(json.dumps(_as_object(refusal), indent=2) + "\n")
        raise refusal.error from refusal
    write_stdout(json.dumps(result, ensure_ascii=False, indent=2) + "\n")


def _read_config() -> Any:  # noqa: ANN401 (JSON)
    doubt: str | None = f"larger than {bundle.MAX_CONFIG_BYTES} bytes"
    config: Any = None
    try:
        with open(0, "rb", closefd=False) as stream:
            data = stream.read(bundle.MAX_CONFIG_BYTES + 1)
        if len(data) <= bundle.MAX_CONFIG_BYTES:
            config, doubt = bundle.parse(data)
            # A lone surrogate cannot be encoded as UTF-8, and so not be printed.
            json.dumps(config, ensure_ascii=False).encode()
    except OSError as error:
        doubt = f"cannot be read: {error.strerror}"
    except UnicodeEncodeError:
        doubt = "a lone surrogate"
    except ValueError as error:
        doubt = f"not a JSON object: {error}"
    if doubt is not None:
        error_ = BundleError(
            f"cannot add devices to the config on standard input: {doubt}",
            'give it the config.json of a bundle, as in "cdi inject < config.json"',
        )
        raise _Refusal("oci-config", "config", error_, [])
    return config


def _inject(registry: Registry, devices: tuple[str, ...], config: Any) -> Any:  # noqa: ANN401 (JSON)
    for file in registry.files:
        if file.error is not None:
            text = f'"{file.path}" is not used: {file.error.category}: {file.error}'
            click.echo(f"warning: {escape(text)}", err=True)
    try:
        return injected(registry, devices, config)
    except CdiError as error:
        unresolved = [name for name in devices if registry.find(name) is None]
        if not unresolved:
            hint = "load the driver of the device, or write the spec again"
            failure = UnresolvedDeviceError(f"cannot add the devices: {error}", hint)
            raise _Refusal(error.category, "inject", failure, []) from error
        # With a single file, its error is the reason.
        only = registry.files[0].error if len(registry.files) == 1 else None
        names = list(dict.fromkeys(unresolved))
        why = [
            f'"{name}": {reasons.why_unresolved(registry, name)}' for name in names[:MAX_REASONS]
        ]
        more = [f"and {len(names) - MAX_REASONS} more"] if len(names) > MAX_REASONS else []
        failure = UnresolvedDeviceError(
            f"cannot resolve {'; '.join([*why, *more])}",
            'ask for names that "gpuruntime cdi list" shows',
        )
        category, stage = (only.category, "load") if only else (error.category, "resolve")
        raise _Refusal(category, stage, failure, unresolved) from error


def _as_object(refusal: _Refusal) -> dict[str, Any]:
    return {
        "error": refusal.category,
        "stage": refusal.stage,
        "unresolved": refusal.unresolved,
        "message": refusal.error.message,
        "hint": refusal.error.hint,
    }
