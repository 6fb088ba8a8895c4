# SPDX-License-Identifier: Apache-2.0
"""Configure an engine, and undo it: from the planned content of its files to the files on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuruntime.engines import edits, files, records
from gpuruntime.engines.edits import Kind
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.records import Record

Make = Callable[[str | None], str | None]


@dataclass(frozen=True, slots=True)
class Target:
    """A file, and how it is made of what is there.

    *configure* adds the runtime, *remove* takes it out without knowing what was before. *is_ours*:
    the file is made anew each time, of what others have in it.
    """

    path: str
    kind: Kind
    configure: Make
    remove: Make
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """The file *path*, its text before and after (None: no file), and what an undo needs."""

    path: str
    before: str | None
    after: str | None
    original: str | None = None
    directories: tuple[str, ...] = ()

    def diff(self) -> str:
        """Return the change as a unified diff, "" if it is none."""
        return edits.difference(self.before, self.after, self.path)


def plan(targets: Sequence[Target], state: str) -> list[Change]:
    """Return what is to be done to the files so that the runtime is configured; reads only."""
    changes = []
    for target in targets:
        before = files.read(target.path)
        record = records.load(state, target.path)
        original = before
        try:
            if record is not None:
                original = edits.without(target.kind, before, record.original, record.written)
            after = target.configure(original if target.is_ours else before)
            if edits.is_same(target.kind, before, after):
                after = before
        except BadFileError as error:
            raise error.of(target.path) from error
        directories = record.directories if record else ()
        changes.append(Change(target.path, before, after, original, directories))
    return changes


def plan_undo(targets: Sequence[Target], state: str) -> list[Change]:
    """Return what is to be done to the files so that nothing of ours is in them; reads only.

    Where there is a record of one of them, those without were right as they were, and are not
    ours to change.
    """
    changes = []
    known = {target.path: records.load(state, target.path) for target in targets}
    has_records = any(record is not None for record in known.values())
    for target in reversed(targets):
        before = files.read(target.path)
        record = known[target.path]
        try:
            if record is not None:
                after = edits.without(target.kind, before, record.original, record.written)
            elif before is None or has_records:
                after = before
            else:
                after = target.remove(before)
        except BadFileError as error:
            raise error.of(target.path) from error
        directories = record.directories if record else ()
        changes.append(Change(target.path, before, after, None, directories))
    return changes


def configure(changes: Sequence[Change], state: str) -> list[str]:
    """Make *changes*, and return what was done to each file: "wrote" or "unchanged".

    The record of a file is there before the file is: whatever happens between, an undo is right.
    """
    done = []
    for change in changes:
        if change.after == change.before or change.after is None:
            done.append(f'unchanged "{change.path}"')
            continue
        record = Record(
            files.resolve(change.path), change.original, change.after, change.directories
        )
        made = files.missing_directories(change.path)
        if made:
            record = Record(
                record.path, record.original, record.written, (*change.directories, *made)
            )
        records.store(state, record)
        files.replace(change.path, change.after)
        done.append(f'wrote "{change.path}"')
    return done


def undo(changes: Sequence[Change], state: str) -> list[str]:
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
            records.forget(state, change.path)
    return done
