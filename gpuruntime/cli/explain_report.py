# SPDX-License-Identifier: Apache-2.0
"""The report of `gpuruntime explain`: what the runtime would do for a container, and why."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdi.wire import Edits, OciConfig
from gpuruntime import config as settings
from gpuruntime.cli import explain_config, explain_present, explain_reasons
from gpuruntime.cli.explain_host import ExplainHost, find_runtime
from gpuruntime.cli.explain_reasons import HAS, REMOVED, Reason, Whys
from gpuruntime.config import Config
from gpuruntime.errors import (
    GpuRuntimeError,
    RequestError,
    RuntimeExecError,
    UnresolvedDeviceError,
    bug,
)
from gpuruntime.model import Inventory
from gpuruntime.oci.bundle import Bundle
from gpuruntime.plan import from_inventory, injection
from gpuruntime.plan.injection import Injection
from gpuruntime.request import parse, requirements
from gpuruntime.request.capabilities import UTILITY
from gpuruntime.request.container import Container, Ignored
from gpuruntime.request.parse import Request

NO_DEVICE = "no device"
_NOT_MET = "requirements not met: "
_MODE = "nvidia-container-runtime.mode"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement; *met* is None if it cannot be checked. *why* is a sentence, or ""."""

    text: str
    met: bool | None
    why: str


@dataclass(slots=True)
class Report:
    """What would be done and why; a field is empty until it is decided.

    *edits* are CDI container edits, completed; *removed* are paths of prestart hooks that are
    removed. *runtime* is the low-level runtime. *error* is why the container does not start.
    """

    container: str = ""
    mode: str = ""
    why_mode: str = ""
    config: str | None = None
    source: str = ""
    why_request: str = ""
    devices: list[str] = field(default_factory=list)
    capabilities: list[str] = field(default_factory=list)
    why_capabilities: str = ""
    requirements: list[Requirement] = field(default_factory=list)
    why_requirements: str = ""
    edits: dict[str, Any] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runtime: str = ""
    error: GpuRuntimeError | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """The config.json to explain.

    *container* says which container of a file it is, "" if the file has no others. *notes* are
    sentences about it. *whys* are the reasons for what the engine has added to it.
    """

    bundle: Bundle
    container: str = ""
    notes: Sequence[str] = ()
    whys: Whys = field(default_factory=dict)


def examine(source: Callable[[ExplainHost], Input], config_path: str | None, mode: str) -> Report:
    """Return the report on the config.json of *source*, which is called with the host.

    *config_path* is a config.toml in place of the one in force, *mode* a mode in place of the one
    that it sets, "" for none.
    """
    report = Report()
    try:
        config = _config(report, config_path, mode)
        host = ExplainHost(config)
        try:
            report.runtime = find_runtime(config, report.warnings)
        except RuntimeExecError as error:
            # The engine may have another PATH.
            report.warnings.append(f"{error.message} (on the PATH of this command)")
        explained = source(host)
        report.container = explained.container
        report.notes += explained.notes
        _decide(report, explained, config, host)
    except GpuRuntimeError as error:
        report.error = error
    except Exception as error:  # noqa: BLE001 (as the runtime: the input may be anybody's)
        report.error = bug(error)
    return report


def _config(report: Report, path: str | None, mode: str) -> Config:
    """Return the config of the file *path*, else of the one in force; raise ConfigError."""
    path = explain_config.path_of(path)
    report.config = path
    values = explain_config.read(path, report.warnings)
    report.why_mode = f'set by "{_MODE}"' if values.get(_MODE) else ""
    if mode:
        report.why_mode = 'set by "--mode"'
        # An error about the mode must not name the file.
        return Config({**values, _MODE: mode}, None)
    return Config(values, path)


def _decide(report: Report, explained: Input, config: Config, host: ExplainHost) -> None:
    """Fill *report* in as far as possible; raise the error that the runtime would."""
    bundle = explained.bundle
    document, doubt = bundle.parse()
    if doubt is None:
        report.reasons += explain_present.of_config(document, explained.whys)
    if not parse.may_ask(bundle.data, config):
        _say_mode(report, Request(), config)
        report.reasons.append(Reason("", NO_DEVICE, "nothing in config.json requests a device"))
        _say_present(report, document, host)
        return
    if doubt is not None:
        raise bundle.ambiguous(doubt)
    # For the error of a request that cannot be parsed as well.
    report.mode = config.mode
    observer = _RequestObserver(report)
    try:
        decided = injection.decide(document, config, host, observer)
    except UnresolvedDeviceError:
        # A spec does not say why a GPU is not in it.
        if observer.request is not None and not observer.request.is_automatic:
            report.notes += map(str, host.left_out(observer.request.ids))
        raise
    finally:
        if observer.request is not None:
            _say_host(report, observer.request, host)
    result = copy.deepcopy(document)
    if decided.apply(result) and not _is_storable(result):
        raise bundle.ambiguous("a lone surrogate")
    _say_decision(report, decided, document, config, host)
    _say_present(report, document, host)


def _say_present(report: Report, document: OciConfig, host: ExplainHost) -> None:
    """Add the GPUs that *document* has already, if it has the driver's device nodes."""
    if not any(reason.kind == f"{HAS} device" for reason in report.reasons):
        return
    try:
        inventory = host.inventory or host.read_inventory(fresh=False).inventory
    except GpuRuntimeError as error:
        report.notes.append(f"which GPUs the device nodes are for is not known: {error.message}")
        return
    gpus = explain_present.gpus_of(document, inventory)
    report.reasons = [*gpus, *report.reasons]


def _is_storable(document: OciConfig) -> bool:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _say_mode(report: Report, request: Request, config: Config) -> None:
    report.mode, why = explain_reasons.mode(request, config)
    report.why_mode = why or report.why_mode


class _RequestObserver:
    """Puts the request that `decide` reports into *report*, even if it then cannot be met.

    *request* is None until there is one.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.request: Request | None = None

    def on_request(self, request: Request, container: Container) -> None:
        """Add *request* to the report, with the part of *container* that is the reason."""
        report = self._report
        _say_mode(report, request, container.config)
        report.source = request.source
        report.devices = list(request.devices)
        report.capabilities = list(request.extras.capabilities)
        report.ignored = list(request.ignored)
        if request:
            report.why_request = explain_reasons.of_request(request, container)
            report.why_capabilities = explain_reasons.of_capabilities(request, container)
            report.why_requirements = explain_reasons.of_unchecked_requirements(request, container)
        else:
            has_devices = any(reason.kind.startswith(HAS) for reason in report.reasons)
            why = explain_reasons.of_no_request(request, container, has_devices=has_devices)
            report.reasons.append(Reason("", NO_DEVICE, why))
        self.request = request


def _say_host(report: Report, request: Request, host: ExplainHost) -> None:
    """Add what was read from the host, even if the request cannot be met."""
    report.warnings += host.notes
    if host.specs is not None:
        report.notes += [
            f'CDI spec "{file.path}" is not used: {file.error.category}: {file.error}'
            for file in host.specs.files
            if file.error is not None
        ]
    if host.inventory is not None:
        driver = host.inventory.driver
        report.notes += [*host.inventory.problems, *driver.problems]
        if driver.missing_program and UTILITY in request.extras.capabilities:
            report.notes.append(driver.missing_program)
    report.requirements = [
        _requirement(text, request, host.inventory) for text in request.extras.requirements
    ]


def _requirement(text: str, request: Request, inventory: Inventory | None) -> Requirement:
    if inventory is None:
        return Requirement(text, met=None, why="the driver has not been queried")
    try:
        facts = from_inventory.facts(
            from_inventory.requested_devices(request, inventory), inventory
        )
        undecided = requirements.check([text], facts)
    except RequestError as error:
        return Requirement(text, met=False, why=error.message.removeprefix(_NOT_MET))
    except GpuRuntimeError as error:
        return Requirement(text, met=None, why=error.message)
    here = f"this host has CUDA {facts.cuda or '?'} and driver {facts.driver}"
    return Requirement(text, met=None if undecided else True, why="; ".join(undecided) or here)


def _say_decision(
    report: Report, decided: Injection, document: OciConfig, config: Config, host: ExplainHost
) -> None:
    request = decided.request
    report.warnings += decided.warnings
    report.notes = list(dict.fromkeys([*report.notes, *decided.notes]))
    prestart = (document.get("hooks") or {}).get("prestart") or ()
    report.removed = [str(prestart[i].get("path")) for i in decided.removed]
    edits = _all_edits(decided)
    report.edits = dict(edits)
    whys = explain_reasons.of_consequences(edits)
    other = "for every container with GPUs"
    if decided.edits is not None and request.is_automatic and host.inventory is not None:
        whys |= explain_reasons.of_inventory(request, host.inventory)
        report.reasons += explain_reasons.gpus_of(request, host.inventory)
    elif decided.edits is not None and host.specs is not None:
        other = "by a CDI spec"
        by_spec = explain_reasons.of_specs(request, host.specs, config.default_kind)
        whys = {key: f"{whys[key]}; {why}" if key in whys else why for key, why in by_spec.items()}
    report.reasons += explain_reasons.of_edits(edits, whys, other)
    if decided.edits is not None and request.is_automatic and host.inventory is not None:
        report.reasons += explain_reasons.files_left_out(request, host.inventory, edits, config)
    if report.mode == settings.LEGACY and decided.edits is not None and not decided.prestart:
        report.notes.append("the engine's own prestart hook mounts the driver's files")
    why = "the engine's hook would add the devices a second time"
    report.reasons += [Reason(REMOVED, f"hook prestart {path}", why) for path in report.removed]


def _all_edits(decided: Injection) -> Edits:
    """Return the edits without empty members, and with the prestart hook to add."""
    written: dict[str, Any] = {**(decided.edits or {})}
    members = {member: value for member, value in written.items() if value}
    if decided.prestart is not None:
        hook = {"hookName": "prestart", **decided.prestart}
        members["hooks"] = [*members.get("hooks", ()), hook]
    return members  # type: ignore[return-value]  # the members are those of edits
