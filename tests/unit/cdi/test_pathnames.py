# SPDX-License-Identifier: Apache-2.0
"""What cdi.pathnames makes of a path is what posixpath makes of it."""

from __future__ import annotations

import posixpath

import pytest
from effort import tries
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdi import pathnames

PATHS = st.text(alphabet="ab./", max_size=12) | st.text(max_size=6)


@pytest.mark.property
@settings(max_examples=tries(2000), deadline=None)
@given(path=PATHS, name=PATHS)
@example(path="", name="")
@example(path="//", name="/a")
@example(path="///a//b/", name="..")
@example(path="a//", name="a/")
@example(path="../../a/../..", name="./")
def test_paths_are_taken_apart_as_by_the_standard_library(path: str, name: str) -> None:
    """Both are used for the same paths, by code that runs at other times."""
    assert pathnames.split(path) == posixpath.split(path)
    assert pathnames.dirname(path) == posixpath.dirname(path)
    assert pathnames.basename(path) == posixpath.basename(path)
    assert pathnames.join(path, name) == posixpath.join(path, name)
    if "\0" not in path:
        assert pathnames.normpath(path) == posixpath.normpath(path)
