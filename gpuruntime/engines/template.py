# SPDX-License-Identifier: Apache-2.0
"""The templates from which k3s and RKE2 make containerd's config; text, never TOML; pure."""

from __future__ import annotations

import json
import os
import re

from gpuruntime.engines.containerd import RUNTIME_TYPE, plugin_path
from gpuruntime.engines.entry import Entry
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.toml_render import key_text, literal

# These two look for them when they start, below /usr/bin and /usr/local/nvidia/toolkit, and put
# them into their config themselves: once more in a template, and containerd would not start.
DETECTED = {
    "nvidia": "nvidia-container-runtime",
    "nvidia-cdi": "nvidia-container-runtime.cdi",
    "nvidia-experimental": "nvidia-container-runtime-experimental",
}
DETECTED_IN = ("/usr/local/nvidia/toolkit", "/usr/bin")
NAMES = ("config-v3.toml.tmpl", "config.toml.tmpl")
BASE = '{{ template "base" . }}\n'
_BEGIN = '# begin of what "gpuruntime runtime configure" has added\n'
_END = '# end of what "gpuruntime runtime configure" has added\n'
_BLOCK = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)


def version_of(path: str, text: str | None) -> int:
    """Return the version of the config that the template *text* in the file *path* makes."""
    if os.path.basename(path) == NAMES[0]:
        return 3
    found = re.search(r"^[ \t]*version[ \t]*=[ \t]*([1-9])\b", text or "", re.MULTILINE)
    if found:
        return int(found.group(1))
    return 3 if plugin_path(3)[1] in (text or "") else 2


def configure(text: str | None, entry: Entry, version: int) -> str:
    """Return the template with *entry* at its end; raise BadFileError if it has that already."""
    text = BASE if text is None or not text.strip() else text
    rest = _BLOCK.sub("", text)
    quoted = re.escape(entry.name)
    if re.search(rf"""^[ \t]*\[plugins\..*\.runtimes\.["']?{quoted}["']?\]""", rest, re.MULTILINE):
        raise BadFileError(
            f'has a runtime "{entry.name}" that is not ours', "take it out, or choose another name"
        )
    block = _block(entry, version, has_field=BASE.strip() in rest or ".SystemdCgroup" in rest)
    if _BLOCK.search(text):
        return _BLOCK.sub(lambda _: block, text, count=1)
    end = "" if text.endswith("\n") else "\n"
    return f"{text}{end}\n{block}"


def _block(entry: Entry, version: int, *, has_field: bool) -> str:
    table = (*plugin_path(version), "containerd", "runtimes", entry.name)
    lines = [f"[{key_text(table)}]", f'  runtime_type = "{RUNTIME_TYPE}"']
    if entry.annotations:
        lines.append(f"  container_annotations = {literal(entry.annotation_patterns())}")
    lines += [f"[{key_text((*table, 'options'))}]", f"  BinaryName = {json.dumps(entry.path)}"]
    if has_field:
        lines.append("  SystemdCgroup = {{ .SystemdCgroup }}")
    return _BEGIN + "".join(f"{line}\n" for line in lines) + _END


def remove(text: str) -> str:
    """Return the template without what is ours."""
    return re.sub(r"\n?" + _BLOCK.pattern, "", text, flags=re.DOTALL)
