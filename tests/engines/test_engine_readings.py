# SPDX-License-Identifier: Apache-2.0
"""Config files that are easily misread: real engines and our parser read the same.

Each case is a file that a person could write. If the engine starts with it, our parser reads the
same runtimes or refuses it. A newer engine may accept a file that this engine refuses.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_daemons import configure, daemon, docker_info, output

from gpuruntime.engines import document_edits, files
from gpuruntime.engines.errors import BadFileError
from gpuruntime.errors import ConfigError

RUNTIME = '{"path": "/bin/true"}'


@pytest.fixture
def work() -> Iterator[Path]:
    """Return a directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gr-") as directory:
        yield Path(directory)


def our_reading(path: Path) -> set[str] | None:
    """Return the names of the runtimes that we read in *path*; None if we refuse it."""
    try:
        document = document_edits.parse("json", files.read(str(path)) or "")
        document_edits.check_spelling(document, (("runtimes",),))
    except (BadFileError, ConfigError):
        return None
    return set(document.get("runtimes") or {})


def dockerd_error(work: Path) -> str:
    """Return why dockerd does not start on the config in *work*."""
    log = work / "log"
    command = ("dockerd", "--config-file", work / "daemon.json", "-H", f"unix://{work}/s")
    with daemon(log, *command, "--data-root", work / "data", "--exec-root", work / "exec"):
        for _ in range(200):
            if "unable to configure" in log.read_text():
                break
            subprocess.run(["sleep", "0.1"], check=True)
    return log.read_text()


@pytest.mark.engine("dockerd", "docker", "unshare")
@pytest.mark.parametrize(
    "data",
    [
        f'{{"runtimes": {{"a": {RUNTIME}}}, "runtimes": {{"b": {RUNTIME}}}}}'.encode(),
        f'{{"runtimes": {{"a": {RUNTIME}}}}} {{"runtimes": {{"b": {RUNTIME}}}}}'.encode(),
        f'{{"runtimes": {{"a": {RUNTIME}}}}}\0'.encode(),
        b'{"runtimes": null, "features": null}',
        b'{"runtimes": {"a": {"Path": "/bin/true"}}}',
        b'{"labels": ["a=\xff"]}',
        b"null",
    ],
    ids=["twice", "two objects", "NUL", "null inside", "inner capitals", "no UTF-8", "null"],
)
def test_dockerd_starts_with_what_we_read_or_refuse(work: Path, data: bytes) -> None:
    """Its decoder accepts more than JSON; we never read such a file differently."""
    path = work / "daemon.json"
    path.write_bytes(data)
    runtimes = {name for name in docker_info(work, "d")["Runtimes"] if name in ("a", "b")}
    assert our_reading(path) in (runtimes, None)


@pytest.mark.engine("dockerd", "unshare")
@pytest.mark.parametrize(
    "text",
    [
        f'{{"Runtimes": {{"a": {RUNTIME}}}}}',
        f'{{"runtimes": {{"a": {RUNTIME}}},}}',
        f'// a comment\n{{"runtimes": {{"a": {RUNTIME}}}}}',
        "[]",
        '{"labels": ["a\0"]}',
    ],
    ids=["capitals", "comma", "comment", "list", "NUL in a text"],
)
def test_we_refuse_what_dockerd_refuses(work: Path, text: str) -> None:
    """Otherwise "wrote" would be the last line before a dockerd that does not start."""
    path = work / "daemon.json"
    path.write_text(text)
    assert our_reading(path) is None
    assert "unable to configure" in dockerd_error(work)


@pytest.mark.engine("dockerd", "docker", "unshare")
@pytest.mark.parametrize("text", ["", " \n"])
def test_dockerd_starts_with_an_empty_file_that_we_have_edited(work: Path, text: str) -> None:
    """Before 23.0 dockerd does not start with the empty file."""
    path = work / "daemon.json"
    path.write_text(text)
    configure(work, "--runtime", "docker", "--config", path)
    assert "gpuruntime" in docker_info(work, "d")["Runtimes"]


CRI = "io.containerd.grpc.v1.cri"
X = f'[plugins."{CRI}".containerd.runtimes.x]\nruntime_type = "t"\n'


def runtimes_of(path: Path) -> dict[str, Any]:
    """Return the runtimes of the containerd whose main file is *path*."""
    dump = output("containerd", "--config", path, "config", "dump")
    # A warning may precede the document.
    document = tomllib.loads(dump[dump.index("disabled_plugins") :])
    runtimes: dict[str, Any] = document["plugins"][CRI]["containerd"]["runtimes"]
    return runtimes


@pytest.mark.engine("containerd")
@pytest.mark.parametrize(
    ("imports", "names"),
    [
        ("@/conf.d/*.toml", (".hidden.toml",)),
        ("@/conf.d/*.toml", ("10.toml", "deep")),
        ("@/conf.d/[^9]*.toml", ("10.toml",)),
        ("@/conf.d/[!9]*.toml", ("10.toml",)),
        ("@/conf.d/10.toml", ("10.toml",)),
    ],
)
@pytest.mark.parametrize("version", ["version = 2\n", ""])
def test_containerd_and_we_read_the_same_imports(
    work: Path, imports: str, names: tuple[str, ...], version: str
) -> None:
    """The runtimes of imported files remain beside ours, and no other runtime appears."""
    main = work / "config.toml"
    main.write_text(f'version = 2\nimports = ["{imports}"]\n'.replace("@", str(work)))
    (work / "conf.d").mkdir()
    path = work / "conf.d" / names[0]
    path.write_text(version + X)
    if len(names) > 1:
        path.write_text(f'{version}imports = ["{work}/{names[1]}"]\n')
        (work / names[1]).write_text(version + X)
    before = set(runtimes_of(main))
    configure(work, "--runtime", "containerd", "--config", main)
    after = runtimes_of(main)
    if len(names) == 1:
        assert set(after) == before | {"gpuruntime"}
    else:
        # containerd reads it after our drop-in, whatever its name; a warning says so.
        assert set(after) == before


@pytest.mark.engine("podman", "unshare")
def test_podman_takes_keys_in_any_letter_case_and_we_refuse_others(work: Path) -> None:
    """A second "runtime" in lower case would be the same key to podman."""
    path = work / "containers.conf"
    path.write_text(
        '[Engine]\nCgroup_Manager = "cgroupfs"\nevents_logger = "none"\nRuntime = "x"\n'
        '[Engine.Runtimes]\nx = ["/bin/true"]\n'
    )
    shown = output(
        *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "podman"),
        *("--root", work / "root", "--runroot", work / "run", "--tmpdir", work / "tmp"),
        *("info", "--format", "json"),
        CONTAINERS_CONF=str(path),
    )
    assert json.loads(shown)["host"]["ociRuntime"]["path"] == "/bin/true"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        configure(work, "--runtime", "podman", "--config", path)
    assert b'has the key "Engine"' in caught.value.stderr
