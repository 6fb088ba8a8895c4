# SPDX-License-Identifier: Apache-2.0
"""Patterns match what Go's filepath.Match and filepath.Glob match."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuruntime.engines import go_glob


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("/a/*.toml", "/a/b.toml", True),
        ("/a/*.toml", "/a/.toml", True),
        ("/a/*.toml", "/a/.hidden.toml", True),
        ("/a/*.toml", "/a/b/c.toml", False),
        ("/a/*.toml", "/a/b.toml\n", False),
        ("/*/b", "/a/b", True),
        ("/a/?", "/a/b", True),
        ("/a/?", "/a/bc", False),
        ("/a/[bc]", "/a/c", True),
        ("/a/[b-d]", "/a/c", True),
        ("/a/[^b-d]", "/a/c", False),
        ("/a/[^b-d]", "/a/e", True),
        # "!" is a character like others.
        ("/a/[!b]", "/a/!", True),
        ("/a/[!b]", "/a/c", False),
        (r"/a/\*", "/a/*", True),
        (r"/a/\*", "/a/b", False),
        (r"/a/[\]]", "/a/]", True),
        (r"/a/[\^]", "/a/^", True),
        ("/a/[d-b]", "/a/c", False),
        ("/a/{b,c}", "/a/b", False),
        ("/a/(b)+", "/a/(b)+", True),
        ("/a/é*", "/a/éb", True),
    ],
)
def test_a_pattern_matches_a_path(pattern: str, path: str, *, is_match: bool) -> None:
    """The same one name for one name."""
    assert go_glob.is_match(pattern, path) == is_match


@pytest.mark.parametrize("pattern", ["/a/[", "/a/[]", "/a/[]a]", "/a/[-]", "/a/[a-]", "/a/\\"])
def test_a_malformed_pattern_is_an_error(pattern: str) -> None:
    """Containerd does not start with it."""
    with pytest.raises(ValueError, match="not a valid pattern"):
        go_glob.check(pattern)


def test_the_files_of_a_pattern_are_sorted_in_each_directory(tmp_path: Path) -> None:
    """Hidden files are among them; what cannot be read has no match."""
    for name in ("b/2.toml", "b/1.toml", "a/3.toml", "a/.0.toml", "a/x.conf", "file.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    paths = go_glob.paths(f"{tmp_path}/*/*.toml")
    names = [str(Path(path).relative_to(tmp_path)) for path in paths]
    assert names == ["a/.0.toml", "a/3.toml", "b/1.toml", "b/2.toml"]
    assert go_glob.paths(f"{tmp_path}/file.toml/*") == []
    assert go_glob.paths(f"{tmp_path}/a/x.conf") == [f"{tmp_path}/a/x.conf"]
