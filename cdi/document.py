# SPDX-License-Identifier: Apache-2.0
"""Check a decoded CDI document: members, types, values, version.

On the start path; pure. CDI SPEC.md, "CDI JSON Specification". Which documents are refused, and
which reason is reported first, follows the reference library. `quick` recognises common documents
faster.
"""

from __future__ import annotations

from cdi import names, version
from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from cdi.wire import Edits, Spec

    Path = tuple[str | int, ...]

HOOK_NAMES = (
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
)
# Files of processes: the image decides which program is there when a hook runs.
_OF_PROCESSES = (
    ("proc",),
    *(("dev", name) for name in ("fd", "stdin", "stdout", "stderr")),
)
UINT32 = (0, 2**32 - 1)
INT64 = (-(2**63), 2**63 - 1)

_MAX_SINGLE = 3.4028235677973366e38

# Member → shape. A shape is str, bool, (low, high) for an integer, [shape] for a list of it, the
# name of another table, or dict for a map of strings.
TABLES: dict[str, dict[str, Any]] = {
    "spec": {
        "cdiVersion": str,
        "kind": str,
        "annotations": dict,
        "devices": ["device"],
        "containerEdits": "edits",
    },
    "device": {"name": str, "annotations": dict, "containerEdits": "edits"},
    "edits": {
        "env": [str],
        "deviceNodes": ["node"],
        "netDevices": ["net device"],
        "hooks": ["hook"],
        "mounts": ["mount"],
        "intelRdt": "rdt",
        "additionalGids": [UINT32],
    },
    "node": {
        "path": str,
        "hostPath": str,
        "type": str,
        "major": INT64,
        "minor": INT64,
        "fileMode": UINT32,
        "permissions": str,
        "uid": UINT32,
        "gid": UINT32,
    },
    "mount": {"hostPath": str, "containerPath": str, "options": [str], "type": str},
    "hook": {"hookName": str, "path": str, "args": [str], "env": [str], "timeout": INT64},
    "net device": {"hostInterfaceName": str, "name": str},
    "rdt": {
        "closID": str,
        "l3CacheSchema": str,
        "memBwSchema": str,
        "schemata": [str],
        "enableMonitoring": bool,
    },
}
_STRINGS = frozenset((str,))
_FOLDED = {name: {member.lower(): member for member in table} for name, table in TABLES.items()}
# Readers in Go replace a null item with these; a null item of another shape crashes them.
_NULL_ITEMS: dict[Any, Any] = {str: "", "device": {}, UINT32: 0}


class Problem:
    """One reason why a document is refused.

    *category* is a stable word, *path* consists of member names and list indices, and *message* is
    one line without the path.
    """

    __slots__ = ("category", "message", "path")

    def __init__(self, category: str, path: Path, message: str) -> None:
        self.category = category
        self.path = path
        self.message = message


def check(document: object) -> Spec:
    """Return *document* normalised; raise CdiError for the first problem if it is refused."""
    return check_normalised(normalise(document))


def check_normalised(spec: Any) -> Spec:  # noqa: ANN401 (JSON)
    """Return *spec*, which `normalise` has returned; raise CdiError as `check` does."""
    for problem in problems(spec):
        where = place(problem.path)
        text = f"{where}: {problem.message}" if where else problem.message
        raise CdiError(problem.category, text)
    checked: Spec = spec
    return checked


def place(path: Path) -> str:
    """Return *path* as text, such as `devices[0].containerEdits.env[1]`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def normalise(document: object) -> Any:  # noqa: ANN401 (JSON)
    """Return *document* as readers in Go see it; values of a wrong shape are unchanged.

    Member names match regardless of case, a scalar becomes a string where the format has a
    string, a whole float becomes an integer where it has one, and null members are dropped.
    """
    return _normal("spec", document)


def problems(document: object) -> Iterator[Problem]:
    """Yield every problem of the normalised *document*, in the order of the reference's checks.

    A value of the wrong shape is one problem; its members and its parents are not checked further.
    """
    if document is None:
        yield Problem("no-data", (), "the document is empty")
        return
    misshapen: list[Problem] = []
    spec = _fitting("spec", document, (), misshapen)
    yield from misshapen
    misfits = {problem.path for problem in misshapen}
    above = {path[:end] for path in misfits for end in range(len(path))}
    for problem in _semantics(spec):
        is_below = any(problem.path[:end] in misfits for end in range(len(problem.path) + 1))
        if problem.path not in above and not is_below:
            yield problem


def is_empty(edits: Edits) -> bool:
    """Return whether *edits* would change nothing (an empty intelRdt counts as an edit)."""
    if edits.get("intelRdt") is not None:
        return False
    lists = ("env", "deviceNodes", "hooks", "mounts", "additionalGids", "netDevices")
    return not any(edits.get(member) for member in lists)


def _normal(shape: Any, value: object) -> Any:  # noqa: ANN401 (JSON)
    if isinstance(shape, str):
        return _members(shape, value) if isinstance(value, dict) else value
    if isinstance(shape, list):
        if not isinstance(value, list):
            return value
        if shape[0] is str and _STRINGS.issuperset(map(type, value)):
            return list(value)
        null = _NULL_ITEMS.get(shape[0])
        return [_normal(shape[0], null if item is None else item) for item in value]
    if shape is str:
        return _string(value)
    if shape is dict and isinstance(value, dict):
        return {key: "" if item is None else _string(item) for key, item in value.items()}
    if isinstance(shape, tuple) and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _members(table: str, value: dict[str, Any]) -> dict[str, Any]:
    members, folded = TABLES[table], _FOLDED[table]
    if members.keys() >= value.keys():
        return {
            name: _normal(members[name], item) for name, item in value.items() if item is not None
        }
    result = {}
    # If names differ only in case, the one that sorts last by bytes counts.
    several = len({fold(key) for key in value}) < len(value)
    for key in sorted(value, key=_bytes) if several else value:
        name = key if key in members else folded.get(fold(key), key)
        if value[key] is None and name in members:
            continue
        result[name] = _normal(members[name], value[key]) if name in members else value[key]
    return result


def _bytes(text: str) -> bytes:
    """Return *text* as bytes, the key to sort by."""
    return text.encode("utf-8", "surrogatepass")


def fold(name: str) -> str:
    """Return *name* in the form in which member names are compared."""
    # Go folds by Unicode's simple rules, in which the long s equals s too.
    return name.replace("\u017f", "s").lower()


def _string(value: object) -> object:
    """Return *value*, as a string if it is a scalar."""
    return scalar_text(value) if isinstance(value, (str, bool, int, float)) else value


def scalar_text(value: str | float) -> str:
    """Return the string to which readers in Go convert a scalar."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    # str() raises above 4300 digits; no reader has an integer as large.
    if isinstance(value, int) and INT64[0] <= value < 2**64:
        return str(value)
    try:
        return _float_text(float(value))
    except OverflowError:
        # Go's parser does not change a number that no float can hold.
        return str(value)


def _float_text(value: float) -> str:
    """Return *value* as Go prints a float of single precision: the shortest exact form."""
    if value != value:  # noqa: PLR0124 (NaN; math is not for the start path)
        return "NaN"
    value = _single(value)
    if abs(value) > _MAX_SINGLE:
        return "+Inf" if value > 0 else "-Inf"
    for digits in range(9):
        text = f"{value:.{digits}e}"
        if _single(float(text)) == value:
            break
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if not -4 <= power < 6:
        return f"{mantissa}e{exponent}"
    return f"{value:.{max(0, digits - power)}f}"


def _single(value: float) -> float:
    """Return *value* rounded to the 24 bits of a float of single precision."""
    if abs(value) > _MAX_SINGLE:
        return value
    scaled = value * (2**29 + 1)
    return scaled - (scaled - value)


def _fitting(shape: Any, value: object, path: Path, misfits: list[Problem]) -> Any:  # noqa: ANN401 (JSON)
    """Return *value* with empty values for parts of a wrong shape, which go to *misfits*."""
    if isinstance(shape, str):
        return _fitting_members(shape, value, path, misfits)
    if isinstance(shape, list):
        if not isinstance(value, list):
            misfits.append(Problem("wrong-type", path, "is not a list"))
            return []
        if shape[0] is str and _STRINGS.issuperset(map(type, value)):
            return value
        return [_fitting(shape[0], item, (*path, i), misfits) for i, item in enumerate(value)]
    if isinstance(shape, tuple):
        # bool is a subclass of int in Python, but a type of its own in JSON.
        if not isinstance(value, int) or isinstance(value, bool):
            misfits.append(Problem("wrong-type", path, "is not a whole number"))
        elif not shape[0] <= value <= shape[1]:
            misfits.append(Problem("wrong-type", path, f"is not from {shape[0]} to {shape[1]}"))
        else:
            return value
        return 0
    if not isinstance(value, shape):
        kinds = {str: "a string", bool: "true or false", dict: "a map"}
        misfits.append(Problem("wrong-type", path, f"is not {kinds[shape]}"))
        return shape()
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, str):
                misfits.append(Problem("wrong-type", (*path, key), "is not a string"))
    return value


def _fitting_members(table: str, value: object, path: Path, misfits: list[Problem]) -> Any:  # noqa: ANN401 (JSON)
    if not isinstance(value, dict):
        misfits.append(
            Problem("wrong-type", path, "is null" if value is None else "is not an object")
        )
        return {}
    members = TABLES[table]
    result = {}
    # The order in which Go's decoder reads the members.
    is_known = members.keys() >= value.keys()
    for key in sorted(value, key=None if is_known else _bytes):
        if key in members:
            result[key] = _fitting(members[key], value[key], (*path, key), misfits)
        else:
            text = f'the format has no member "{key}" here'
            misfits.append(Problem("unknown-field", (*path, key), text))
    return result


def _semantics(spec: Spec) -> Iterator[Problem]:
    """Yield the problems of *spec*, a document in which every value has the right shape."""
    yield from _version_problems(spec)
    try:
        vendor, cls = names.split_kind(spec.get("kind", ""))
        names.check_vendor(vendor)
        names.check_class(cls)
    except CdiError as error:
        yield Problem(error.category, ("kind",), error.message)
    if spec.get("containerEdits"):
        yield from _edits_problems(spec["containerEdits"], ("containerEdits",))
    seen: set[str] = set()
    for i, device in enumerate(spec.get("devices", ())):
        path: Path = ("devices", i)
        name = device.get("name", "")
        try:
            names.check_device(name)
        except CdiError as error:
            yield Problem(error.category, (*path, "name"), error.message)
        edits = device.get("containerEdits") or {}
        if is_empty(edits):
            text = f'device "{name}" has no edits'
            yield Problem("empty-edits", (*path, "containerEdits"), text)
        yield from _edits_problems(edits, (*path, "containerEdits"))
        if name in seen:
            text = f'device "{name}" occurs more than once'
            yield Problem("duplicate-device", (*path, "name"), text)
        seen.add(name)
    if not spec.get("devices"):
        yield Problem("no-devices", ("devices",), "the document has no devices")


def _version_problems(spec: Spec) -> Iterator[Problem]:
    text = spec.get("cdiVersion", "")
    claimed = text.removeprefix("v")
    if claimed not in version.KNOWN:
        yield Problem("version-unknown", ("cdiVersion",), f'version "{text}" is not known')
        return
    needed = version.minimum(spec)
    if version.KNOWN.index(claimed) < version.KNOWN.index(needed):
        text = f"it is {claimed}, but {needed} is needed"
        yield Problem("version-too-low", ("cdiVersion",), text)


def _edits_problems(edits: Edits, path: Path) -> Iterator[Problem]:
    yield from _env_problems("env", edits.get("env", ()), (*path, "env"))
    for i, node in enumerate(edits.get("deviceNodes", ())):
        here: Path = (*path, "deviceNodes", i)
        if not node.get("path"):
            yield Problem("device-path", (*here, "path"), "the device node has no path")
        if node.get("type", "") not in ("", "b", "c", "u", "p"):
            text = f'"{node["type"]}" is none of b, c, u, p'
            yield Problem("device-type", (*here, "type"), text)
        permissions = node.get("permissions", "")
        if permissions != "none" and permissions.strip("rwm"):
            text = f'"{permissions}" is neither "none" nor a combination of r, w, m'
            yield Problem("device-permissions", (*here, "permissions"), text)
    for i, hook in enumerate(edits.get("hooks", ())):
        here = (*path, "hooks", i)
        if hook.get("hookName", "") not in HOOK_NAMES:
            text = f'"{hook.get("hookName", "")}" is none of {", ".join(HOOK_NAMES)}'
            yield Problem("hook-name", (*here, "hookName"), text)
        text = hook_path_problem(hook.get("path", ""))
        if text:
            yield Problem("hook-path", (*here, "path"), text)
        yield from _env_problems("hook-env", hook.get("env", ()), (*here, "env"))
    for i, mount in enumerate(edits.get("mounts", ())):
        here = (*path, "mounts", i)
        if not mount.get("hostPath"):
            yield Problem("mount-host-path", (*here, "hostPath"), "the mount has no hostPath")
        if not mount.get("containerPath"):
            text = "the mount has no containerPath"
            yield Problem("mount-container-path", (*here, "containerPath"), text)
    clos_id = (edits.get("intelRdt") or {}).get("closID", "")
    if clos_id != "/" and _is_bad_clos_id(clos_id):
        text = 'is neither "/" nor a directory name of less than 4096 bytes'
        yield Problem("rdt-clos-id", (*path, "intelRdt", "closID"), text)
    yield from _net_device_problems(edits, path)


def hook_path_problem(path: str) -> str:
    """Return why *path* cannot be the program of a hook, "" if it can be.

    A low-level runtime runs it as root on the host, in the container's root directory.
    """
    if not path:
        return "the hook has no path"
    if not path.startswith("/"):
        return f'"{path}" is not absolute: runc would run a program of the image'
    parts = [part for part in path.split("/") if part not in ("", ".")]
    # After a symlink, ".." can lead to any directory up to the root.
    starts = [0, *(i + 1 for i, part in enumerate(parts) if part == "..")]
    if any(
        tuple(parts[start : start + len(end)]) == end for start in starts for end in _OF_PROCESSES
    ):
        return f'"{path}" leads to files of processes: runc would run a program of the image'
    return ""


def _env_problems(category: str, env: list[str] | tuple[()], path: Path) -> Iterator[Problem]:
    for i, entry in enumerate(env):
        if entry.find("=") < 1:
            yield Problem(category, (*path, i), f'"{entry}" is not NAME=value')


def _is_bad_clos_id(text: str) -> bool:
    if len(_bytes(text)) >= 4096:
        return True
    return text in (".", "..") or "/" in text or "\n" in text


def _net_device_problems(edits: Edits, path: Path) -> Iterator[Problem]:
    hosts: set[str] = set()
    inside: set[str] = set()
    for i, device in enumerate(edits.get("netDevices", ())):
        here: Path = (*path, "netDevices", i)
        host, name = device.get("hostInterfaceName", ""), device.get("name", "")
        if not host:
            text = "the network device has no name on the host"
            yield Problem("netdev-host-name", (*here, "hostInterfaceName"), text)
        if not name:
            text = "the network device has no name in the container"
            yield Problem("netdev-name", (*here, "name"), text)
        if host in hosts:
            text = f'network device "{host}" occurs more than once'
            yield Problem("netdev-duplicate-host", (*here, "hostInterfaceName"), text)
        if name in inside:
            text = f'network name "{name}" occurs more than once'
            yield Problem("netdev-duplicate-name", (*here, "name"), text)
        hosts.add(host)
        inside.add(name)
