# SPDX-License-Identifier: Apache-2.0
"""Which low-level runtime a pass-through reaches, and when only Python may decide."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from launcher.bundles import companion_text, write_companion, write_config
from launcher.conftest import VERSION

from gpuruntime import config

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Bench

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")


def test_runc_is_preferred_without_a_config(bench: Bench) -> None:
    """The incumbent's default order."""
    assert bench.runtime("state", "c1").who == "lowlevel/runc"


def test_crun_follows_when_there_is_no_runc(bench: Bench) -> None:
    """The second default."""
    bench.path("lowlevel/runc").unlink()
    assert bench.runtime("state", "c1").who == "lowlevel/crun"


def test_path_goes_before_the_standard_directories(bench: Bench) -> None:
    """An engine's PATH is the operator's choice."""
    bench.put("standard/runc")
    assert bench.runtime("state", "c1").who == "lowlevel/runc"


@pytest.mark.parametrize("path", [None, "", ":", "/nonexistent:/dev/null"])
def test_standard_directories_are_searched_when_path_has_nothing(
    path: str | None, bench: Bench
) -> None:
    """Engines start us with short environments."""
    bench.put("standard2/runc")
    env = {} if path is None else {"PATH": path}
    assert bench.runtime("state", "c1", env=env).who == "standard2/runc"


def test_first_of_two_paths_counts(bench: Bench) -> None:
    """As in getenv, in Go and in Python: the shim must search where the launcher does."""
    bench.put("other/runc")
    env = {"PATH": str(bench.path("other"))}
    outcome = bench.runtime("state", env=env, habits=("second-path",))
    assert outcome.record.environment.count(b"PATH=/nonexistent") == 1
    assert outcome.who == "other/runc"


@pytest.mark.parametrize("path", ["", ".", "lowlevel", "../lowlevel", ":lowlevel:"])
def test_relative_entries_of_path_are_not_searched(path: str, bench: Bench) -> None:
    """The working directory is often a bundle: its content belongs to the container."""
    bench.put("standard/crun")
    outcome = bench.runtime("state", env={"PATH": path}, cwd=str(bench.path("lowlevel")))
    assert outcome.who == "standard/crun"


@pytest.mark.parametrize("spoil", ["directory", "not-executable", "dangling", "fifo"])
def test_what_is_no_program_is_passed_over(spoil: str, bench: Bench) -> None:
    """A directory named runc on PATH must not end the search."""
    runc = bench.path("lowlevel/runc")
    runc.unlink()
    if spoil == "directory":
        runc.mkdir()
    elif spoil == "not-executable":
        bench.put("lowlevel/runc").chmod(0o644)
    elif spoil == "dangling":
        runc.symlink_to("nothing")
    else:
        os.mkfifo(runc, 0o755)
    bench.put("standard/runc")
    assert bench.runtime("state").who == "standard/runc"


def test_link_to_a_runtime_is_followed(bench: Bench) -> None:
    """Distributions install alternatives as links; argv[0] stays the name that was found."""
    bench.path("lowlevel/runc").unlink()
    bench.path("lowlevel/runc").symlink_to(bench.put("other/youki"))
    outcome = bench.runtime("state")
    assert outcome.who == "other/youki"
    assert outcome.record.arguments[0] == os.fsencode(bench.path("lowlevel/runc"))


@pytest.mark.parametrize("hard", [False, True])
def test_launcher_never_becomes_itself(hard: bool, bench: Bench) -> None:
    """An operator who puts us under the name runc must get runc, not an endless exec."""
    runc = bench.path("lowlevel/runc")
    runc.unlink()
    launcher = bench.workshop.build("plain") / "launcher"
    if hard:
        os.link(launcher, runc)
    else:
        runc.symlink_to(launcher)
    bench.put("standard/runc")
    outcome = bench.runtime("state")
    assert outcome.who == "standard/runc"
    assert outcome.stderr.decode() == (
        f'gpu-container-runtime: the low-level runtime "{runc}" is this program itself: skipped\n'
    )


def test_python_reports_when_only_ourselves_are_left(bench: Bench) -> None:
    """The shim searches again, reports the names that it looked up and exits 127."""
    for name in ("runc", "crun"):
        path = bench.path(f"lowlevel/{name}")
        path.unlink()
        path.symlink_to(bench.workshop.build("plain") / "launcher")
    outcome = bench.runtime("state", "c1")
    assert outcome.who == "python"
    assert outcome.record.arguments[11:] == [b"state", b"c1"]
    assert outcome.stderr.count(b"is this program itself: skipped\n") == 2


@pytest.mark.parametrize("content", ["", "not a program\n", "\x7fELF but not really"])
def test_python_reports_a_runtime_that_cannot_be_executed(content: str, bench: Bench) -> None:
    """With unchanged arguments, including argv[0]."""
    bench.path("lowlevel/runc").write_text(content)
    outcome = bench.runtime("state", "c1")
    assert outcome.who == "python"
    program = bench.workshop.build("plain") / "gpu-container-runtime"
    assert outcome.record.arguments[10:] == [os.fsencode(program), b"state", b"c1"]


def test_name_that_does_not_fit_is_unusable(bench: Bench) -> None:
    """Buffers are fixed; what does not fit is never cut."""
    env = {"PATH": f"/{'x' * 9000}:{bench.path('lowlevel')}"}
    assert bench.runtime("state", env=env).who == "lowlevel/runc"


def test_companion_names_the_candidates(bench: Bench) -> None:
    """The usual case of a configured host: no Python for a start or a kill."""
    path = write_config(bench)
    bench.put("other/youki")
    write_companion(bench, companion_text(path, "absent", "/absent/runc", "youki", "runc"))
    env = bench.environment(PATH=f"{bench.path('other')}:{bench.path('lowlevel')}")
    assert bench.runtime("state", env=env).who == "other/youki"
    assert bench.runtime("create", "c1", env=env).who == "python"


def test_candidate_with_a_slash_is_used_as_it_is(bench: Bench) -> None:
    """Also when it is relative: the operator wrote it so."""
    path = write_config(bench)
    write_companion(bench, companion_text(path, "./crun"))
    outcome = bench.runtime("state", cwd=str(bench.path("lowlevel")))
    assert outcome.who == "lowlevel/crun"
    assert outcome.record.arguments == [b"./crun", b"state"]


def test_config_reached_by_a_link_is_the_linked_file(bench: Bench) -> None:
    """Kubernetes mounts config maps as links; the stamp is that of the file."""
    real = write_config(bench, "other/real.toml")
    path = bench.path("etc/gpuruntime/config.toml")
    path.parent.mkdir()
    path.symlink_to(real)
    write_companion(bench, companion_text(path, "crun"))
    assert bench.runtime("state").who == "lowlevel/crun"


def swap(old: str, new: str) -> Callable[[str], str]:
    """Return a change of the companion's text that must find something to change."""

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


UNUSABLE: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "other-format": swap("gpuruntime-launcher 3", "gpuruntime-launcher 2"),
    "longer-format": swap("gpuruntime-launcher 3", "gpuruntime-launcher 33"),
    "other-version": swap(f" {VERSION}\n", " 0.0.9\n"),
    "longer-version": swap(f" {VERSION}\n", f" {VERSION}1\n"),
    "no-version": swap(f" {VERSION}\n", "\n"),
    "other-path": swap("config /", "config //"),
    "longer-path": swap("config.toml", "config.toml2"),
    "no-config": swap("config ", "konfig "),
    "no-end": swap("end\n", ""),
    "end-without-line-feed": swap("end\n", "end"),
    "text-after-end": swap("end\n", "end\nruntime runc\n"),
    "no-runtime": swap("runtime crun\n", ""),
    "empty-runtime": swap("runtime crun\n", "runtime \n"),
    "second-runtime-empty": swap("runtime crun\n", "runtime crun\nruntime \n"),
    "no-word-on-creates": swap("creates pass\n", ""),
    "unknown-word-on-creates": swap("creates pass\n", "creates maybe\n"),
    "word-after-python": swap("creates pass\n", "creates python\n"),
    "empty-word": swap("word NVIDIA_\n", "word \n"),
    "word-without-line-feed": lambda text: text[: text.index("word ") + 8],
    "runtime-after-words": swap("end\n", "runtime runc\nend\n"),
    "missing-and-config": swap("config ", "missing\nconfig "),
    "unknown-line": swap("runtime crun\n", "runtime crun\nruntimes x\n"),
    "runtime-without-line-feed": lambda text: text[: text.index("crun") + 4],
    "cut": lambda text: text[: len(text) // 2],
    "nul": swap("runtime crun\n", "runtime crun\n\0"),
    "nul-at-the-end": lambda text: f"{text}\0",
    "too-large": swap("runtime crun\n", "runtime crun\n" * 6000),
    "line-feeds-of-windows": lambda text: text.replace("\n", "\r\n"),
    "space-in-front": lambda text: f" {text}",
}


@pytest.mark.parametrize("build", ["plain", "twin"])
@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_malformed_companion_sends_everything_to_python(
    change: Callable[[str], str], build: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """In any doubt Python reads the config itself; the untouched text is the control."""
    if build == "twin":
        request.getfixturevalue("twin")
    text = companion_text(write_config(bench), "crun")
    write_companion(bench, text)
    assert bench.runtime("state", build=build).who == "lowlevel/crun"
    write_companion(bench, change(text))
    outcome = bench.runtime("state", build=build)
    assert outcome.who == "python"
    assert outcome.returncode == 0


@pytest.mark.parametrize(
    "change",
    [
        *("size", "mtime", "mtime-ns", "content", "inode"),
        *("removed-and-earlier", "appeared-earlier"),
    ],
)
def test_stale_companion_sends_everything_to_python(change: str, bench: Bench) -> None:
    """An edited config counts from the next call on, without a restart of anything."""
    path = write_config(bench)
    write_companion(bench, companion_text(path, "crun"))
    assert bench.runtime("state").who == "lowlevel/crun"
    before = path.stat()
    if change == "size":
        path.write_text("# now longer than before\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "mtime":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    elif change == "mtime-ns":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - 1))
    elif change == "content":
        # Size and mtime are restored; ctime cannot be restored.
        while path.stat().st_ctime_ns == before.st_ctime_ns:
            path.write_text(path.read_text().swapcase())
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "inode":
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
        copy.replace(path)
    elif change == "removed-and-earlier":
        path.unlink()
        write_config(bench, "etc/nvidia-container-runtime/config.toml")
    env = bench.environment()
    if change == "appeared-earlier":
        env["GPURUNTIME_CONFIG"] = str(write_config(bench, "other/config.toml"))
    assert bench.runtime("state", env=env).who == "python"


def test_time_before_1970_sends_everything_to_python(bench: Bench) -> None:
    """A sign in the number is not compared, rather than compared wrongly."""
    path = write_config(bench)
    os.utime(path, (-5, -5))
    write_companion(bench, companion_text(path, "crun"))
    assert bench.runtime("state").who == "python"


def test_companion_of_a_removed_config_is_not_used(bench: Bench) -> None:
    """Without any config file the defaults hold, whatever was compiled before."""
    path = write_config(bench)
    write_companion(bench, companion_text(path, "crun"))
    path.unlink()
    assert bench.runtime("state").who == "lowlevel/runc"


@pytest.mark.parametrize(
    "spoil",
    [
        *("absent", "link", "fifo", "directory", "group-writable", "other-writable"),
        *("unreadable-directory", "directory-group-writable", "directory-other-writable"),
        pytest.param("foreign-owner", marks=ROOT_ONLY),
        pytest.param("directory-foreign-owner", marks=ROOT_ONLY),
    ],
)
def test_companion_that_others_may_have_written_is_not_believed(spoil: str, bench: Bench) -> None:
    """It decides which program runs as root."""
    text = companion_text(write_config(bench), "crun")
    path = write_companion(bench, text)
    assert bench.runtime("state").who == "lowlevel/crun"
    if spoil in ("absent", "link", "fifo", "directory"):
        path.rename(path.with_suffix(".real"))
    if spoil == "link":
        path.symlink_to(path.with_suffix(".real"))
    elif spoil == "fifo":
        os.mkfifo(path, 0o644)
    elif spoil == "directory":
        path.mkdir()
    elif spoil == "group-writable":
        path.chmod(0o664)
    elif spoil == "other-writable":
        path.chmod(0o646)
    elif spoil == "foreign-owner":
        os.chown(path, 65534, -1)
    elif spoil == "unreadable-directory":
        path.parent.rename(bench.path("other/run"))
        path.parent.write_text("")
    elif spoil == "directory-group-writable":
        path.parent.chmod(0o775)
    elif spoil == "directory-other-writable":
        path.parent.chmod(0o757)
    elif spoil == "directory-foreign-owner":
        os.chown(path.parent, 65534, -1)
    try:
        assert bench.runtime("state").who == "python"
    finally:
        if path.parent.is_file():
            path.parent.unlink()


SEARCH = [
    ("GPURUNTIME_CONFIG", "other/a.toml"),
    ("NVIDIA_CTK_CONFIG_FILE_PATH", "other/b.toml"),
    ("XDG_CONFIG_HOME", "other/xdg/gpuruntime/config.toml"),
    ("XDG_CONFIG_HOME", "other/xdg/nvidia-container-runtime/config.toml"),
    (None, "etc/gpuruntime/config.toml"),
    (None, "etc/nvidia-container-runtime/config.toml"),
]


def search_environment(bench: Bench) -> dict[str, str]:
    """Return an environment in which every variable of the search is set."""
    return bench.environment(
        GPURUNTIME_CONFIG=str(bench.path("other/a.toml")),
        NVIDIA_CTK_CONFIG_FILE_PATH=str(bench.path("other/b.toml")),
        XDG_CONFIG_HOME=str(bench.path("other/xdg")),
    )


@pytest.mark.parametrize("place", range(len(SEARCH)))
def test_first_existing_config_file_is_the_one(place: int, bench: Bench) -> None:
    """The order of the design, and the same paths that gpuruntime.config makes."""
    env = search_environment(bench)
    listed = config.search_path(env)
    expected = [str(bench.path(name)) for variable, name in SEARCH if variable]
    assert listed[:4] == expected
    assert [path.removeprefix("/") for path in listed[4:]] == [name for _, name in SEARCH[4:]]
    for _, name in SEARCH[place:]:
        write_config(bench, name)
    path = bench.path(SEARCH[place][1])
    write_companion(bench, companion_text(path, "crun"))
    assert bench.runtime("state", env=env).who == "lowlevel/crun"
    path.unlink()
    following = SEARCH[place + 1 :]
    assert bench.runtime("state", env=env).who == ("python" if following else "lowlevel/runc")


@pytest.mark.parametrize("ending", ["", "/"])
def test_directory_of_the_user_is_joined_as_python_joins(ending: str, bench: Bench) -> None:
    """Or the paths differ and every call is slow for ever."""
    env = bench.environment(XDG_CONFIG_HOME=f"{bench.path('other/xdg')}{ending}")
    path = write_config(bench, "other/xdg/gpuruntime/config.toml")
    assert str(path) in config.search_path(env)
    write_companion(bench, companion_text(path, "crun"))
    assert bench.runtime("state", env=env).who == "lowlevel/crun"


def test_empty_variables_count_as_unset(bench: Bench) -> None:
    """As for the incumbent; joined to nothing they would name files of the working directory."""
    write_config(bench, "empty/gpuruntime/config.toml")
    env = bench.environment(
        GPURUNTIME_CONFIG="", NVIDIA_CTK_CONFIG_FILE_PATH="", XDG_CONFIG_HOME=""
    )
    assert bench.runtime("state", env=env).who == "lowlevel/runc"


@pytest.mark.parametrize("doubt", ["loop", "long", "overlong"])
def test_config_that_cannot_be_looked_at_sends_everything_to_python(
    doubt: str, bench: Bench
) -> None:
    """An unreadable config is not an absent one; Python reports it."""
    if doubt == "loop":
        name = str(bench.path("other/loop"))
        os.symlink(name, name)
    else:
        name = "/x" * (2100 if doubt == "long" else 5000)
    outcome = bench.runtime("state", env=bench.environment(GPURUNTIME_CONFIG=name))
    assert outcome.who == "python"
