# SPDX-License-Identifier: Apache-2.0
"""Check the values of a config.toml; pure.

One function for everything that judges a value: `config set` refuses what `config check`, `doctor`
and the start of a container report.
"""

from __future__ import annotations

from cdi import names
from cdi.errors import CdiError
from gpuruntime import config as settings
from gpuruntime.configfile import option_table
from gpuruntime.configfile.option_table import Option
from gpuruntime.record import Record
from gpuruntime.request import capabilities

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# The nearest known key is searched for this many unknown keys only: each search takes time.
MAX_NEAREST = 50
ERROR, WARNING, NOTE = "error", "warning", "note"
LDCONFIG = "nvidia-container-cli.ldconfig"
LDCONFIG_FEATURE = "features.allow-ldconfig-from-container"
_CAPABILITIES = "supported-driver-capabilities"
_COMPAT = f"{settings.RUNTIME}.modes.legacy.cuda-compat-mode"
_LOG_LEVEL = f"{settings.RUNTIME}.log-level"
_MODE = f"{settings.RUNTIME}.mode"
_RUNTIMES = f"{settings.RUNTIME}.runtimes"
# Without a leading slash, each of these would be looked up in the engine's current directory.
_ABSOLUTE = ("nvidia-container-cli.root", f"{settings.RUNTIME}.modes.cdi.spec-dirs")
_ABSOLUTE_LOGS = ("nvidia-container-cli.debug", f"{settings.RUNTIME}.debug")
# Keys for which containers accept any word, as with the incumbent; and what an unknown word does.
_LENIENT = {_LOG_LEVEL: 'which is taken for "info"', _COMPAT: "which is not a mode"}


class OptionFinding(Record):
    """A fault of the option at *path*.

    *severity*: with an ERROR our runtime starts no container, or, with *gpu_only*, none that
    requests a GPU. With a WARNING it starts containers, but does not use the value as it is
    written. A NOTE is about a value without any effect. *hint* says what to write instead; the
    hint of an unknown key is the known key that resembles it, if there is one.
    """

    __slots__ = ("gpu_only", "hint", "message", "path", "severity")

    def __init__(
        self,
        severity: str,
        path: tuple[str, ...],
        message: str,
        hint: str = "",
        *,
        gpu_only: bool = False,
    ) -> None:
        self.severity = severity
        self.path = path
        self.message = message
        self.hint = hint
        self.gpu_only = gpu_only


def examine(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[OptionFinding]]:
    """Return the usable values of *document* by key, and the faults of the others."""
    values: dict[str, Any] = {}
    findings: list[OptionFinding] = []
    unknown = 0
    for path, value in option_table.flatten(document):
        key = option_table.to_key(path)
        option = option_table.BY_KEY.get(key)
        if option is not None:
            of_value = _check_value(option, path, value)
            findings += of_value
            if not any(finding.severity == ERROR and not finding.gpu_only for finding in of_value):
                values[key] = value
        elif key in option_table.TABLES:
            findings.append(
                OptionFinding(ERROR, path, f'"{key}" is not a table', f'write "[{key}]"')
            )
        else:
            unknown += 1
            near = option_table.nearest(key) if unknown <= MAX_NEAREST else None
            hint = f'the nearest known key is "{near}"' if near else ""
            findings.append(OptionFinding(WARNING, path, f'the key "{key}" has no effect', hint))
    of_ldconfig = _check_ldconfig(values)
    paths = {finding.path for finding in of_ldconfig}
    return values, [finding for finding in findings if finding.path not in paths] + of_ldconfig


def sentence(finding: OptionFinding) -> str:
    """Return *finding* as one line."""
    return f"{finding.message}; {finding.hint}" if finding.hint else finding.message


def _check_value(option: Option, path: tuple[str, ...], value: Any) -> list[OptionFinding]:  # noqa: ANN401
    """Return the faults of *value*, which the file has for *option*."""
    key, kind = option.key, option_table.KINDS[option.kind]
    if option.kind == "list" and isinstance(value, list) and "" in value:
        return [OptionFinding(ERROR, path, f'"{key}" has an empty string', "remove it")]
    if not _fits(option, value):
        return [OptionFinding(ERROR, path, f'"{key}" is not {kind}', f"give {kind}")]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) and "\0" in item for item in items):
        return [OptionFinding(ERROR, path, f'"{key}" has a NUL character', "remove it")]
    if key == _RUNTIMES and not value:
        hint = 'name a runtime, such as ["runc"]'
        return [OptionFinding(ERROR, path, f'"{key}" is empty', hint)]
    if key in _ABSOLUTE and any(map(_is_relative, items)):
        return [OptionFinding(ERROR, path, f'"{key}" is not an absolute path', "begin it with /")]
    if key in _ABSOLUTE_LOGS and _is_relative(value):
        what = f'"{key}" is not an absolute path: the log goes to whatever directory is current'
        return [OptionFinding(WARNING, path, what, "begin it with /")]
    if key.endswith(".default-kind"):
        vendor, cls = names.split_kind(value)
        try:
            names.check_vendor(vendor)
            names.check_class(cls)
        except CdiError as error:
            return [OptionFinding(ERROR, path, f'"{key}": {error}', "use vendor/class")]
    findings = [*_check_choices(option, path, value), *_check_maximum(option, path, value)]
    if key == _RUNTIMES:
        findings += _check_runtimes(path, value)
    if option.never and value != option.default:
        what = f'"{key}" has no effect: {option.never}'
        findings.append(OptionFinding(NOTE, path, what))
    return findings


def _fits(option: Option, value: object) -> bool:
    if option.kind in ("bool", "optional"):
        return isinstance(value, bool)
    if option.kind == "integer":
        # A bool is an int; a larger number than this is too large for a timer.
        return type(value) is int and 0 < value < 10**9
    if option.kind == "string":
        return isinstance(value, str)
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_relative(path: str) -> bool:
    return bool(path) and not path.startswith("/")


def _check_choices(option: Option, path: tuple[str, ...], value: Any) -> list[OptionFinding]:  # noqa: ANN401
    """Return the faults of the words in *value* that are not among the allowed ones."""
    key, choices = option.key, option.choices
    words = value if isinstance(value, list) else [value]
    if key == _CAPABILITIES:
        choices = (*capabilities.ALL, "all", "")
        words = [word.strip() for word in value.split(",")]
    elif key == _LOG_LEVEL:
        # The incumbent accepts levels in any letter case.
        words = [value.lower()]
    unknown = [word for word in words if word not in choices] if choices else []
    if not unknown:
        return []
    if option.kind == "list":
        return [
            OptionFinding(NOTE, path, f'"{key}" has "{word}", which is unknown and has no effect')
            for word in unknown
        ]
    allowed = ", ".join(f'"{word}"' for word in choices if word or key != _CAPABILITIES)
    verb = "has" if key == _CAPABILITIES else "is"
    what, hint = f'"{key}" {verb} "{unknown[0]}"', f"use one of {allowed}"
    if key in _LENIENT:
        return [OptionFinding(WARNING, path, f"{what}, {_LENIENT[key]}", hint)]
    if key in (_CAPABILITIES, _MODE):
        what += ": containers that request a GPU fail"
        return [OptionFinding(ERROR, path, what, hint, gpu_only=True)]
    return [OptionFinding(ERROR, path, what, hint)]


def _check_maximum(option: Option, path: tuple[str, ...], value: Any) -> list[OptionFinding]:  # noqa: ANN401
    if not option.maximum or value <= option.maximum:
        return []
    what = f'"{option.key}" is {value}: {option.maximum} is used'
    return [OptionFinding(WARNING, path, what, f"use a whole number from 1 to {option.maximum}")]


def _check_runtimes(path: tuple[str, ...], value: list[str]) -> list[OptionFinding]:
    """Return a warning for each relative path; a name without a slash is searched in PATH."""
    return [
        OptionFinding(
            WARNING,
            path,
            f'"{_RUNTIMES}" has "{item}", which is searched in whatever directory is current',
            "use a name without a slash, or an absolute path",
        )
        for item in value
        if "/" in item and not item.startswith("/")
    ]


def _check_ldconfig(values: Mapping[str, Any]) -> list[OptionFinding]:
    """Return an error if the ldconfig is not a path of the host that a hook accepts."""
    value = values.get(LDCONFIG, "@")
    path = tuple(LDCONFIG.split("."))
    if value.startswith("@"):
        if not _is_relative(value[1:]):
            return []
        what = f'"{LDCONFIG}" is "{value}", which is not "@" and an absolute path'
        return [OptionFinding(ERROR, path, what, 'use "@/sbin/ldconfig"', gpu_only=True)]
    if values.get(LDCONFIG_FEATURE):
        return []
    what = f'"{LDCONFIG}" is "{value}": invalid config value: not a path of the host'
    return [OptionFinding(ERROR, path, what, f'use "@{value or "/sbin/ldconfig"}"')]
