# SPDX-License-Identifier: Apache-2.0
"""Make CDI documents from a seed: valid ones, and ones with one thing wrong of a known category.

What is wrong, and so the category, is written here with each change; nothing asks the library.
"""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

from cdi import yaml_text

Document = dict[str, Any]

VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
TOO_OLD = ("0.1.0", "0.2.0")
STAGES = (
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
)
LETTERS = string.ascii_letters
UINT32_MAX = 2**32 - 1


# Valid documents, written as the library normalises them.


def valid(rng: random.Random) -> Document:
    """Return a document that loads; it claims the version that it was made for."""
    version = rng.choice(VERSIONS)
    spec: Document = {
        "cdiVersion": rng.choice(("", "", "", "v")) + version,
        "kind": f"{name(rng)}/{name(rng, '_-.' if version >= '0.6.0' else '_-')}",
    }
    if version >= "0.6.0" and rng.random() < 0.3:
        spec["annotations"] = notes(rng)
    if rng.random() < 0.5:
        spec["containerEdits"] = edits(rng, version)
    names: set[str] = set()
    spec["devices"] = []
    for _ in range(rng.randint(1, 4)):
        device: Document = {"name": device_name(rng, version, names)}
        if version >= "0.6.0" and rng.random() < 0.2:
            device["annotations"] = notes(rng)
        device["containerEdits"] = full_edits(rng, version)
        spec["devices"].append(device)
    items = list(spec.items())
    rng.shuffle(items)
    return dict(items)


def name(rng: random.Random, inside: str = "_-.") -> str:
    """Return the name of a vendor or class."""
    middle = LETTERS + string.digits + inside
    length = rng.choice((0, 1, 2, 5, 60))
    end = rng.choice(LETTERS + string.digits)
    return rng.choice(LETTERS) + "".join(rng.choices(middle, k=length)) + end


def device_name(rng: random.Random, version: str, taken: set[str]) -> str:
    """Return a device name that is not *taken*, and take it."""
    first = LETTERS + (string.digits if version >= "0.5.0" else "")
    while True:
        found = rng.choice(first)
        if rng.random() < 0.8:
            found = found + name(rng, "_-.:")
        if found not in taken:
            taken.add(found)
            return found


def text(rng: random.Random) -> str:
    """Return some text, in which may be anything but what YAML cannot hold."""
    alphabet = LETTERS + string.digits + " /=.,:-_#'\"\\{}[]&*!|>%@`\n\t\u00e9\u4e2d\U0001f600"
    return "".join(rng.choices(alphabet, k=rng.choice((1, 1, 3, 8, 40))))


def path(rng: random.Random) -> str:
    """Return a path, which need not be a good one."""
    return rng.choice(("/dev/", "/usr/lib/", "", "../")) + text(rng)


def notes(rng: random.Random) -> dict[str, str]:
    """Return annotations, at least one."""
    return {text(rng): rng.choice(("", text(rng))) for _ in range(rng.randint(1, 3))}


def env(rng: random.Random) -> list[str]:
    """Return variables; the names are free, but for `=`."""
    names = (text(rng).replace("=", "_") for _ in range(rng.randint(0, 3)))
    return [f"{one}={rng.choice(('', '=', text(rng)))}" for one in names]


def edits(rng: random.Random, version: str) -> Document:
    """Return edits that *version* knows, perhaps none."""
    makers: dict[str, Callable[[], Any]] = {
        "env": lambda: env(rng),
        "deviceNodes": lambda: several(rng, lambda: node(rng, version)),
        "mounts": lambda: several(rng, lambda: mount(rng, version)),
        "hooks": lambda: several(rng, lambda: hook(rng)),
        "additionalGids": list,
        "netDevices": list,
    }
    if version >= "0.7.0":
        makers["additionalGids"] = lambda: several(rng, lambda: uint32(rng))
        makers["intelRdt"] = lambda: rdt(rng, version)
    if version >= "1.1.0":
        makers["netDevices"] = lambda: net_devices(rng, rng.randint(0, 3))
    return {member: make() for member, make in makers.items() if rng.random() < 0.35}


def full_edits(rng: random.Random, version: str) -> Document:
    """Return edits that change something."""
    while True:
        found = edits(rng, version)
        if any(found.values()) or "intelRdt" in found:
            return found


def several(rng: random.Random, make: Callable[[], Any]) -> list[Any]:
    """Return a list of none to three."""
    return [make() for _ in range(rng.randint(0, 3))]


def uint32(rng: random.Random) -> int:
    """Return an unsigned number, often at an end of the range."""
    return rng.choice((0, 1, 1000, UINT32_MAX, rng.randint(0, UINT32_MAX)))


def int64(rng: random.Random) -> int:
    """Return a number, often at an end of the range."""
    return rng.choice((0, -1, 195, 2**63 - 1, -(2**63), rng.randint(-(2**63), 2**63 - 1)))


def some(rng: random.Random, members: dict[str, Callable[[], Any]]) -> Document:
    """Return about half of *members*, made."""
    return {member: make() for member, make in members.items() if rng.random() < 0.5}


def node(rng: random.Random, version: str) -> Document:
    """Return a device node."""
    members: dict[str, Callable[[], Any]] = {
        "type": lambda: rng.choice(("", "b", "c", "u", "p")),
        "major": lambda: int64(rng),
        "minor": lambda: int64(rng),
        "fileMode": lambda: uint32(rng),
        "permissions": lambda: rng.choice(("", "none", *RWM)),
        "uid": lambda: uint32(rng),
        "gid": lambda: uint32(rng),
        "hostPath": lambda: path(rng) if version >= "0.5.0" else "",
    }
    return {"path": path(rng), **some(rng, members)}


RWM = ("r", "w", "m", "rw", "mw", "rwm", "rrr")


def mount(rng: random.Random, version: str) -> Document:
    """Return a mount."""
    members: dict[str, Callable[[], Any]] = {
        "options": lambda: several(rng, lambda: rng.choice(("ro", "rbind", text(rng)))),
        "type": lambda: rng.choice(("tmpfs", text(rng))) if version >= "0.4.0" else "",
    }
    return {"hostPath": path(rng), "containerPath": path(rng), **some(rng, members)}


def hook(rng: random.Random) -> Document:
    """Return a hook."""
    members: dict[str, Callable[[], Any]] = {
        "args": lambda: several(rng, lambda: rng.choice(("", text(rng)))),
        "env": lambda: env(rng),
        "timeout": lambda: int64(rng),
    }
    stage = rng.choice(STAGES)
    program = rng.choice(("/usr/bin/", "/opt/../", "/dev/shm/", "/sbin//./")) + text(rng)
    return {"hookName": stage, "path": program, **some(rng, members)}


def rdt(rng: random.Random, version: str) -> Document:
    """Return RDT settings."""
    clos_ids = ("", "guaranteed", "a" * 4095, "\u00e9" * 2047, "...", "a.b")
    members: dict[str, Callable[[], Any]] = {
        "closID": lambda: rng.choice((*clos_ids, "/") if version >= "1.1.0" else clos_ids),
        "l3CacheSchema": lambda: text(rng),
        "memBwSchema": lambda: "",
    }
    if version >= "1.1.0":
        members["schemata"] = lambda: several(rng, lambda: text(rng))
        members["enableMonitoring"] = lambda: rng.random() < 0.5
    else:
        members["enableMonitoring"] = lambda: False
    return some(rng, members)


def net_devices(rng: random.Random, count: int) -> list[Document]:
    """Return network devices, each with names of its own."""
    return [
        {"hostInterfaceName": f"{text(rng)}{i}", "name": f"{text(rng)}{i}"} for i in range(count)
    ]


# The same document as people write it.

# Member → one that objects in it may have, and others too.
OFTEN_ABSENT = {
    "deviceNodes": "fileMode",
    "mounts": "type",
    "hooks": "timeout",
    "intelRdt": "closID",
}


def written(rng: random.Random, value: Any, key: str = "") -> Any:
    """Return *value* with member names in other letter case, whole floats and null members."""
    if isinstance(value, dict):
        if key == "annotations":
            return dict(value)
        result = {
            "".join(rng.choice((c.lower(), c.upper())) for c in member)
            if rng.random() < 0.1
            else member: written(rng, item, member)
            for member, item in value.items()
        }
        absent = OFTEN_ABSENT.get(key, "containerEdits" if key == "" else "")
        if absent and absent not in value:
            result[absent] = None
        return result
    if isinstance(value, list):
        return [written(rng, item, key) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.1:
        # Beyond this, a float is another number.
        return float(value) if abs(value) < 2**53 else value
    return value


def as_text(rng: random.Random, document: Any) -> tuple[str, str]:
    """Return (file name, text) of *document*, as JSON or as YAML."""
    if rng.random() < 0.5:
        return "spec.json", json.dumps(document, ensure_ascii=False)
    return "spec.yaml", yaml_text.encode(document)


# One thing wrong. Each function changes a valid document and returns it.


def _owners(document: Document) -> list[Document]:
    """Return what may have edits: the document and its devices."""
    return [document, *document["devices"]]


def _some_edits(rng: random.Random, document: Document) -> Document:
    owner = rng.choice(_owners(document))
    found: Document = owner.setdefault("containerEdits", {})
    return found


def _insert(rng: random.Random, items: list[Any], item: Any) -> None:
    items.insert(rng.randint(0, len(items)), item)


def _add(rng: random.Random, document: Document, member: str, item: Any) -> None:
    """Put *item* somewhere into the list *member* of some edits."""
    _insert(rng, _some_edits(rng, document).setdefault(member, []), item)


def _without(rng: random.Random, owner: Document, member: str) -> Document:
    """Return *owner* with *member* empty or missing."""
    if rng.random() < 0.5:
        owner[member] = ""
    else:
        owner.pop(member, None)
    return owner


def _newest(document: Document) -> Document:
    document["cdiVersion"] = "1.1.0"
    return document


def _objects(value: Any, key: str = "") -> Iterator[tuple[str, Document]]:
    """Yield (the member it is in, object) of *value*, but for annotations."""
    if isinstance(value, dict) and key != "annotations":
        yield key, value
        for member, item in value.items():
            yield from _objects(item, member)
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item, key)


def wrong_type(rng: random.Random, document: Document) -> Document:
    """Put a value where none of its type can be."""
    one_of = rng.choice
    no_list: tuple[Any, ...] = ("A=b", {"A": "b"}, True, 7)
    no_map: tuple[Any, ...] = ("x", [], [{}], True, 7)
    no_string: tuple[Any, ...] = ([], {}, ["x"], {"a": "b"})
    no_number: tuple[Any, ...] = ("1", True, 1.5, [], {}, 2**64, -(2**63) - 1)
    no_uint32: tuple[Any, ...] = (*no_number, -1, 2**32)
    top: dict[str, tuple[Any, ...]] = {
        "cdiVersion": no_string,
        "kind": no_string,
        "annotations": (*no_map, {"a": []}, {"a": {}}),
        "devices": (*no_list, [7], ["x"], [[]]),
        "containerEdits": no_map,
    }
    in_edits: dict[str, tuple[Any, ...]] = {
        "env": (*no_list, [{"A": "b"}], [["A=b"]]),
        "deviceNodes": (*no_list, ["/dev/null"], [None]),
        "netDevices": (*no_list, ["eth0"], [None]),
        "mounts": (*no_list, ["/a:/b"], [None]),
        "hooks": (*no_list, ["/bin/true"], [None]),
        "intelRdt": no_map,
        "additionalGids": (*no_list, ["5"], [True], [-1], [2**32], [1.5]),
    }
    good_node, good_mount = {"path": "/dev/x"}, {"hostPath": "/a", "containerPath": "/b"}
    good_hook = {"hookName": "poststop", "path": "/h"}
    parts: tuple[tuple[str, Document, str, tuple[Any, ...]], ...] = (
        *(("deviceNodes", good_node, m, no_string) for m in ("path", "hostPath", "type")),
        ("deviceNodes", good_node, "permissions", no_string),
        *(("deviceNodes", good_node, m, no_number) for m in ("major", "minor")),
        *(("deviceNodes", good_node, m, no_uint32) for m in ("fileMode", "uid", "gid")),
        *(("mounts", good_mount, m, no_string) for m in ("hostPath", "containerPath", "type")),
        ("mounts", good_mount, "options", (*no_list, [[]], [{}])),
        *(("hooks", good_hook, m, no_string) for m in ("hookName", "path")),
        *(("hooks", good_hook, m, (*no_list, [[]], [{}])) for m in ("args", "env")),
        ("hooks", good_hook, "timeout", no_number),
        *(("netDevices", {"name": "a"}, m, no_string) for m in ("hostInterfaceName", "name")),
        *(("intelRdt", {}, m, no_string) for m in ("closID", "l3CacheSchema", "memBwSchema")),
        ("intelRdt", {}, "schemata", (*no_list, [[]])),
        ("intelRdt", {}, "enableMonitoring", ("true", 1, 0, [], {})),
    )
    what = rng.random()
    if what < 0.2:
        member = one_of(list(top))
        document[member] = one_of(top[member])
    elif what < 0.4:
        member = one_of(list(in_edits))
        _some_edits(rng, document)[member] = one_of(in_edits[member])
    elif what < 0.5:
        device: Document = one_of(document["devices"])
        device.update(one_of(({"name": one_of(no_string)}, {"containerEdits": one_of(no_map)})))
    else:
        member, good, part, values = one_of(parts)
        bad = {**good, part: one_of(values)}
        _some_edits(rng, document)[member] = bad if member == "intelRdt" else [bad]
    return document


def unknown_field(rng: random.Random, document: Document) -> Document:
    """Give some object a member that the format does not have there."""
    others = {
        "": ("path", "version"),
        "devices": ("kind", "env"),
        "containerEdits": ("devices", "rdt", "annotations"),
        "deviceNodes": ("mode", "containerPath"),
        "netDevices": ("hostName", "mtu"),
        "mounts": ("path", "source"),
        "hooks": ("stage", "command"),
        "intelRdt": ("schema", "enableCMT", "enableMBM"),
    }
    key, owner = rng.choice(list(_objects(document)))
    value: Any = rng.choice((None, 1, "x", [], {}))
    owner[rng.choice((*others[key], "", "x-ours", "cdi version"))] = value
    return document


def version_unknown(rng: random.Random, document: Document) -> Document:
    """Claim a version that there is not."""
    bad = (
        "0.9.0",
        "0.5.1",
        "0.6",
        "1.0.0-rc.1",
        " 0.6.0",
        "V0.6.0",
        "vv0.6.0",
        "0.6.0\n",
        "2.0.0",
    )
    document["cdiVersion"] = rng.choice((*bad, "latest", "v", "1.1", "1"))
    if rng.random() < 0.2:
        _without(rng, document, "cdiVersion")
    return document


def version_too_low(rng: random.Random, document: Document) -> Document:
    """Use something that the claimed version does not have."""
    if rng.random() < 0.2:
        document["cdiVersion"] = rng.choice(TOO_OLD)
        return document
    device = rng.choice(document["devices"])
    mount_ = {"hostPath": "/a", "containerPath": "/b", "type": "x"}
    changes: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("0.4.0", lambda: _add(rng, document, "mounts", mount_)),
        ("0.5.0", lambda: device.update(name="0one")),
        ("0.5.0", lambda: _add(rng, document, "deviceNodes", {"path": "/a", "hostPath": "/a"})),
        ("0.6.0", lambda: device.update(annotations={"a": ""})),
        ("0.6.0", lambda: document.update(annotations={"a": ""})),
        ("0.6.0", lambda: document.update(kind="vendor.test/a.b")),
        ("0.7.0", lambda: _some_edits(rng, document).update(intelRdt={})),
        ("0.7.0", lambda: _add(rng, document, "additionalGids", 0)),
        ("1.1.0", lambda: _some_edits(rng, document).update(intelRdt={"schemata": []})),
        ("1.1.0", lambda: _some_edits(rng, document).update(intelRdt={"enableMonitoring": True})),
        ("1.1.0", lambda: _some_edits(rng, document).update(netDevices=net_devices(rng, 1))),
    )
    needed, change = rng.choice(changes)
    change()
    older = [version for version in (*TOO_OLD, *VERSIONS) if version < needed]
    document["cdiVersion"] = rng.choice(("", "v")) + rng.choice(older)
    return document


def vendor(rng: random.Random, document: Document) -> Document:
    """Break the vendor, or the kind so that there is none."""
    bad = (
        "",
        "1v",
        "-v",
        "v-",
        "v_",
        ".v",
        "v.",
        "v w",
        "v\n",
        "v\u00e9",
        "v:w",
        "v=w",
        "\u0430v",
    )
    whole = ("", "/", "vendor", "/class", "vendor/", "vendor.test", "/a/b")
    document["kind"] = rng.choice((rng.choice(whole), f"{rng.choice(bad)}/class"))
    if rng.random() < 0.1:
        del document["kind"]
    return document


def class_(rng: random.Random, document: Document) -> Document:
    """Break the class."""
    bad = (
        "1c",
        "-c",
        "c-",
        "c_",
        "c/d",
        "c//d",
        "/c",
        "c d",
        "c\n",
        "c\u00e9",
        "c:d",
        "c=d",
        " c",
    )
    document["kind"] = f"vendor.test/{rng.choice(bad)}"
    return document


def device_name_bad(rng: random.Random, document: Document) -> Document:
    """Break the name of a device."""
    bad = (
        "-d",
        "d-",
        "_d",
        "d.",
        ":d",
        "d:",
        "d e",
        "d/e",
        "d=e",
        "d,e",
        "d*",
        "d\n",
        "\u00e9",
        "\n",
    )
    device = rng.choice(document["devices"])
    device["name"] = rng.choice(bad)
    if rng.random() < 0.2:
        _without(rng, device, "name")
    return document


def duplicate_device(rng: random.Random, document: Document) -> Document:
    """Define a device twice, with the same edits or others."""
    device = rng.choice(document["devices"])
    other = copy.deepcopy(device)
    if rng.random() < 0.5:
        other["containerEdits"] = {"env": ["OTHER=edits"]}
    _insert(rng, document["devices"], other)
    return document


def no_devices(rng: random.Random, document: Document) -> Document:
    """Take all devices away."""
    document["devices"] = []
    if rng.random() < 0.5:
        del document["devices"]
    return document


def empty_edits(rng: random.Random, document: Document) -> Document:
    """Take all edits of a device away."""
    device = rng.choice(document["devices"])
    empty = ("env", "deviceNodes", "hooks", "mounts", "additionalGids", "netDevices")
    device["containerEdits"] = {member: [] for member in empty if rng.random() < 0.3}
    if rng.random() < 0.3:
        del device["containerEdits"]
    return document


BAD_ENV = ("", "A", "=x", "=", "==", "A b", "=A=b", "\u00e9")


def env_bad(rng: random.Random, document: Document) -> Document:
    """Put a variable without name or value somewhere."""
    _add(rng, document, "env", rng.choice(BAD_ENV))
    return document


def _bad_hook(rng: random.Random, document: Document, **members: Any) -> Document:
    _add(rng, document, "hooks", {**hook(rng), **members})
    return document


def hook_env(rng: random.Random, document: Document) -> Document:
    """Put such a variable into a hook."""
    variables = env(rng)
    _insert(rng, variables, rng.choice(BAD_ENV))
    return _bad_hook(rng, document, env=variables)


def hook_name(rng: random.Random, document: Document) -> Document:
    """Name a stage that there is not."""
    bad = ("", "Prestart", "createruntime", "createContainer ", "poststop\n", "stop")
    _add(rng, document, "hooks", {**hook(rng), "hookName": rng.choice(bad)})
    if rng.random() < 0.2:
        _add(rng, document, "hooks", _without(rng, hook(rng), "hookName"))
    return document


def hook_path(rng: random.Random, document: Document) -> Document:
    """Leave out what a hook runs, or let it be of the image."""
    if rng.random() < 0.3:
        _add(rng, document, "hooks", _without(rng, hook(rng), "path"))
        return document
    up = rng.choice(("/", "//", "/./", "/usr/..//", "/.././", "/a/../b/../"))
    end = rng.choice(("", f"/{text(rng)}"))
    bad = rng.choice(("proc", "dev/fd", "dev/./stdin", "dev//stdout", "dev/stderr"))
    relative = rng.choice(("", "./", "../", "usr/bin/")) + text(rng).lstrip("/")
    return _bad_hook(rng, document, path=rng.choice((f"{up}{bad}{end}", relative)))


def device_path(rng: random.Random, document: Document) -> Document:
    """Leave out a device node's path."""
    _add(rng, document, "deviceNodes", _without(rng, node(rng, "0.3.0"), "path"))
    return document


def device_type(rng: random.Random, document: Document) -> Document:
    """Make a device node of no type."""
    bad = rng.choice(("char", "C", "B", "f", "cu", "c ", " ", "c\n", "d"))
    _add(rng, document, "deviceNodes", {**node(rng, "0.3.0"), "type": bad})
    return document


def device_permissions(rng: random.Random, document: Document) -> Document:
    """Ask for permissions that there are not."""
    bad = rng.choice(("rwx", "R", "r w", "None", "nonee", "rnone", "0666", "rw\n", "none\n", "-"))
    _add(rng, document, "deviceNodes", {**node(rng, "0.3.0"), "permissions": bad})
    return document


def mount_host_path(rng: random.Random, document: Document) -> Document:
    """Leave out what is mounted; that there is no containerPath either comes after it."""
    bad = _without(rng, mount(rng, "0.3.0"), "hostPath")
    if rng.random() < 0.2:
        _without(rng, bad, "containerPath")
    _add(rng, document, "mounts", bad)
    return document


def mount_container_path(rng: random.Random, document: Document) -> Document:
    """Leave out where it is mounted."""
    _add(rng, document, "mounts", _without(rng, mount(rng, "0.3.0"), "containerPath"))
    return document


def rdt_clos_id(rng: random.Random, document: Document) -> Document:
    """Name a class of service as no directory can be named."""
    bad = (".", "..", "a/b", "//", "/a", "a/", "a\nb", "a\n", "/\n", "\n", "a" * 4096, "a" * 9000)
    clos_id = rng.choice((*bad, "\u00e9" * 2048, "\U0001f600" * 1024 + "a" * 500))
    _some_edits(rng, document)["intelRdt"] = {**rdt(rng, "0.7.0"), "closID": clos_id}
    return _newest(document)


def _net(rng: random.Random, document: Document, *changes: Document) -> Document:
    """Give some edits network devices, the first of which get *changes*."""
    devices = net_devices(rng, len(changes) + rng.randint(0, 2))
    for device, change in zip(devices, changes):
        device.update(change)
    if len(changes) == 1:
        rng.shuffle(devices)
    _some_edits(rng, document)["netDevices"] = devices
    return _newest(document)


def netdev_host_name(rng: random.Random, document: Document) -> Document:
    """Leave out the name on the host; that there is no other name either comes after it."""
    return _net(rng, document, {"hostInterfaceName": "", **rng.choice(({}, {"name": ""}))})


def netdev_name(rng: random.Random, document: Document) -> Document:
    """Leave out the name in the container."""
    return _net(rng, document, {"name": ""})


def netdev_duplicate_host(rng: random.Random, document: Document) -> Document:
    """Take a device of the host twice; that the name is there twice, too, comes after it."""
    name_ = rng.choice(({}, {"name": "same"}))
    change = {"hostInterfaceName": "eth0", **name_}
    return _net(rng, document, change, change)


def netdev_duplicate_name(rng: random.Random, document: Document) -> Document:
    """Give two devices one name."""
    return _net(rng, document, {"name": "same"}, {"name": "same"})


# Category → the change that makes a valid document one of it.
CHANGES: dict[str, Callable[[random.Random, Document], Document]] = {
    "wrong-type": wrong_type,
    "unknown-field": unknown_field,
    "version-unknown": version_unknown,
    "version-too-low": version_too_low,
    "vendor": vendor,
    "class": class_,
    "device-name": device_name_bad,
    "duplicate-device": duplicate_device,
    "no-devices": no_devices,
    "empty-edits": empty_edits,
    "env": env_bad,
    "hook-env": hook_env,
    "hook-name": hook_name,
    "hook-path": hook_path,
    "device-path": device_path,
    "device-type": device_type,
    "device-permissions": device_permissions,
    "mount-host-path": mount_host_path,
    "mount-container-path": mount_container_path,
    "rdt-clos-id": rdt_clos_id,
    "netdev-host-name": netdev_host_name,
    "netdev-name": netdev_name,
    "netdev-duplicate-host": netdev_duplicate_host,
    "netdev-duplicate-name": netdev_duplicate_name,
}


# Texts that no document comes of. Each function returns (file name, text).


def syntax(rng: random.Random) -> tuple[str, str]:
    """Return text that is neither JSON nor YAML, or YAML that is no data."""
    document = valid(rng)
    cut = json.dumps(document)
    cut = cut[: rng.randint(1, len(cut) - 1)]
    block = yaml_text.encode(document)
    bad = (
        cut,
        "// comment\n" + json.dumps(document, indent=1),
        block + "\tcontainerEdits: {}\n",
        block + "annotations: {a: *nowhere}\n",
        block + "annotations: &self {a: *self}\n",
        block + "annotations: !!python/object:os.system {}\n",
        block + "annotations: {? [a] : b}\n",
        block + "  }\n",
        '{"cdiVersion": "unclosed}',
        "[" * 100_000,
        "{a: " * 1000,
        "%\n",
        "\x01",
    )
    return rng.choice(("spec.json", "spec.yaml")), rng.choice(bad)


def duplicate_key(rng: random.Random) -> tuple[str, str]:
    """Return a document in which some object has a member twice."""
    document = valid(rng)
    owner = rng.choice([found for _, found in _objects(document) if found])
    member = rng.choice(list(owner))
    value = owner[member]
    mark = "marked"
    owner[mark] = 0
    if rng.random() < 0.5:
        again = f"{json.dumps(member)}: {json.dumps(value, ensure_ascii=False)}"
        text_ = json.dumps(document, ensure_ascii=False).replace(f'"{mark}": 0', again)
        return rng.choice(("spec.json", "spec.yaml")), text_
    return "spec.yaml", yaml_text.encode(document).replace(
        f'"{mark}": 0', f"{json.dumps(member)}: 0"
    )


def no_data(rng: random.Random) -> tuple[str, str]:
    """Return text that holds nothing."""
    empty = (
        "",
        "\n \n",
        "# only a comment\n",
        "null",
        "~",
        "---\n---\na: b\n",
        "---\n...\n",
        "Null\n",
    )
    return rng.choice(("spec.json", "spec.yaml")), rng.choice(empty)


TEXTS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "syntax": syntax,
    "duplicate-key": duplicate_key,
    "no-data": no_data,
}


def broken(rng: random.Random, category: str) -> tuple[str, str]:
    """Return (file name, text) of a spec that is refused with *category*."""
    if category in TEXTS:
        return TEXTS[category](rng)
    document = CHANGES[category](rng, valid(rng))
    return as_text(rng, document)


def battered(rng: random.Random) -> Any:
    """Return a document with junk in some places, with or without harm."""
    document = valid(rng)
    for _ in range(rng.randint(1, 3)):
        junk = rng.choice(
            (None, True, 0, -1, 1.0, 2**40, "", "x", [], {}, [None], {"a": 1}, "v1.1.0")
        )
        owner: Any = document
        while True:
            keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(owner[key], (dict, list)) and rng.random() < 0.7:
                owner = owner[key]
                continue
            if rng.random() < 0.3:
                del owner[key]
            else:
                owner[key] = copy.deepcopy(junk)
            break
    return document
