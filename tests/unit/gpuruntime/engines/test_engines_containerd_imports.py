# SPDX-License-Identifier: Apache-2.0
"""The files around our drop-in, in the order in which containerd reads them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gpuruntime.engines import containerd_imports, file_sets
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ConfigError

ENTRY = RuntimeEntry("gpuruntime", "/usr/bin/gpu-container-runtime")
CRI = '[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "{}"\n'


def around(place: Path, main: str, **files: str) -> tuple[list[str], list[str]]:
    """Return the names around 99-x.toml of a main file and other *files* in *place*."""
    (place / "conf.d").mkdir(exist_ok=True)
    for name, text in files.items():
        (place / "conf.d" / f"{name}.toml").write_text(text.replace("@", str(place)))
    text = main.replace("@", str(place))
    before, after = containerd_imports.around(
        tomllib.loads(text), str(place / "config.toml"), str(place / "conf.d/99-x.toml")
    )
    return [Path(path).name for path in before], [Path(path).name for path in after]


EMPTY = "version = 2\n"


@pytest.mark.parametrize(
    ("main", "files", "names"),
    [
        ('imports = ["@/conf.d/*.toml"]', {"10": "", "zz": ""}, (["10.toml"], ["zz.toml"])),
        # Without an import of ours there will be one, which has the neighbours too.
        ("", {"10": "", "zz": ""}, (["10.toml"], ["zz.toml"])),
        ('imports = ["@/conf.d/zz.toml"]', {"zz": ""}, (["zz.toml"], [])),
        # Files that an imported file imports come after all those that the main file imports.
        (
            'imports = ["@/conf.d/*.toml"]',
            {"10": 'imports = ["@/deep.toml"]'},
            (["10.toml"], ["deep.toml"]),
        ),
        # A circle is read once.
        (
            'imports = ["@/conf.d/*.toml"]',
            {"10": 'imports = ["@/conf.d/10.toml", "@/config.toml"]'},
            (["10.toml"], []),
        ),
        # Without "*" it is a name, whatever else is in it.
        ('imports = ["@/conf.d/1?.toml"]', {"10": ""}, (["1?.toml", "10.toml"], [])),
        ('imports = ["@/conf.d/*.toml"]', {".10": ""}, ([".10.toml"], [])),
        ('imports = ["@/conf.d/[!1]*.toml"]', {"10": "", "20": ""}, (["10.toml", "20.toml"], [])),
    ],
)
def test_files_are_read_in_this_order(
    tmp_path: Path, main: str, files: dict[str, str], names: tuple[list[str], list[str]]
) -> None:
    """The last file that has settings of the CRI plugin is the one that counts."""
    texts = {name: EMPTY + text for name, text in files.items()}
    assert around(tmp_path, EMPTY + main, **texts) == names


def place_in(directory: Path) -> EngineConfig:
    """Return a containerd in *directory* whose main file imports conf.d."""
    path = directory / "config.toml"
    path.write_text(f'version = 2\nimports = ["{directory}/conf.d/*.toml"]\n')
    (directory / "conf.d").mkdir()
    drop_in = str(directory / "conf.d/99-x.toml")
    return EngineConfig("containerd", "containerd", str(path), drop_in, "")


def test_an_import_without_a_version_has_that_of_the_main_file(tmp_path: Path) -> None:
    """Its settings are in force, so our copy must have them."""
    place = place_in(tmp_path)
    (tmp_path / "conf.d/10.toml").write_text(CRI.format("pause:9"))
    drop_in, _ = file_sets.to_configure(place, ENTRY).files
    assert "pause:9" in str(drop_in.configure(None))


def test_a_malformed_import_of_an_imported_file_is_named(tmp_path: Path) -> None:
    """By the file that it is in."""
    place = place_in(tmp_path)
    (tmp_path / "conf.d/10.toml").write_text('imports = ["/x/[*"]\n')
    with pytest.raises(ConfigError, match=r"10\.toml\" has an import that is not valid"):
        file_sets.to_configure(place, ENTRY)


@pytest.mark.parametrize(
    ("drop_in", "entry"),
    [
        ("/etc/x/99.toml", "/etc/x/*.toml"),
        ("/etc/x/99.conf", "/etc/x/99.conf"),
        ("/etc/[x]/99.toml", "/etc/[x]/99.toml"),
    ],
)
def test_a_drop_in_that_a_pattern_would_not_match_is_imported_by_name(
    drop_in: str, entry: str
) -> None:
    """Otherwise containerd would not read it."""
    assert containerd_imports.added({}, "/etc/x/config.toml", drop_in, 2) == [
        (("imports",), [entry]),
        (("version",), 2),
    ]
