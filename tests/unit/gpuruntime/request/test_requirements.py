# SPDX-License-Identifier: Apache-2.0
"""What images require of the host: who is refused, who is not, and what the refused are told."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuruntime.errors import RequestError, escape
from gpuruntime.request.requirements import Facts, check, is_true, of_cuda_version

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "requirements.md"
TESLA = Facts("12.4", "550.54.14", ((0, "8.0", "tesla"),))
MIXED = Facts("12.4", "550.54.14", ((0, "8.0", "tesla"), (3, "8.9", "geforce")))
NO_GPU = Facts("12.4", "550.54.14")
UNKNOWN = Facts()
# As images of CUDA 12.4 have it, but for the number of brands.
IMAGE = (
    "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=unknown,driver>=535,driver<536 "
    "brand=grid,driver>=550,driver<551"
)
MET, UNMET, UNDECIDED, INVALID = "met", "unmet", "undecided", "invalid"


def outcome_of(message: str) -> str:
    """Return which of the two errors it is."""
    assert len(message) < 1200
    if message.startswith("invalid constraint: "):
        return INVALID
    assert message.startswith("requirements not met: unsatisfied condition: ")
    return UNMET


def outcome(facts: Facts, *requirements: str) -> str:
    """Return what becomes of the requirements on a host."""
    try:
        sentences = check(requirements, facts)
    except RequestError as error:
        return outcome_of(error.message)
    return UNDECIDED if any("cannot be checked" in sentence for sentence in sentences) else MET


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        # Nothing at all, and blanks.
        ("", MET),
        (" ", MET),
        (" \t\n ", MET),
        (",", MET),
        (", ,,", MET),
        ("cuda>=12.4,", MET),
        (",cuda>=12.4", MET),
        (",,cuda>=12.8,,", UNMET),
        ("  cuda>=12.4  ", MET),
        ("cuda>=12.8   cuda>=12.4", MET),
        ("cuda>=12.8\tcuda>=12.4", MET),
        # A term of nothing is no alternative.
        ("cuda>=12.8 ,", UNMET),
        # Each operator: below, at and above what is there.
        ("cuda>=12.3", MET),
        ("cuda>=12.4", MET),
        ("cuda>=12.5", UNMET),
        ("cuda<=12.3", UNMET),
        ("cuda<=12.4", MET),
        ("cuda<=12.5", MET),
        ("cuda=12.3", UNMET),
        ("cuda=12.4", MET),
        ("cuda=12.5", UNMET),
        ("cuda!=12.3", MET),
        ("cuda!=12.4", UNMET),
        ("cuda!=12.5", MET),
        ("cuda<12.3", UNMET),
        ("cuda<12.4", UNMET),
        ("cuda<12.5", MET),
        ("cuda>12.3", MET),
        ("cuda>12.4", UNMET),
        ("cuda>12.5", UNMET),
        # Versions are numbers, part by part.
        ("cuda>=9.2", MET),
        ("cuda>=12.10", UNMET),
        ("cuda<100", MET),
        ("cuda>=12", MET),
        ("cuda>12", MET),
        ("cuda=12", UNMET),
        ("cuda=12.4.0", MET),
        ("cuda=12.4.0.0", MET),
        ("cuda=12.04", MET),
        ("cuda>=12.4.1", UNMET),
        ("cuda>=v12.4", MET),
        ("cuda>=v12.8", UNMET),
        ("cuda>=0", MET),
        ("cuda<4294967295.4294967295", MET),
        ("driver>=550", MET),
        ("driver>=550.54.14", MET),
        ("driver>=550.54.15", UNMET),
        ("driver>=550.54.9", MET),
        ("driver<551", MET),
        ("driver>=535.104.05", MET),
        ("driver=550", UNMET),
        ("driver!=550", MET),
        ("arch>=8.0", MET),
        ("arch=8", MET),
        ("arch>=9", UNMET),
        ("arch<8", UNMET),
        # Brands.
        ("brand=tesla", MET),
        ("brand=Tesla", MET),
        ("brand=TESLA", MET),
        ("brand!=tesla", UNMET),
        ("brand=geforce", UNMET),
        ("brand!=geforce", MET),
        ("brand=unknown", UNMET),
        # Names of properties.
        ("CUDA>=12.4", MET),
        ("Cuda>=12.8", UNMET),
        ("DRIVER>=550,Arch>=8,BRAND=tesla", MET),
        # Both, either.
        ("cuda>=12.4,driver>=550", MET),
        ("cuda>=12.4,driver>=560", UNMET),
        ("cuda>=12.8,driver>=550", UNMET),
        ("cuda>=12.8 driver>=550", MET),
        ("driver>=550 cuda>=12.8", MET),
        ("cuda>=12.8 driver>=560", UNMET),
        ("cuda>=12.8,driver>=550 brand=tesla,arch>=8", MET),
        ("cuda>=12.8,driver>=550 brand=tesla,arch>=9", UNMET),
        ("cuda>=12.4,cuda<12.4", UNMET),
        ("cuda>=12.4, cuda<12.4", MET),
        # What no one knows counts neither for nor against.
        ("gpus>=8", MET),
        ("gpus>=8,cuda>=12.4", MET),
        ("gpus>=8,cuda>=12.8", UNMET),
        ("gpus>=8 cuda>=12.8", UNMET),
        ("cuda>=12.8 gpus>=8", UNMET),
        ("gpus>=8 cuda>=12.4", MET),
        ("gpus=>=<!", MET),
        ("gpus=", MET),
        ("cud>=99", MET),
        ("cuda-driver>=99", MET),
        ("ċuda>=99", MET),
        # No operator.
        ("cuda", INVALID),
        ("12.4", INVALID),
        ("gpus", INVALID),
        ("cuda!12.4", INVALID),
        ("cuda>=12.4 cuda", INVALID),
        ("cuda >= 12.4", INVALID),
        ("cuda>=12.4 or cuda>=11", INVALID),
        # No property.
        (">=12.4", INVALID),
        ("=", INVALID),
        # No version.
        ("cuda>=", INVALID),
        ("cuda>=v", INVALID),
        ("cuda>=vv12", INVALID),
        ("cuda>=V12", INVALID),
        ("cuda>=foo", INVALID),
        ("cuda>=12.x", INVALID),
        ("cuda>=12.", INVALID),
        ("cuda>=.4", INVALID),
        ("cuda>=12..4", INVALID),
        ("cuda>=-12", INVALID),
        ("cuda>=+12", INVALID),
        ("cuda>=1_2", INVALID),
        ("cuda>=12.4.0.0.0", INVALID),
        ("cuda>=12.4-rc1", INVALID),
        ("cuda>=4294967296", INVALID),
        ("cuda>=٣", INVALID),
        ("cuda>=²", INVALID),
        ("cuda=>12.4", INVALID),
        ("cuda==12.4", INVALID),
        ("cuda<>12.4", INVALID),
        ("cuda=!12.4", INVALID),
        ("cuda>=12.4>=12", INVALID),
        ("driver>=tesla", INVALID),
        ("arch=sm_80", INVALID),
        # No order of brands.
        ("brand>=tesla", INVALID),
        ("brand<=tesla", INVALID),
        ("brand>tesla", INVALID),
        ("brand<tesla", INVALID),
        ("brand=", INVALID),
        ("brand!=", INVALID),
        # What is malformed is so where it does not matter, too.
        ("cuda>=12.4 cuda>=foo", INVALID),
        ("cuda>=12.8,cuda>=foo", INVALID),
        ("cuda>=foo cuda>=12.4", INVALID),
        ("gpus>=8,cuda", INVALID),
    ],
)
def test_the_grammar(requirement: str, expected: str) -> None:
    """One string, on a host with one GPU of which everything is known."""
    assert outcome(TESLA, requirement) == expected


@pytest.mark.parametrize(
    ("facts", "requirement", "expected"),
    [
        # What holds for a part of the GPUs does not hold.
        (MIXED, "brand=tesla", UNMET),
        (MIXED, "brand=geforce", UNMET),
        (MIXED, "brand!=tesla", UNMET),
        (MIXED, "brand!=titan", MET),
        (MIXED, "brand=tesla brand=geforce", UNMET),
        (MIXED, "arch>=8", MET),
        (MIXED, "arch>=8.6", UNMET),
        (MIXED, "arch=8.0", UNMET),
        (MIXED, "arch<9", MET),
        # Without GPUs there is nothing to compare with.
        (NO_GPU, "arch>=8", UNDECIDED),
        (NO_GPU, "brand!=tesla", UNDECIDED),
        (NO_GPU, "cuda>=12.8", UNMET),
        (NO_GPU, "cuda>=12.4 brand=tesla", MET),
        (NO_GPU, "cuda>=12.8 brand=tesla", UNDECIDED),
        (NO_GPU, "cuda>=12.8,brand=tesla", UNMET),
        (NO_GPU, "brand=tesla,cuda>=12.8", UNMET),
        (NO_GPU, "cuda>=12.4,brand=tesla", UNDECIDED),
        # One GPU that is known to be another decides, one that is not known does not.
        (Facts("", "", ((0, "", ""), (1, "8.0", "tesla"))), "arch>=9", UNMET),
        (Facts("", "", ((0, "", ""), (1, "8.0", "tesla"))), "arch>=8", UNDECIDED),
        (Facts("", "", ((0, "8.0", "tesla"), (1, "", ""))), "brand=tesla", UNDECIDED),
        (Facts("", "", ((0, "8.0", "tesla"), (1, "", ""))), "brand!=tesla", UNMET),
        # Nothing known.
        (UNKNOWN, "", MET),
        (UNKNOWN, "cuda>=12.8", UNDECIDED),
        (UNKNOWN, "cuda<1", UNDECIDED),
        (UNKNOWN, "driver>=470,driver<471", UNDECIDED),
        (UNKNOWN, "gpus>=8", MET),
        (UNKNOWN, "cuda>=foo", INVALID),
        (UNKNOWN, IMAGE, UNDECIDED),
        # A host that says what is no version says nothing.
        (Facts("n/a", "550.54.14-beta", ()), "cuda>=99", UNDECIDED),
        (Facts("n/a", "550.54.14-beta", ()), "driver>=99", UNDECIDED),
        (Facts("12.4", "440.33.01", ()), "driver>=440.33.1,driver<=440.33.1.0", MET),
        # An image of CUDA 12.4.
        (TESLA, IMAGE, MET),
        (Facts("12.8", "570.86.10", ((0, "8.9", "geforce"),)), IMAGE, MET),
        (Facts("11.4", "470.256.02", ((0, "7.0", "tesla"),)), IMAGE, MET),
        (Facts("11.4", "470.256.02", ((0, "7.5", "geforce"),)), IMAGE, UNMET),
        (Facts("12.0", "525.60.13", ((0, "8.0", "tesla"),)), IMAGE, UNMET),
        (Facts("12.2", "535.104.05", ((0, "8.0", "unknown"),)), IMAGE, MET),
        (Facts("12.2", "535.104.05", ((0, "8.0", "tesla"),)), IMAGE, UNMET),
        (Facts("12.2", "535.104.05", ((0, "8.0", ""),)), IMAGE, UNDECIDED),
        (Facts("12.2", "535.104.05", ((0, "8.0", "unknown"), (1, "8.0", ""))), IMAGE, UNDECIDED),
        (Facts("12.2", "535.104.05", ((0, "8.0", "unknown"), (1, "8.0", "nvs"))), IMAGE, UNMET),
        (Facts("12.2", "535.104.05"), IMAGE, UNDECIDED),
        (Facts("12.2", "545.23.06"), IMAGE, UNMET),
        (Facts("12.3", "", ((0, "8.6", "grid"),)), IMAGE, UNDECIDED),
        (Facts("12.3", "550.40.07", ((0, "8.6", "GRID"),)), IMAGE, MET),
        (Facts("", "560.28.03", ((0, "8.0", "tesla"),)), IMAGE, UNDECIDED),
        (Facts("", "550.54.14", ((0, "8.0", "grid"),)), IMAGE, MET),
    ],
)
def test_on_hosts(facts: Facts, requirement: str, expected: str) -> None:
    """Several GPUs, none, and hosts of which something is not known."""
    assert outcome(facts, requirement) == expected


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        ((), MET),
        (("cuda>=12.4", "driver>=550"), MET),
        (("cuda>=12.4", "driver>=560"), UNMET),
        (("cuda>=12.8", "driver>=550"), UNMET),
        (("", "cuda>=12.8"), UNMET),
        (("cuda>=12.8", "cuda"), INVALID),
        (("cuda", "cuda>=12.8"), INVALID),
    ],
)
def test_all_strings_must_be_met(requirements: tuple[str, ...], expected: str) -> None:
    """An image may have several variables; what is malformed in one is said first."""
    assert outcome(TESLA, *requirements) == expected


def error_of(facts: Facts, *requirements: str) -> RequestError:
    """Return what is raised."""
    with pytest.raises(RequestError) as caught:
        check(requirements, facts)
    return caught.value


def test_b040_the_refused_learn_what_was_found_and_how_to_override() -> None:
    """Or they search for an hour: the driver counts, not the toolkit in the image."""
    error = error_of(TESLA, "cuda>=12.8 brand=tesla,driver>=470,driver<471")
    assert error.lines() == (
        "requirement: requirements not met: unsatisfied condition: cuda>=12.8 (cuda=12.4) or "
        "driver<471 (driver=550.54.14), of the requirement "
        '"cuda>=12.8 brand=tesla,driver>=470,driver<471"\n'
        "hint: run the container with NVIDIA_DISABLE_REQUIRE=1 (or update the driver)"
    )
    assert outcome(Facts("12.8", "570.86.10"), "cuda>=12.8 brand=tesla,driver>=470") == MET


def test_the_page_shows_what_is_said() -> None:
    """Operators find the page by the text of the error."""
    text = PAGE.read_text()
    error = error_of(TESLA, "cuda>=12.8 brand=tesla,driver>=470,driver<471")
    assert error.lines() in text
    (sentence,) = check(["arch>=8.0"], NO_GPU)
    assert sentence in text
    assert error_of(UNKNOWN, "cuda >= 12.4").lines() in text


@pytest.mark.parametrize(
    ("facts", "requirement", "said"),
    [
        (MIXED, "arch>=8.6", "arch>=8.6 (arch=8.0 of GPU 0)"),
        (MIXED, "brand=tesla", "brand=tesla (brand=geforce of GPU 3)"),
        (MIXED, "Brand=Titan", "Brand=Titan (brand=tesla of GPU 0)"),
        (MIXED, "driver>=560", "driver>=560 (driver=550.54.14)"),
        (MIXED, "cuda>=13 cuda>=13,driver>=5 cuda>=14", "cuda>=13 (cuda=12.4) or cuda>=14 (cuda"),
        (MIXED, "cuda=1 cuda=2 cuda=3 cuda=4 cuda=5", "cuda=3 (cuda=12.4) or 2 more, of the"),
    ],
)
def test_what_was_found_is_named(facts: Facts, requirement: str, said: str) -> None:
    """Of several GPUs the one that is the reason, and of many alternatives some."""
    assert said in error_of(facts, requirement).message


def test_every_unmet_string_is_named() -> None:
    """Who updates the driver for one reason should know the other."""
    message = error_of(TESLA, "cuda>=12.8", "cuda>=1", "driver>=560").message
    assert message.count("unsatisfied condition") == 2
    assert "cuda>=12.8 (cuda=12.4)" in message
    assert "driver>=560 (driver=550.54.14)" in message
    message = error_of(TESLA, *(f"cuda>={major}" for major in range(13, 20))).message
    assert message.endswith('of the requirement "cuda>=15" and 4 more')


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("cuda", '"cuda" has no operator, in the requirement "cuda"'),
        ("brand=tesla cuda>=foo", '"cuda>=foo" has no version on its right, in the requirement'),
        ("brand>tesla", '"brand>tesla" compares brands by order'),
        ("brand=", '"brand=" has no value'),
        (">=1", '">=1" has no property'),
    ],
)
def test_what_is_malformed_is_named(requirement: str, said: str) -> None:
    """With the reason, and how to start the container nevertheless."""
    error = error_of(TESLA, requirement)
    assert said in error.message
    assert "NVIDIA_DISABLE_REQUIRE=1" in (error.hint or "")


def test_what_is_not_decided_and_what_is_ignored_is_said() -> None:
    """The container starts, and who wonders later finds why."""
    ignored = "foo>=1,cuda>=12.4,Bar=x"
    undecided = "brand=tesla arch>=8 brand=a"
    assert check(["cuda>=12.4", ignored, undecided], NO_GPU) == [
        f'the requirement "{ignored}" has unknown properties, ignored: foo, bar',
        f'the requirement "{undecided}" cannot be checked, unknown on this host: brand, arch',
    ]
    assert check(["cuda>=12.4 brand=tesla", ""], NO_GPU) == []
    (sentence,) = check([",".join(f"p{n}=" for n in range(9))], TESLA)
    assert sentence.endswith("ignored: p0, p1, p2, p3 and 5 more")
    sentences = check((f"p{n}=" for n in range(50)), TESLA)
    assert len(sentences) == 17
    assert sentences[-1] == "34 more requirements are not decided or are ignored"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "0.0"),
        ("8", "8.0"),
        ("7.5", "7.5"),
        ("9.0.116", "9.0"),
        ("v11.6", "11.6"),
        ("v8", "8.0"),
        ("10.20.30", "10.20"),
        ("4294967295.4294967295.x", "4294967295.4294967295"),
        ("4294967295.4294967295.4294967295", "4294967295.4294967295"),
    ],
)
def test_versions_of_old_images(text: str, expected: str) -> None:
    """Images before CUDA 8 say only what they have, and need as much."""
    assert of_cuda_version(text) == f"cuda>={expected}"
    assert check([of_cuda_version(text)], Facts(expected)) == []


@pytest.mark.parametrize(
    "text",
    [
        *("foo", "foo.5.10", "9.0.116.50", "9.0.116foo", "7.foo", "9.0.bar", "9.4294967296"),
        *("9.0.116.", "9..0", "9.", ".5.10", "-9", "+9", "-9.1.116"),
        *("", "v", "V9", "vv9", " 9", "9 ", "9.0\n", "x", "9.x", "9.0.xx", "9.0.X", "9.0.x.x"),
        *("4294967296", "9.0.4294967296", "09", "9.00", "9.0-rc1", "9.0+1", "1_0", "٣", "²"),
        *("9" * 5000, "0" * 5000, "9.0." + "1" * 5000, "." * 5000),
    ],
)
def test_what_is_no_version_of_an_old_image(text: str) -> None:
    """A guess would let an image start on a driver that it does not run on."""
    with pytest.raises(RequestError, match="CUDA_VERSION is ") as caught:
        of_cuda_version(text)
    assert len(caught.value.message) < 200
    assert "NVIDIA_DISABLE_REQUIRE=1" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_words_for_yes(text: str) -> None:
    """Those, and no others."""
    assert is_true(text)


@pytest.mark.parametrize(
    "text",
    ["", "0", "f", "F", "FALSE", "false", "False", "yes", "on", "tRUE", "01", " 1", "true ", "2"],
)
def test_other_words_are_a_no(text: str) -> None:
    """An override must be meant."""
    assert not is_true(text)


MUCH_TEXT: dict[str, Callable[[int], str]] = {
    "one condition": lambda size: "cuda>=12.8 " * size,
    "conditions at once": lambda size: "cuda>=12.4," * size,
    "an unknown property": lambda size: "gpus>=8 " * size,
    "brands": lambda size: " ".join(f"brand=b{number}" for number in range(size)),
    "unknown properties": lambda size: " ".join(f"p{number}=1" for number in range(size)),
    "spaces": lambda size: " " * size * 3,
    "commas": lambda size: "," * size * 3,
    "a name": lambda size: "x" * size * 10,
    "a name without a value": lambda size: "x" * size * 10 + "=",
    "operators": lambda size: "<" * size * 10,
    "digits": lambda size: "cuda>=" + "9" * size * 10,
    "zeros": lambda size: "cuda>=" + "0" * size * 10,
    "parts": lambda size: "cuda>=" + "1." * size * 10,
    "a brand": lambda size: "brand=" + "x" * size * 10,
}


def seconds_of(work: Callable[[], object]) -> float:
    """Return the least processor time of three runs of *work*."""
    taken = []
    for _ in range(3):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def is_linear(small: Callable[[], object], large: Callable[[], object]) -> bool:
    """Return whether *large*, which has eight times as much as *small*, takes about as many times.

    If the time grew as the square, it would take 64 times as long. What takes less than a
    millisecond is not told apart from the clock's own errors.
    """
    return seconds_of(large) < 24 * max(seconds_of(small), 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUCH_TEXT)
def test_req_06_much_text_costs_little(kind: str) -> None:
    """An image must not hold up a host's starts, nor fill its log."""
    many = tuple((index, f"{index}.0", f"b{index}") for index in range(64))

    def said(text: str, facts: Facts) -> list[str]:
        sentences = []
        for requirements in ([text], text.split(" ")):
            try:
                sentences += [escape(sentence) for sentence in check(requirements, facts)]
            except RequestError as error:
                sentences.append(error.lines())
        return sentences

    for facts in (Facts("12.4", "550", many), UNKNOWN):
        text = MUCH_TEXT[kind](4_000)
        assert sum(map(len, said(text, facts))) < 8000
        assert is_linear(partial(said, MUCH_TEXT[kind](500), facts), partial(said, text, facts))


@pytest.mark.slow
def test_control_a_square_is_not_linear() -> None:
    """Each word is looked for among all those before it."""
    words = MUCH_TEXT["brands"](4_000).split()

    def repeated(count: int) -> int:
        return sum(word in words[:index] for index, word in enumerate(words[:count]))

    assert not is_linear(partial(repeated, 500), partial(repeated, 4_000))


# The second opinion: by patterns and numbers, where the module has loops and None.
_SIGNS = {"=": (0,), "!=": (-1, 1), "<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}
_FACTOR = re.compile(r"([^<>=!]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_VERSION = re.compile(r"v?[0-9]{1,10}(\.[0-9]{1,10}){0,3}")


def parts_of(version: str) -> list[int]:
    """Return the numbers of a version; without the zeros at its end, which do not count."""
    parts = [int(part) for part in re.findall("[0-9]+", version)]
    assert max(parts) < 1 << 32
    while parts and parts[-1] == 0:
        parts.pop()
    return parts


def order(a: list[int], b: list[int]) -> int:
    """Return whether *a* is below, at or above *b*."""
    return (a > b) - (a < b)


def truth(factor: str, facts: Facts) -> float | None:
    """Return 1 for yes, 0 for no, ½ for perhaps, None for what is ignored."""
    match = _FACTOR.fullmatch(factor)
    if not match:
        raise ValueError(factor)
    name, sign, value = match[1].casefold(), match[2], match[3]
    actual = {
        "cuda": [facts.cuda],
        "driver": [facts.driver],
        "arch": [gpu[1] for gpu in facts.gpus],
        "brand": [gpu[2] for gpu in facts.gpus],
    }.get(name)
    if actual is None:
        return None
    if name == "brand":
        if sign not in ("=", "!=") or not value:
            raise ValueError(factor)
        found = [
            (it.casefold() == value.casefold()) == (sign == "=") if it else 0.5 for it in actual
        ]
    else:
        if not _VERSION.fullmatch(value):
            raise ValueError(factor)
        found = [
            order(parts_of(it), parts_of(value)) in _SIGNS[sign] if it else 0.5 for it in actual
        ]
    return min(map(float, found), default=0.5)


def naive(requirements: list[str], facts: Facts) -> str:
    """Return what becomes of requirements: the least of the greatest of the least."""
    least = 1.0
    for requirement in requirements:
        alternatives = []
        for term in re.split(r"\s+", requirement):
            factors = [truth(factor, facts) for factor in re.split(",", term) if factor]
            alternatives += [[it for it in factors if it is not None]]
        greatest = max((min(term) for term in alternatives if term), default=1.0)
        least = min(least, greatest)
    return {1.0: MET, 0.5: UNDECIDED, 0.0: UNMET}[least]


def naive_or_invalid(requirements: list[str], facts: Facts) -> str:
    """Return what becomes of requirements, also of malformed ones."""
    try:
        return naive(requirements, facts)
    except ValueError:
        return INVALID


VERSIONS = st.sampled_from(["0", "1", "1.0", "1.1", "1.10", "2", "v1", "1.0.1", "1.0.0.1", "10"])
BRANDS = st.sampled_from(["tesla", "grid", "Tesla", "unknown"])
OPERATORS = st.sampled_from(sorted(_SIGNS))
GOOD_FACTORS = st.one_of(
    st.builds(
        "{}{}{}".format, st.sampled_from(["cuda", "driver", "arch", "CUDA"]), OPERATORS, VERSIONS
    ),
    st.builds("{}{}{}".format, st.just("brand"), st.sampled_from(["=", "!="]), BRANDS),
    st.builds("{}{}{}".format, st.just("other"), OPERATORS, BRANDS),
    st.just(""),
)
BAD_FACTORS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["cuda", "driver", "brand", "other", ""]),
    st.sampled_from([*_SIGNS, "", "!", "=>", "=="]),
    st.one_of(VERSIONS, BRANDS, st.sampled_from(["", ".", "1.", "x", "1.2.3.4.5"])),
)


def strings(factors: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """Return lists of requirement strings of *factors*."""
    terms = st.lists(factors, max_size=4).map(",".join)
    blanks = st.sampled_from([" ", "  ", "\t"])
    requirement = st.builds(lambda blank, terms: blank.join(terms), blanks, st.lists(terms))
    return st.lists(requirement, max_size=3)


KNOWN_VERSIONS = VERSIONS.map(lambda version: version.removeprefix("v"))
KNOWN_GPUS = st.builds(lambda *gpu: (0, *gpu), KNOWN_VERSIONS, BRANDS)
GPUS = st.builds(lambda *gpu: (0, *gpu), KNOWN_VERSIONS | st.just(""), BRANDS | st.just(""))
FACTS = st.builds(
    Facts,
    KNOWN_VERSIONS | st.just(""),
    KNOWN_VERSIONS | st.just(""),
    st.lists(GPUS, max_size=3).map(tuple),
)


@pytest.mark.property
@given(strings(GOOD_FACTORS), FACTS)
def test_agrees_with_a_second_opinion(requirements: list[str], facts: Facts) -> None:
    """The grammar and the three values of logic, written twice."""
    assert outcome(facts, *requirements) == naive(requirements, facts)


@pytest.mark.slow
@pytest.mark.property
@given(strings(GOOD_FACTORS | BAD_FACTORS), FACTS)
def test_agrees_on_what_is_malformed(requirements: list[str], facts: Facts) -> None:
    """Wherever the malformed factor is."""
    assert outcome(facts, *requirements) == naive_or_invalid(requirements, facts)


@pytest.mark.property
@given(
    strings(GOOD_FACTORS), FACTS, KNOWN_VERSIONS, KNOWN_VERSIONS, st.lists(KNOWN_GPUS, min_size=1)
)
def test_to_learn_more_changes_no_decision(
    requirements: list[str],
    facts: Facts,
    cuda: str,
    driver: str,
    gpus: list[tuple[int, str, str]],
) -> None:
    """What is decided without a fact must not have depended on it."""
    filled = itertools.zip_longest(facts.gpus, gpus[: len(facts.gpus)], fillvalue=gpus[0])
    more = Facts(
        facts.cuda or cuda,
        facts.driver or driver,
        tuple((0, gpu[1] or other[1], gpu[2] or other[2]) for gpu, other in filled) or tuple(gpus),
    )
    before, after = outcome(facts, *requirements), outcome(more, *requirements)
    assert after in (MET, UNMET)
    assert before in (UNDECIDED, after)


@pytest.mark.slow
@pytest.mark.property
@given(st.lists(st.text(), max_size=3), st.text(), st.text(), st.text())
def test_no_text_breaks_it(requirements: list[str], cuda: str, driver: str, arch: str) -> None:
    """Neither an image's, nor a driver's."""
    found = outcome(Facts(cuda, driver, ((0, arch, cuda),)), *requirements)
    assert found in (MET, UNMET, UNDECIDED, INVALID)


@pytest.mark.property
@given(st.text("0123456789.vx-+f", max_size=20))
def test_a_version_of_an_old_image_is_a_requirement(text: str) -> None:
    """What is accepted can be checked, and has two parts."""
    match = re.fullmatch(r"v?(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*|x))?)?", text)
    numbers = [int(number) for number in re.findall("[0-9]+", text)]
    if match and max(numbers) < 1 << 32:
        assert of_cuda_version(text) == f"cuda>={numbers[0]}.{[*numbers, 0][1]}"
        assert outcome(UNKNOWN, of_cuda_version(text)) == UNDECIDED
    else:
        with pytest.raises(RequestError):
            of_cuda_version(text)
