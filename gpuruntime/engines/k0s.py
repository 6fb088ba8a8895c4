# SPDX-License-Identifier: Apache-2.0
"""The config files of k0s: a drop-in that k0s merges, or the files of a plain containerd."""

from __future__ import annotations

from gpuruntime.engines import containerd, containerd_document, files, toml_text
from gpuruntime.engines.config_files import FileSet, drop_in
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.document_edits import table_at
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import RuntimeEntry

MANAGED = "# k0s_managed=true"
GENERATED_CRI = "/run/k0s/containerd-cri.toml"


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine*, a k0s; may raise BadFileError."""
    main = files.read(engine.config)
    if main is not None and MANAGED not in main:
        return containerd.files_of(engine, entry, source)
    # k0s merges the drop-in into its generated config, so no settings need be copied.
    try:
        generated = toml_text.parse(source or files.read(GENERATED_CRI) or "")
    except BadFileError as error:
        raise error.of(GENERATED_CRI) from error
    effective_document = generated or toml_text.parse(main or "")
    version = (
        containerd_document.version_of(effective_document)
        if "version" in effective_document
        else containerd_document.NEW_VERSION
    )
    cri = table_at(generated, containerd_document.plugin_path(version))
    target = drop_in(
        engine.drop_in,
        {"version": version},
        lambda document: containerd_document.configure(document, entry, version, cri),
        lambda document: containerd_document.remove(document, entry.name),
    )
    return FileSet([target], [])
