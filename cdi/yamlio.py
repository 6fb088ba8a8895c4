# SPDX-License-Identifier: Apache-2.0
"""Read and write CDI specs as YAML 1.1; the only module that imports yaml."""

from __future__ import annotations

from typing import Any

import yaml

from cdi.errors import CdiError

MAX_NODES = 200_000
MAX_ALIASES = 1_000


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses what Go's strict reader refuses, and alias bombs."""

    aliases = 0
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
        if self.aliases > MAX_ALIASES or self.nodes > MAX_NODES:
            raise CdiError("syntax", "too many aliases or nodes")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 (the base class' signature)
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise CdiError("syntax", f"line {key.start_mark.line + 1}: a key is no string")
            if name in seen:
                raise CdiError("duplicate-key", f'member "{name}" is there twice')
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


# Dates stay strings, as Go's reader leaves them.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Explicit tags for values that JSON does not have are unknown tags.
_NO_JSON = {f"tag:yaml.org,2002:{tag}" for tag in ("binary", "omap", "pairs", "set", "timestamp")}
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag not in _NO_JSON
}


def decode(text: str) -> object:
    """Return the first document of *text*; raise CdiError for what is no YAML of ours."""
    try:
        loader = _Loader(text)
        if not loader.check_node():
            return None
        return loader.construct_document(loader.get_node())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise CdiError("syntax", f"{line}{problem}") from error
    except (RecursionError, ValueError) as error:
        raise CdiError("syntax", f"cannot be read: {type(error).__name__}") from error


class _Dumper(yaml.SafeDumper):
    """Every string in double quotes: `y`, `0o7` or `1e3` would be read as something else."""

    def ignore_aliases(self, data: object) -> bool:
        """Write every value out: some readers cap or refuse aliases."""
        del data
        return True


class _Key(str):
    """A member name; written plain, since all of ours are letters only."""

    __slots__ = ()


_Dumper.add_representer(
    str, lambda dumper, data: dumper.represent_scalar("tag:yaml.org,2002:str", data, style='"')
)
_Dumper.add_representer(
    _Key, lambda dumper, data: dumper.represent_scalar("tag:yaml.org,2002:str", str(data))
)


def encode(document: object) -> str:
    """Return *document* as one YAML document in the order of its members, beginning `---`."""
    return yaml.dump(
        _with_keys(document),
        Dumper=_Dumper,
        sort_keys=False,
        explicit_start=True,
        allow_unicode=True,
        width=10_000,
    )


def _with_keys(value: object) -> object:
    if isinstance(value, dict):
        return {_Key(key): _with_keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_keys(item) for item in value]
    return value
