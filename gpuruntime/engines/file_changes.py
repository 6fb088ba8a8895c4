# SPDX-License-Identifier: Apache-2.0
"""Configure an engine and undo that: compute the changes to its files, and write them.

A file can have several runtimes of ours, which share some settings: an import, CDI, a copy of the
engine's settings. The undo of one runtime therefore computes the file as if only the others had
been configured, and applies the difference to the current file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpuruntime.engines import document_edits, files, undo_records
from gpuruntime.engines.config_files import ConfigFile
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import Registration
from gpuruntime.engines.undo_records import UndoRecord


@dataclass(frozen=True, slots=True)
class FileChange:
    """The file *path*, its text before and after (None: no file), and its undo record."""

    path: str
    before: str | None
    after: str | None
    record_before: UndoRecord | None = None
    record_after: UndoRecord | None = None

    def diff(self) -> str:
        """Return the change as a unified diff, "" if there is none."""
        return document_edits.difference(self.before, self.after, self.path)


def to_configure(config_files: Sequence[ConfigFile], state: str) -> list[FileChange]:
    """Return the changes to the files that register the runtime; nothing is written."""
    changes = []
    for config_file in config_files:
        try:
            changes.append(_configured(config_file, undo_records.load(state, config_file.path)))
        except BadFileError as error:
            raise error.of(config_file.path) from error
    return changes


def _configured(config_file: ConfigFile, record: UndoRecord | None) -> FileChange:
    before = original = files.read(config_file.path)
    others = _others(config_file, record)
    if record is not None:
        original = document_edits.without(
            config_file.kind, before, record.original, record.written
        )
    after = before
    if config_file.is_generated:
        after = original
        for registration in others:
            after = config_file.configure_for(registration)(after)
    after = config_file.configure(after)
    runtimes = (*others, *config_file.registrations)
    if document_edits.is_same(config_file.kind, before, after) or after is None:
        record_after = record and dataclasses.replace(record, runtimes=runtimes)
        return FileChange(config_file.path, before, before, record, record_after)
    directories = record.directories if record else ()
    path = files.resolve(config_file.path)
    record_after = UndoRecord(path, original, after, directories, runtimes)
    return FileChange(config_file.path, before, after, record, record_after)


def _others(config_file: ConfigFile, record: UndoRecord | None) -> tuple[Registration, ...]:
    """Return the registrations in *record* that are not those of *config_file*."""
    keys = {registration.key for registration in config_file.registrations}
    runtimes = record.runtimes if record else ()
    return tuple(registration for registration in runtimes if registration.key not in keys)


def to_undo(config_files: Sequence[ConfigFile], state: str) -> list[FileChange]:
    """Return the changes to the files that remove the runtime; nothing is written.

    If the record of one file has the runtime, files whose records do not have it are left alone:
    any runtime of that name in them was not added by us.
    """
    records = {
        config_file.path: undo_records.load(state, config_file.path)
        for config_file in config_files
    }
    is_recorded = any(_has_runtime(file, records[file.path]) for file in config_files)
    changes: list[FileChange] = []
    for config_file in config_files:
        removed = [change.path for change in changes if change.after is None]
        try:
            change = _undone(config_file, records, removed, is_recorded=is_recorded)
        except BadFileError as error:
            raise error.of(config_file.path) from error
        changes.append(change)
    # A file that imports another is changed before the imported file is removed.
    return changes[::-1]


def _undone(
    config_file: ConfigFile,
    records: Mapping[str, UndoRecord | None],
    removed: Collection[str],
    *,
    is_recorded: bool,
) -> FileChange:
    path = config_file.path
    record = records[path]
    before = files.read(path)
    if record is not None and _has_runtime(config_file, record):
        return _undone_by_record(config_file, record, before, removed)
    # A generated file can have a copy of the runtime, taken from another file.
    is_copy = record is not None and config_file.is_generated
    if before is None or (is_recorded and not is_copy):
        return FileChange(path, before, before, record, record)
    if record is None:
        return FileChange(path, before, config_file.remove(before))
    original = record.original
    record_after = dataclasses.replace(
        record,
        original=original if original is None else config_file.remove(original),
        written=config_file.remove(record.written) or "",
    )
    return FileChange(path, before, config_file.remove(before), record, record_after)


def _has_runtime(config_file: ConfigFile, record: UndoRecord | None) -> bool:
    """Return whether *record* has one of the runtimes that an undo of *config_file* removes.

    A record without runtimes is from an earlier version, where one record covered all runtimes.
    """
    if record is None:
        return False
    return not record.runtimes or len(_others(config_file, record)) < len(record.runtimes)


def _undone_by_record(
    config_file: ConfigFile, record: UndoRecord, before: str | None, removed: Collection[str]
) -> FileChange:
    others = _others(config_file, record)
    written = record.original
    for registration in others:
        written = config_file.configure_for(registration)(written)
    is_needed = not others and config_file.is_needed(removed)
    if is_needed:
        written = config_file.configure(written)
    elif others and config_file.is_generated:
        # The others may have copied the runtime from the settings of the engine.
        written = config_file.remove(written)
    after = document_edits.without(config_file.kind, before, written, record.written)
    record_after = None
    if (others or is_needed) and written is not None:
        record_after = dataclasses.replace(record, written=written, runtimes=others)
    return FileChange(config_file.path, before, after, record, record_after)


def configure(changes: Sequence[FileChange], state: str) -> list[str]:
    """Apply *changes*, and return a line for each file: "wrote" or "unchanged", and its path.

    The record is written before the file, so that an undo works after an interruption.
    """
    lines = []
    for change in changes:
        record = change.record_after
        if record is not None and record != change.record_before:
            created = files.missing_directories(change.path)
            directories = (*record.directories, *created)
            undo_records.store(state, dataclasses.replace(record, directories=directories))
        if change.after == change.before or change.after is None:
            lines.append(f'unchanged "{change.path}"')
        else:
            files.replace(change.path, change.after)
            lines.append(f'wrote "{change.path}"')
    return lines


def undo(changes: Sequence[FileChange], state: str) -> list[str]:
    """Apply *changes* of an undo, and return a line for each file."""
    lines = []
    for change in changes:
        directories = change.record_before.directories if change.record_before else ()
        if change.after is None and (change.before is not None or directories):
            # Also without the file: an undo that was killed can have left the directories.
            files.remove(change.path, list(directories))
            word = "unchanged" if change.before is None else "removed"
            lines.append(f'{word} "{change.path}"')
        elif change.after == change.before:
            lines.append(f'unchanged "{change.path}"')
        elif change.after is not None:
            files.replace(change.path, change.after)
            lines.append(f'wrote "{change.path}"')
        if change.record_after is None:
            undo_records.forget(state, change.path)
        elif change.record_after != change.record_before:
            undo_records.store(state, change.record_after)
    return lines
