# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime explain --rootfs`, `--image`: what an image needs of the driver, and what fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from gpuruntime.cli import explain_config, explain_docker
from gpuruntime.cli.explain_docker import Options
from gpuruntime.cli.explain_host import ExplainHost
from gpuruntime.cli.output import write_stdout
from gpuruntime.config import Config
from gpuruntime.discover.search_paths import native_abi
from gpuruntime.discover.user_space import DriverRoot, find_driver
from gpuruntime.errors import GpuRuntimeError, bug, escape
from gpuruntime.image import check_requests, directory, driver_libraries, engine, report
from gpuruntime.image.collect import DEADLINE_S, Collector
from gpuruntime.image.contents import Contents
from gpuruntime.image.needs import Need
from gpuruntime.image.subject import FAILS, Finding, Machine, Subject
from gpuruntime.model import Driver
from gpuruntime.request import driver_options
from gpuruntime.request.container import Container

# The walk has a deadline of its own; this one is for a file system or an engine that hangs.
_GRACE_S = 30
_WIDTH = 13
_MAX_USERS = 3


class ImageError(GpuRuntimeError):
    """GPU work in a container of the image would fail."""

    phase = "image"


class _DeadlineError(BaseException):
    """The deadline. Not an Exception: pyelftools turns those into errors of the file."""


@dataclass(slots=True)
class ImageReport:
    """The report on the image *name*; *error* is why it is incomplete."""

    name: str
    subject: Subject | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: GpuRuntimeError | None = None


def print_report(
    rootfs: str | None,
    image: str | None,
    options: Options,
    config: str | None,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """Print what the image *rootfs* or *image* needs; raise GpuRuntimeError if its work fails."""
    result = examine(rootfs, image, options, config)
    if as_json:
        write_stdout(f"{json.dumps(as_object(result), indent=2)}\n")
    else:
        write_stdout(as_lines(result, verbose=verbose))
    if result.error is not None:
        raise result.error
    fails = [finding for finding in result.findings if finding.level == FAILS]
    if fails:
        many = f"there are {len(fails)} reasons" if len(fails) > 1 else "there is one reason"
        raise ImageError(
            f'a container of "{result.name}" would start, and its GPU work would fail: {many}',
            fails[0].action,
        )


def examine(
    rootfs: str | None, image: str | None, options: Options, config_path: str | None
) -> ImageReport:
    """Return the report on the directory *rootfs*, or on *image* of docker or podman."""
    result = ImageReport(rootfs if rootfs is not None else image or "")
    try:
        path = explain_config.path_of(config_path)
        config = Config(explain_config.read(path, result.notes), path)
        with _deadline(DEADLINE_S + _GRACE_S):
            contents, environment = _contents(rootfs, image)
        machine = _machine(config, result.notes)
        options = replace(options, image_env=(*environment, *options.image_env))
        document = explain_docker.of_options(options, os.environ)
        container = Container(document, config)
        requested = driver_options.read(container, (), unknown_is_error=False).capabilities
        result.notes += [str(ignored) for ignored in container.ignored]
        result.subject = Subject(contents, container.environment, requested, machine)
        with _deadline(_GRACE_S):
            result.findings = report.findings(result.subject)
    except GpuRuntimeError as error:
        result.error = error
    except Exception as error:  # noqa: BLE001 (the image may be anybody's)
        result.error = bug(error)
    return result


def _contents(rootfs: str | None, image: str | None) -> tuple[Contents, Sequence[str]]:
    collector = Collector()
    if rootfs is not None:
        return directory.read(rootfs, collector), ()
    return engine.read(image or "", collector)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise GpuRuntimeError in what takes longer than *seconds*, also in a system call."""

    def raise_deadline(*_: object) -> NoReturn:
        raise _DeadlineError

    before = signal.signal(signal.SIGALRM, raise_deadline)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _DeadlineError:
        raise GpuRuntimeError(
            f"the image could not be read in {seconds:g} s", "check the file system it is on"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _machine(config: Config, notes: list[str]) -> Machine:
    """Return the driver of this machine; *notes* say what is missing of it."""
    driver: Driver | None = None
    cuda_version = ""
    try:
        inventory = ExplainHost(config).read_inventory(fresh=False).inventory
        driver, cuda_version = inventory.driver, inventory.cuda_version
    except GpuRuntimeError as error:
        notes.append(f"the driver cannot be queried: {error.message}")
        try:
            driver = find_driver(DriverRoot(config.driver_root or "/"))
        except GpuRuntimeError:
            notes.append("no driver is installed here: only the needs of the image are checked")
    libraries = driver_libraries.read(driver) if driver is not None else []
    return Machine(native_abi(), driver, libraries, cuda_version)


def as_lines(result: ImageReport, *, verbose: bool) -> str:
    """Return the report without its error, one line a fact; *verbose* names each user."""
    facts: list[tuple[str, str]] = []
    if result.subject is not None:
        facts = _facts(result.name, result.subject, None if verbose else _MAX_USERS)
    facts += [(finding.level, _sentence(finding)) for finding in result.findings]
    facts += [("note", note) for note in result.notes]
    return "".join(f"{name:{_WIDTH}} {escape(text)}\n" for name, text in facts)


def _facts(name: str, subject: Subject, max_users: int | None) -> list[tuple[str, str]]:
    contents, driver = subject.contents, subject.machine.driver
    size = f"{contents.entries} entries, {len(contents.binaries)} programs and libraries"
    kind = (
        f"for {subject.abi}, {subject.loader.libc(subject.abi)}" if subject.abi else "no programs"
    )
    cuda = f", CUDA {subject.machine.cuda_version}" if subject.machine.cuda_version else ""
    return [
        ("image", f"{name}: {kind}; {size}"),
        ("driver", f"{driver.version}{cuda}" if driver else "none on this machine"),
        ("capabilities", ", ".join(subject.capabilities) or "none"),
        *(("needs", _need(need, max_users)) for need in subject.needs),
    ]


def _need(need: Need, max_users: int | None) -> str:
    users = [f"{user.path} {user.how} it" for user in need.users[:max_users]]
    more = len(need.users) - len(users)
    also = f", and {more} more" if more else ""
    return f"{need.library} ({need.capability or 'every capability'}): {', '.join(users)}{also}"


def _sentence(finding: Finding) -> str:
    action = f"; {finding.action}" if finding.action else ""
    return f"{finding.what}: {finding.why}{action}"


def as_object(result: ImageReport) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    fails = any(finding.level == FAILS for finding in result.findings)
    return {
        "image": result.name,
        "works": None if result.error is not None else not fails,
        **_members(result.subject),
        "findings": [
            {
                "level": finding.level,
                "what": finding.what,
                "why": finding.why,
                "action": finding.action,
            }
            for finding in result.findings
        ],
        "notes": result.notes,
        "error": None
        if result.error is None
        else {
            "message": result.error.message,
            "hint": result.error.hint,
            "phase": result.error.phase,
        },
    }


def _members(subject: Subject | None) -> dict[str, Any]:
    if subject is None:
        return {"abi": None, "libc": None, "driver": None, "capabilities": [], "needs": []}
    libc = subject.loader.libc(subject.abi)
    driver = subject.machine.driver
    return {
        "abi": subject.abi or None,
        "libc": {"kind": libc.kind, "version": libc.version} if libc.kind else None,
        "driver": {"version": driver.version, "cuda": subject.machine.cuda_version or None}
        if driver
        else None,
        "capabilities": list(subject.capabilities),
        "needs": [
            {
                "library": need.library,
                "abi": need.abi,
                "capability": need.capability,
                "requested": not check_requests.lacks(need, subject)[1],
                "users": [{"path": user.path, "how": user.how} for user in need.users],
            }
            for need in subject.needs
        ],
    }
