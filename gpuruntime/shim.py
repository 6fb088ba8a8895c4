# SPDX-License-Identifier: Apache-2.0
"""The runtime in front of the low-level runtime: add what a `create` asks for, then become it.

On the start path; reads from the top: parse, resolve, complete, apply, store, exec. In this role
we are transparent: the engine's environment, descriptors, directory and signals reach the
low-level runtime as they came. The hooks, which trust nothing, share none of this.
"""

from __future__ import annotations

import os
import signal
import sys

from cdi import registry
from cdi.complete import complete
from cdi.edits import apply, describe
from cdi.errors import CdiError
from gpuruntime import config as settings
from gpuruntime import request, slowpath
from gpuruntime.errors import (
    ConfigError,
    GpuRuntimeError,
    UnresolvedDeviceError,
    bug,
    escape,
)
from gpuruntime.log import Log
from gpuruntime.oci import argv, lowlevel
from gpuruntime.oci.bundle import CONFIG_NAME, Bundle
from gpuruntime.trust import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cdi.registry import Registry
    from cdi.wire import Edits
    from gpuruntime.config import Config
    from gpuruntime.oci.argv import Command

# A hint names the devices by index, not each by its UUID as well.
MAX_NAMES_IN_HINT = 20
MAX_NAME_IN_HINT = 32
# Set by CPython at its start; the launcher tells whether they were ignored before.
_IGNORED_BITS = ((1, signal.SIGPIPE), (2, signal.SIGXFSZ))


def main(cli_python: str) -> None:
    """Become the low-level runtime, or exit with the code of an error; never returns.

    The launcher leaves in `sys.argv`: '-c', the ignored signals as a number, its own device and
    inode, argv[0], the arguments. *cli_python* is the interpreter behind the slow path.
    """
    _, ignored, identity, launcher, *arguments = sys.argv
    # Until the command line is read there is no log to write to.
    log = Log(None, json_format=False)
    try:
        command = argv.parse(arguments)
        log = Log(command.log, json_format=command.log_format == "json")
        config = settings.load(os.environ, lambda path: _compile(path, cli_python, log))
        log.level = "debug" if command.debug else config.log_level
        log.debug_file = config.debug
        runtime = lowlevel.find(config.runtimes, os.environ.get("PATH"), identity, log.warning)
        if command.creates:
            inject(command, config, cli_python, log)
        _restore(int(ignored))
        lowlevel.execute(runtime, arguments)
    except GpuRuntimeError as error:
        log.error(f"{os.path.basename(launcher)}: {error.lines()}")
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 (a bug is one line for the engine, no traceback)
        log.error(f"{os.path.basename(launcher)}: {bug(error).lines()}")
        sys.exit(1)


def inject(command: Command, config: Config, cli_python: str, log: Log) -> None:
    """Add the devices that the bundle's container asks for to its config.json.

    Raises GpuRuntimeError, with config.json untouched, if they cannot be given.
    """
    # crun's --config names another file, which crun resolves before it enters the bundle.
    directory, name = os.path.split(command.config or "")
    bundle = Bundle(directory, name) if name else Bundle(command.bundle or "", CONFIG_NAME)
    document, doubt = bundle.parse()
    policy = request.Policy(
        config.default_kind,
        env_when_unprivileged=config.accept_environment,
        mounts=config.accept_mounts,
        swarm=config.swarm,
        annotations=config.annotation_prefixes,
    )
    if not request.may_ask(bundle.data, policy):
        return
    if doubt is not None:
        raise bundle.ambiguous(doubt)
    asked = request.from_oci(document, policy)
    for reason in asked.ignored:
        log.warning(f"ignored: {reason}")
    if not asked:
        return
    if config.mode not in settings.MODES:
        # Here and not when the file is read: containers without a GPU do not depend on it.
        raise ConfigError(
            f'"{config.path}": the mode "{config.mode}" is not there yet',
            'set nvidia-container-runtime.mode to "cdi"',
        )
    edits = resolve(asked, config, cli_python, log)
    try:
        edits = complete(edits)
    except CdiError as error:
        raise UnresolvedDeviceError(
            f"cannot give a device to the container: {error}",
            'load the driver, then write the spec again with "gpuruntime cdi generate"',
        ) from error
    if log.is_on("debug"):
        for line in describe(edits):
            log.record("debug", escape(line))
    apply(edits, document)
    bundle.store(document)


def resolve(asked: request.Request, config: Config, cli_python: str, log: Log) -> Edits:
    """Return the edits of the CDI specs on disk for what is *asked*; raise if there are none."""
    known = registry.load(
        config.spec_dirs,
        may_trust=may_trust,
        decode_yaml=lambda texts: _decode_yaml(texts, cli_python),
    )
    for file in known.files:
        if file.error is not None:
            log.warning(f'CDI spec "{file.path}" is not used: {file.error.category}: {file.error}')
    if asked.driver_only:
        common = known.common_edits(config.default_kind)
        if common is None:
            raise _unresolved([config.default_kind], known, config)
        return common
    try:
        return known.resolve(asked.devices)
    except CdiError as error:
        missing = [name for name in asked.devices if known.find(name) is None]
        raise _unresolved(missing, known, config) from error


def _unresolved(names: Sequence[str], known: Registry, config: Config) -> GpuRuntimeError:
    """Return the error for *names* that no CDI spec defines, with the most helpful hint."""
    wanted = ", ".join(f'"{name}"' for name in names)
    where = ", ".join(f'"{directory}"' for directory in config.spec_dirs)
    names_known = known.devices
    if names_known:
        text = f"no CDI spec in {where} defines {wanted}"
        short = [name for name in names_known if len(name) <= MAX_NAME_IN_HINT]
        hint = f"ask for one of {', '.join(short[:MAX_NAMES_IN_HINT])}"
    else:
        text = f"no CDI spec found in {where}, wanted {wanted}"
        hint = f'run "gpuruntime cdi generate --output {config.spec_dirs[-1]}/nvidia.yaml"'
    if known.errors:
        path, reasons = next(iter(known.errors.items()))
        more = f", and {len(known.errors) - 1} more" if len(known.errors) > 1 else ""
        text += f'; not used: "{path}" ({reasons[0].category}: {reasons[0]}){more}'
    return UnresolvedDeviceError(text, hint)


def _compile(path: str, cli_python: str, log: Log) -> Any:  # noqa: ANN401 (JSON)
    """Return the values of the config file *path*, compiled by the full interpreter."""
    answer = slowpath.ask(cli_python, "config", path)
    if "error" in answer:
        raise ConfigError(answer["error"], answer["hint"])
    for warning in answer["warnings"]:
        log.warning(warning)
    return answer["values"]


def _decode_yaml(texts: dict[str, str], cli_python: str) -> dict[str, Any]:
    """Return path → document, or why there is none, of specs that are no strict JSON."""
    answer = slowpath.ask(cli_python, "yaml", texts)
    return {
        path: found["document"]
        if "document" in found
        else CdiError(found["category"], found["error"])
        for path, found in answer.items()
    }


def _restore(ignored: int) -> None:
    """Undo what CPython's start changed and an exec hands on: two signals and LC_CTYPE."""
    for bit, number in _IGNORED_BITS:
        if not ignored & bit:
            signal.signal(number, signal.SIG_DFL)
    # CPython coerces the C locale by setting LC_CTYPE for its children. The kernel still has the
    # environment as it was; setenv and unsetenv leave the other entries where they are.
    with open("/proc/self/environ", "rb") as stream:
        entries = stream.read().split(b"\0")
    original = [entry[9:] for entry in entries if entry.startswith(b"LC_CTYPE=")]
    if not original:
        os.unsetenv("LC_CTYPE")
    elif os.environb.get(b"LC_CTYPE") != original[0]:
        os.putenv(b"LC_CTYPE", original[0])
