# SPDX-License-Identifier: Apache-2.0
"""Check the values of a config.toml; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cdi import names
from cdi.errors import CdiError
from gpuruntime import config as settings
from gpuruntime.configfile import option_table
from gpuruntime.configfile.option_table import Option

# Of so many unknown keys the nearest is looked for; that takes its time.
MAX_NEAREST = 50
LDCONFIG = "nvidia-container-cli.ldconfig"
LDCONFIG_FEATURE = "features.allow-ldconfig-from-container"
_ABSOLUTE = ("nvidia-container-cli.root", f"{settings.RUNTIME}.modes.cdi.spec-dirs")


@dataclasses.dataclass(frozen=True, slots=True)
class OptionFinding:
    """What is to be said about the option at *path*.

    *severity*: with an "error" no container that is ours to start does; with a "warning" they
    start without what was meant; a "note" is about what has no effect yet. A warning with a
    *hint* is about a key that is not known.
    """

    severity: str
    path: tuple[str, ...]
    message: str
    hint: str = ""


def examine(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[OptionFinding]]:
    """Return the values of *document* that fit, by key, and what is to be said of the others."""
    values: dict[str, Any] = {}
    findings: list[OptionFinding] = []
    unknown = 0
    for path, value in option_table.flatten(document):
        key = option_table.to_key(path)
        option = option_table.BY_KEY.get(key)
        if option is not None:
            found = _check_value(option, path, value)
            findings += found
            if all(finding.severity != "error" for finding in found):
                values[key] = value
        elif key in option_table.TABLES:
            findings.append(
                OptionFinding("error", path, f'"{key}" is not a table', f'write "[{key}]"')
            )
        else:
            unknown += 1
            near = option_table.nearest(key) if unknown <= MAX_NEAREST else None
            known = f'the nearest known key is "{near}"' if near else ""
            findings.append(
                OptionFinding("warning", path, f'the key "{key}" has no effect', known)
            )
    wrong = _check_ldconfig(values)
    paths = {finding.path for finding in wrong}
    return values, [finding for finding in findings if finding.path not in paths] + wrong


def sentence(finding: OptionFinding) -> str:
    """Return *finding* as one line."""
    return f"{finding.message}; {finding.hint}" if finding.hint else finding.message


def _check_value(option: Option, path: tuple[str, ...], value: Any) -> list[OptionFinding]:  # noqa: ANN401
    """Return what is to be said of *value*, which the file has for *option*."""
    key, kind = option.key, option_table.KINDS[option.kind]
    if option.kind == "list" and isinstance(value, list) and "" in value:
        return [OptionFinding("error", path, f'"{key}" has an empty string', "take it out")]
    if not _fits(option, value):
        return [OptionFinding("error", path, f'"{key}" is not {kind}', f"give {kind}")]
    if key.endswith(".runtimes") and not value:
        hint = 'name a runtime, as in ["runc"]'
        return [OptionFinding("error", path, f'"{key}" is empty', hint)]
    paths = value if isinstance(value, list) else [value]
    if key in _ABSOLUTE and any(item and not item.startswith("/") for item in paths):
        # It would be looked for below whatever directory the engine is in.
        return [OptionFinding("error", path, f'"{key}" is no absolute path', "begin it with /")]
    if key.endswith(".default-kind"):
        vendor, cls = names.split_kind(value)
        try:
            names.check_vendor(vendor)
            names.check_class(cls)
        except CdiError as error:
            return [OptionFinding("error", path, f'"{key}": {error}', "use vendor/class")]
    found = _check_choices(option, path, value)
    if key.endswith("container-runtime.mode"):
        if not found and value not in settings.MODES:
            what = f'the mode "{value}" is not there yet: containers that ask for a GPU fail'
            found.append(OptionFinding("note", path, what))
    elif not option.acts and value != option.default:
        found.append(OptionFinding("note", path, f'"{key}" has no effect yet'))
    return found


def _fits(option: Option, value: object) -> bool:
    if option.kind in ("bool", "optional"):
        return isinstance(value, bool)
    if option.kind == "integer":
        # A bool is an int; what is too large for a timer is no time.
        return type(value) is int and 0 < value < 10**9
    if option.kind == "string":
        return isinstance(value, str)
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_choices(option: Option, path: tuple[str, ...], value: Any) -> list[OptionFinding]:  # noqa: ANN401
    """Return what is to be said of the words in *value* that are none of the option's."""
    key, choices = option.key, option.choices
    if key == "supported-driver-capabilities":
        choices = (*option_table.CAPABILITIES, "all", "")
        value = [word.strip() for word in value.split(",")]
    if key.endswith(".log-level"):
        # As the incumbent reads it: in any case.
        value = value.lower()
    words = value if isinstance(value, list) else [value]
    others = [word for word in words if word not in choices] if choices else []
    if not others:
        return []
    known = ", ".join(f'"{word}"' for word in choices if word)
    if option.kind == "list":
        return [
            OptionFinding("note", path, f'"{key}" has "{word}", which is not known')
            for word in others
        ]
    verb = "is" if words == [value] else "has"
    what, hint = f'"{key}" {verb} "{others[0]}"', f"the words are {known}"
    if option.strict:
        return [OptionFinding("error", path, what, f"use one of {known}")]
    if key.endswith(".log-level"):
        what += ', taken for "info"'
    return [OptionFinding("warning", path, what, hint)]


def _check_ldconfig(values: Mapping[str, Any]) -> list[OptionFinding]:
    """Return an error if the ldconfig would be a container's and that is not allowed."""
    value = values.get(LDCONFIG, "@")
    if value.startswith("@") or values.get(LDCONFIG_FEATURE):
        return []
    what = f'"{LDCONFIG}" is "{value}": invalid config value: not a path of the host'
    hint = f'write "@{value or "/sbin/ldconfig"}"'
    return [OptionFinding("error", tuple(LDCONFIG.split(".")), what, hint)]
