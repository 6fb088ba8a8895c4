# SPDX-License-Identifier: Apache-2.0
"""Write CDI specs as YAML that readers of YAML 1.1 and 1.2 read as the same document; pure.

PyYAML is not used: its import costs as much as the rest of a command, and its writer ten times as
much as this one.
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring

from cdi import document

_MEMBERS = {member for table in document.TABLES.values() for member in table}
# In a string, YAML reads these as a line break or refuses them; JSON allows them. The pattern is
# not compiled here, because few specs need it.
_UNSAFE = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"


def as_json(value: object) -> str:
    """Return *value* as a line of JSON that is also YAML of the same meaning.

    It has no escaped slash and no surrogate escapes, which readers of YAML 1.1 refuse.
    """
    if isinstance(value, str):
        text = encode_basestring(value)
    else:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if text.isascii() and "\x7f" not in text:
        return text
    return re.sub(_UNSAFE, lambda match: f"\\u{ord(match[0]):04x}", text)


def encode(document_: object) -> str:
    """Return *document_* as a YAML document that begins with `---`, members in their order.

    Every string is in double quotes, because readers convert plain `y`, `0o7` or `1e3`. Scalars
    and empty lists and maps are written as in JSON.
    """
    lines = ["---"]
    _write(document_, "", "", lines)
    lines.append("")
    return "\n".join(lines)


def _write(value: object, first: str, rest: str, lines: list[str]) -> None:
    """Add *value* in block style to *lines*; *first* begins its first line, *rest* the others."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            name = key if key in _MEMBERS else as_json(key)
            if not item or not isinstance(item, (dict, list)):
                lines.append(f"{first}{name}: {as_json(item)}")
            else:
                lines.append(f"{first}{name}:")
                inside = f"{rest}  " if isinstance(item, dict) else rest
                _write(item, inside, inside, lines)
            first = rest
    elif isinstance(value, list) and value:
        for item in value:
            _write(item, f"{first}- ", f"{rest}  ", lines)
            first = rest
    else:
        lines.append(f"{first}{as_json(value)}")
