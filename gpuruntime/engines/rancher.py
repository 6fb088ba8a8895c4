# SPDX-License-Identifier: Apache-2.0
"""The templates from which k3s and RKE2 generate containerd's config; text, never TOML."""

from __future__ import annotations

import json
import os
import re

from gpuruntime.engines import files
from gpuruntime.engines.config_files import ConfigFile, FileSet, whole
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.containerd_document import RUNTIME_TYPE, plugin_path
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.engines.toml_render import key_text, literal
from gpuruntime.errors import ConfigError

# At their start k3s and RKE2 search for these programs in the directories below, and add them to
# their config. If a template defined the same runtime again, containerd would not start.
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
    """Return the version of the config that the template *text* in the file *path* generates."""
    if os.path.basename(path) == NAMES[0]:
        return 3
    match = re.search(r"^[ \t]*version[ \t]*=[ \t]*([1-9])\b", text or "", re.MULTILINE)
    if match:
        return int(match.group(1))
    return 3 if plugin_path(3)[1] in (text or "") else 2


def configure(text: str | None, entry: RuntimeEntry, version: int) -> str:
    """Return the template with *entry* at its end; raise BadFileError for a foreign duplicate."""
    text = BASE if text is None or not text.strip() else text
    rest = _BLOCK.sub("", text)
    quoted = re.escape(entry.name)
    if re.search(rf"""^[ \t]*\[plugins\..*\.runtimes\.["']?{quoted}["']?\]""", rest, re.MULTILINE):
        raise BadFileError(
            f'has a runtime "{entry.name}" that this program did not add',
            "remove it, or choose another name",
        )
    block = _block(entry, version, has_field=BASE.strip() in rest or ".SystemdCgroup" in rest)
    if any(_has_name(match, entry.name) for match in _BLOCK.finditer(text)):
        return _BLOCK.sub(
            lambda match: block if _has_name(match, entry.name) else match.group(), text
        )
    end = "" if text.endswith("\n") else "\n"
    return f"{text}{end}\n{block}"


def _block(entry: RuntimeEntry, version: int, *, has_field: bool) -> str:
    table = (*plugin_path(version), "containerd", "runtimes", entry.name)
    lines = [f"[{key_text(table)}]", f'  runtime_type = "{RUNTIME_TYPE}"']
    if entry.annotations:
        lines.append(f"  container_annotations = {literal(entry.annotation_patterns())}")
    lines += [f"[{key_text((*table, 'options'))}]", f"  BinaryName = {json.dumps(entry.path)}"]
    if has_field:
        lines.append("  SystemdCgroup = {{ .SystemdCgroup }}")
    return _BEGIN + "".join(f"{line}\n" for line in lines) + _END


def _has_name(block: re.Match[str], name: str) -> bool:
    """Return whether *block* is our block for the runtime *name*."""
    return f".runtimes.{key_text((name,))}]" in block.group()


def remove(text: str, name: str) -> str:
    """Return the template without our block for the runtime *name*."""
    return re.sub(
        r"\n?" + _BLOCK.pattern,
        lambda match: "" if _has_name(match, name) else match.group(),
        text,
        flags=re.DOTALL,
    )


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine*, k3s or RKE2; raise ConfigError."""
    del source
    notes = []
    if entry.has_cdi:
        notes.append(f"{engine.name} manages CDI itself: --cdi.enabled has no effect")
    if entry.name in DETECTED:
        return _detected(engine, entry, notes)
    if entry.is_default:
        raise ConfigError(
            f"{engine.name} does not start with a default runtime that it has not detected "
            f'itself, and of our runtimes it detects only "nvidia"',
            "select the runtime by a RuntimeClass, or use --runtime-name nvidia after an "
            "installation under the incumbent's names",
        )
    return FileSet([_in_template(engine, entry)], notes)


def _in_template(engine: EngineConfig, entry: RuntimeEntry) -> ConfigFile:
    path = _template_path(engine.config)
    version = version_of(path, files.read(path))
    return ConfigFile(
        path,
        "text",
        lambda text: configure(text, entry, version),
        lambda text: remove(text or "", entry.name),
    )


def _template_path(path: str) -> str:
    """Return the path of the template in the directory *path* or beside the config *path*.

    Old releases read the old name only; new ones read it if no file with the new name exists.
    """
    is_generated = os.path.basename(path) == "config.toml"
    if not (is_generated or os.path.isdir(path) or os.path.basename(path) == "containerd"):
        return path
    directory = os.path.dirname(path) if is_generated else path
    new, old = (os.path.join(directory, name) for name in NAMES)
    if os.path.lexists(new) != os.path.lexists(old):
        return new if os.path.lexists(new) else old
    generated = files.read(os.path.join(directory, "config.toml"))
    return new if version_of("", generated) == 3 else old


def _detected(engine: EngineConfig, entry: RuntimeEntry, notes: list[str]) -> FileSet:
    """Return the files for a runtime that the engine detects itself: at most the default."""
    program = DETECTED[entry.name]
    places = [f"{directory}/{program}" for directory in DETECTED_IN]
    if not any(map(os.path.exists, places)):
        raise ConfigError(
            f'{engine.name} looks for the runtime "{entry.name}" in {" and ".join(places)}, but '
            "neither exists",
            "install under the incumbent's names, or choose another --runtime-name",
        )
    notes.append(f'{engine.name} detects the runtime "{entry.name}" itself when it starts')
    return FileSet([whole(engine.more, _default_line(entry))] if entry.is_default else [], notes)


def _default_line(entry: RuntimeEntry) -> str:
    return f"default-runtime: {entry.name}\n"


def files_to_undo(engine: EngineConfig, entry: RuntimeEntry) -> FileSet:
    """Return the files that may contain *entry*."""
    return FileSet([_in_template(engine, entry), whole(engine.more, _default_line(entry))], [])
