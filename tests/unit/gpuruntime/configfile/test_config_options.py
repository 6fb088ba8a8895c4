# SPDX-License-Identifier: Apache-2.0
"""The table of options, the texts made from it, and how a file is changed."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from gpuruntime import config
from gpuruntime.configfile import check, edit, lines, option_table
from gpuruntime.errors import ConfigError

MODE = "nvidia-container-runtime.mode"


def test_the_start_path_has_the_table_s_defaults() -> None:
    """It cannot afford the table; two lists of defaults must not come apart."""
    assert {option.key: option.default for option in option_table.OPTIONS} == config.DEFAULTS


def test_the_table_is_in_the_order_of_a_file() -> None:
    """A table of TOML is opened once."""
    tables = [option.table for option in option_table.OPTIONS]
    assert len(dict.fromkeys(tables)) == sum(a != b for a, b in zip([None, *tables], tables))


@pytest.mark.parametrize("option", option_table.OPTIONS, ids=lambda option: option.key)
def test_each_option_has_a_default_and_a_sample_that_it_takes(option: option_table.Option) -> None:
    """Whoever takes away a mark of the example must have a file that works."""
    assert option.kind in option_table.KINDS
    for value in (option.default, option.sample):
        if value is not None:
            document: dict[str, Any] = {}
            table = document
            for part in option.key.split(".")[:-1]:
                table = table.setdefault(part, {})
            table[option.name] = value
            values, findings = check.examine(document)
            assert values == {option.key: value}
            assert [f.message for f in findings if f.severity != check.NOTE] == []
            has_note = bool(option.never) and value != option.default
            assert [f.message for f in findings] == (
                [f'"{option.key}" has no effect: {option.never}'] if has_note else []
            )


def test_the_default_file_s_commented_options_are_the_incumbent_s() -> None:
    """Tools look for these samples, and for the others without a mark."""
    text = option_table.example()
    shown = dict(option_table.flatten(tomllib.loads(text)))
    values = {option_table.to_key(path): value for path, value in shown.items()}
    assert values.items() <= config.DEFAULTS.items()
    commented = config.DEFAULTS.keys() - values.keys()
    assert {key for key in commented if not key.startswith("features.")} == {
        "accept-nvidia-visible-devices-as-volume-mounts",
        "accept-nvidia-visible-devices-envvar-when-unprivileged",
        "nvidia-container-cli.debug",
        "nvidia-container-cli.ldcache",
        "nvidia-container-cli.no-cgroups",
        "nvidia-container-cli.no-pivot",
        "nvidia-container-cli.path",
        "nvidia-container-cli.root",
        "nvidia-container-cli.user",
        "nvidia-container-runtime.debug",
        "nvidia-container-runtime.modes.csv.compat-container-root",
        "swarm-resource",
    }
    everything = tomllib.loads(re.sub(r"^#(?=[a-z-]+ = )", "", text, flags=re.MULTILINE))
    keys = {option_table.to_key(path) for path, _ in option_table.flatten(everything)}
    assert keys == config.DEFAULTS.keys()


TEXTS = {
    "empty": "",
    "no end of line": "disable-require = true",
    "default": option_table.example(),
    "dotted": 'nvidia-container-runtime.mode = "cdi" # why\n',
    "dotted in a table": '[nvidia-container-runtime]\nmodes.cdi.default-kind="a/b"\nmode="x"\n',
    "inline": 'nvidia-container-runtime = { mode = "auto", modes = { cdi = {} } }\n',
    "out of order": '[nvidia-container-runtime]\nlog-level="info"\n[other]\na=1\n'
    '[nvidia-container-runtime.modes.cdi]\nspec-dirs=["a"]\n[nvidia-ctk]\npath="x"\n'
    '[nvidia-container-runtime.modes.csv]\nmount-spec-path="z"\n',
    "quoted": '["nvidia-container-runtime"]\n"mode" = \'x\'\n',
    "crlf": '# c\r\ndisable-require = true # k\r\n\r\n[nvidia-container-runtime]\r\n#mode="x"\r\n',
    "deeper table only": "[nvidia-container-runtime.modes.cdi]\nspec-dirs = []\n",
    "deeper table first": "[nvidia-container-runtime.modes]\n[nvidia-container-runtime]\n",
    "unknown": "x = nan\n[[aot]]\na = 1\n[[aot]]\na = 2979-01-01\n",
    "list over lines": '[nvidia-container-runtime]\nruntimes = [\n  "a", # one\n  "b",\n]\n',
    "text like a sample": 'a = """\n#disable-require = false\n[features]\n"""\n',
}
SETS = {
    f"{MODE}=legacy": "legacy",
    "disable-require=false": False,
    "features.disable-imex-channel-creation=1": True,
    "nvidia-container-runtime.modes.cdi.spec-dirs=/a:/b": ["/a", "/b"],
    "nvidia-container-runtime.modes.legacy.cuda-compat-mode=hook": "hook",
    'nvidia-ctk.path=/\u00e9"\x7f\\': '/\u00e9"\x7f\\',
}


@pytest.mark.parametrize("argument", SETS)
@pytest.mark.parametrize("name", TEXTS)
def test_one_option_changes_and_nothing_else(name: str, argument: str) -> None:
    """Whatever way the file is written: other values, comments and their order stay."""
    text = TEXTS[name]
    option, value = edit.parse(argument)
    changed = edit.apply(text, option, value)

    def values(text: str) -> dict[str, Any]:
        document = tomllib.loads(text, parse_float=str)
        return {option_table.to_key(path): item for path, item in option_table.flatten(document)}

    assert values(changed) == {**values(text), option.key: SETS[argument]}
    pattern = rf"[ \t]*#[^\r\n]*(?<!#{option.name}=\"x\")"
    if name != "default":
        assert re.findall(pattern, changed) == re.findall(pattern, text) or "crlf" in name
        assert len(changed.splitlines()) <= len(text.splitlines()) + 3
    # Taken back, a feature leaves no trace but its table.
    if option.kind == "optional":
        without = edit.apply(changed, option, None)
        assert values(without) == {k: v for k, v in values(text).items() if k != option.key}


def test_an_option_goes_where_its_sample_stands() -> None:
    """Even with the sample's own value, which the incumbent took for "leave it commented"."""
    argument = "nvidia-container-runtime.debug=/var/log/nvidia-container-runtime.log"
    text = option_table.example()
    changed = edit.apply(text, *edit.parse(argument))
    line = 'debug = "/var/log/nvidia-container-runtime.log"\n'
    assert changed == text.replace(f"#{line}", line)
    assert edit.apply(changed, *edit.parse(argument)) == changed


def test_line_ends_stay_what_they_are() -> None:
    """A file of two kinds is a nuisance in every editor."""
    option, value = edit.parse("features.ignore-imex-channel-requests")
    changed = edit.apply(TEXTS["crlf"], option, value)
    assert changed.count("\n") == changed.count("\r\n") > TEXTS["crlf"].count("\n")
    assert "disable-require = true # k\r\n" in changed


@pytest.mark.parametrize("value", ["1", "t", "T", "TRUE", "true", "True"])
def test_what_is_true(value: str) -> None:
    """The incumbent's words, and no others."""
    assert edit.parse(f"disable-require={value}")[1] is True
    assert edit.parse("disable-require")[1] is True
    assert edit.parse("features.allow-ldconfig-from-container")[1] is True


@pytest.mark.parametrize("value", ["0", "f", "F", "FALSE", "false", "False"])
def test_what_is_false(value: str) -> None:
    """The incumbent's words, and no others."""
    assert edit.parse(f"features.allow-ldconfig-from-container={value}")[1] is False


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("features.allow-ldconfig-from-container=nil", None),
        ("nvidia-container-cli.root=a=b,c:d", "a=b,c:d"),
        ("nvidia-container-cli.root=", ""),
        ("nvidia-container-runtime.runtimes=a:b,c", ["a", "b,c"]),
        ("nvidia-container-runtime.runtimes=a,b", ["a", "b"]),
        ("nvidia-container-runtime.runtimes=a", ["a"]),
        ("nvidia-container-cli.environment=A=1,B=2", ["A=1", "B=2"]),
        ("discovery-timeout=5", 5),
    ],
)
def test_what_a_value_becomes(argument: str, expected: object) -> None:
    """Scripts written for the incumbent count on it."""
    assert edit.parse(argument)[1] == expected


def test_another_separator() -> None:
    """For lists of paths with colons."""
    argument = "nvidia-container-runtime.runtimes=a:b;c"
    assert edit.parse(argument, ";")[1] == ["a:b", "c"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("no-such=1", 'invalid config option "no-such"'),
        ("", 'invalid config option ""'),
        ("=1", 'invalid config option ""'),
        ("nvidia-container-cli=1", "it is a table"),
        ("nvidia-container-runtime.modes", "it is a table"),
        ("nvidia-container-runtime.mod=cdi", "does not exist"),
        ("disable-require=", "invalid value"),
        ("disable-require=yes", "invalid value"),
        ("disable-require=nil", "invalid value"),
        (MODE, "no value"),
        ("nvidia-container-runtime.runtimes", "no value"),
        ("discovery-timeout=1s", "invalid value"),
        ("discovery-timeout=\u0665", "invalid value"),
        ("nvidia-container-cli.root=\udcff", "not valid UTF-8"),
    ],
)
def test_what_cannot_be_set(argument: str, said: str) -> None:
    """Each names what is wrong and what to do."""
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        edit.parse(argument)
    assert error.value.hint


def test_a_table_that_is_none_is_not_overwritten() -> None:
    """What stands there means something to whoever wrote it."""
    with pytest.raises(ConfigError, match='"nvidia-container-cli" is not a table'):
        edit.apply("nvidia-container-cli = 3\n", *edit.parse(f"{'nvidia-container-cli'}.root=/"))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("nvidia-container-runtime.log-levle", "nvidia-container-runtime.log-level"),
        ("nvidia-container-runtime.missing-gpu", "missing-gpu"),
        ("root", "nvidia-container-cli.root"),
        ("nvidia-container-runtime-hook.path2", "nvidia-container-runtime-hook.path"),
        ("zzz.qqq", None),
        ("x" * 10_000, None),
    ],
)
def test_the_nearest_key(key: str, expected: str | None) -> None:
    """The same name in another table is nearer than another name."""
    assert option_table.nearest(key) == expected


def test_lines_of_paths() -> None:
    """An editor jumps there."""
    text = (
        'a = """\nb = 1\n"""  # [c]\n"x y".z = [ # d = 1\n  "#", [1],\n]\n[c . "d.e"]\n'
        "f = { g = 1 }\n[[h]]\ni = ''''k = 1'''\n[[h]]\ni = ''\nj = \"\\\"\"\nk = 1"
    )
    tomllib.loads(text)
    assert lines.lines(text) == {
        ("a",): 1,
        ("x y", "z"): 4,
        ("c", "d.e"): 7,
        ("c", "d.e", "f"): 8,
        ("h",): 9,
        ("h", "i"): 10,
        ("h", "j"): 13,
        ("h", "k"): 14,
    }
    assert lines.line_of(("c", "d.e", "f", "g"), lines.lines(text)) == 8
    assert lines.line_of(("c",), lines.lines(text)) == 7
