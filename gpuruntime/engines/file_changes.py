# SPDX-License-Identifier: Apache-2.0
"""Configure an engine, and undo it: what changes in its files, and the changes made on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gpuruntime.engines import document_edits, files, undo_records
from gpuruntime.engines.config_files import ConfigFile
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.undo_records import UndoRecord


@dataclass(frozen=True, slots=True)
class FileChange:
    """The file *path*, its text before and after (None: no file), and what an undo needs."""

    path: str
    before: str | None
    after: str | None
    original: str | None = None
    directories: tuple[str, ...] = ()

    def diff(self) -> str:
        """Return the change as a unified diff, "" if it is none."""
        return document_edits.difference(self.before, self.after, self.path)


def to_configure(config_files: Sequence[ConfigFile], state: str) -> list[FileChange]:
    """Return what is to be done to the files so that the runtime is configured; reads only."""
    changes = []
    for config_file in config_files:
        before = files.read(config_file.path)
        record = undo_records.load(state, config_file.path)
        original = before
        try:
            if record is not None:
                original = document_edits.without(
                    config_file.kind, before, record.original, record.written
                )
            after = config_file.configure(original if config_file.is_ours else before)
            if document_edits.is_same(config_file.kind, before, after):
                after = before
        except BadFileError as error:
            raise error.of(config_file.path) from error
        directories = record.directories if record else ()
        changes.append(FileChange(config_file.path, before, after, original, directories))
    return changes


def to_undo(config_files: Sequence[ConfigFile], state: str) -> list[FileChange]:
    """Return what is to be done to the files so that nothing of ours is in them; reads only.

    Where there is a record of one of them, those without were right as they were, and are not
    ours to change.
    """
    changes = []
    records_by_path = {
        config_file.path: undo_records.load(state, config_file.path)
        for config_file in config_files
    }
    has_records = any(record is not None for record in records_by_path.values())
    for config_file in reversed(config_files):
        before = files.read(config_file.path)
        record = records_by_path[config_file.path]
        try:
            if record is not None:
                after = document_edits.without(
                    config_file.kind, before, record.original, record.written
                )
            elif before is None or has_records:
                after = before
            else:
                after = config_file.remove(before)
        except BadFileError as error:
            raise error.of(config_file.path) from error
        directories = record.directories if record else ()
        changes.append(FileChange(config_file.path, before, after, None, directories))
    return changes


def configure(changes: Sequence[FileChange], state: str) -> list[str]:
    """Make *changes*, and return what was done to each file: "wrote" or "unchanged".

    The record of a file is there before the file is: whatever happens between, an undo is right.
    """
    done = []
    for change in changes:
        if change.after == change.before or change.after is None:
            done.append(f'unchanged "{change.path}"')
            continue
        record = UndoRecord(
            files.resolve(change.path), change.original, change.after, change.directories
        )
        made = files.missing_directories(change.path)
        if made:
            record = UndoRecord(
                record.path, record.original, record.written, (*change.directories, *made)
            )
        undo_records.store(state, record)
        files.replace(change.path, change.after)
        done.append(f'wrote "{change.path}"')
    return done


def undo(changes: Sequence[FileChange], state: str) -> list[str]:
    """Make *changes* of an undo, and return what was done to each file."""
    done = []
    for change in changes:
        if change.after == change.before:
            done.append(f'unchanged "{change.path}"')
        elif change.after is None:
            files.remove(change.path, list(change.directories))
            done.append(f'removed "{change.path}"')
        else:
            files.replace(change.path, change.after)
            done.append(f'wrote "{change.path}"')
        if os.path.isdir(state):
            undo_records.forget(state, change.path)
    return done
