# SPDX-License-Identifier: Apache-2.0
"""`schema/strict.json` and the loader are of one mind, about every category of error there is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import tries
from property import cdi_documents as documents

from cdi import document, registry, validate, yamlio
from cdi.document import Problem

pytestmark = pytest.mark.property

SEED = 20260821
# Each category is hit this often.
EACH = 60
VALID = BATTERED = tries(600)
CATEGORIES = (*documents.TEXTS, *documents.CHANGES)
# What JSON Schema cannot say; strict.json lists the same in its comment.
BEYOND_SCHEMA = {"duplicate-device", "netdev-duplicate-host", "netdev-duplicate-name"}


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """Return how many documents of each category there were, in this run."""
    return Counter()


def is_beyond_schema(problem: Problem, spec: Any) -> bool:
    """Return whether JSON Schema cannot see *problem* of *spec*."""
    if problem.category in BEYOND_SCHEMA:
        return True
    if problem.category != "rdt-clos-id":
        return False
    clos_id: Any = spec
    for step in problem.path:
        clos_id = clos_id[step]
    # Its limit is in bytes; a schema counts characters.
    return len(clos_id) < 4096 <= len(clos_id.encode()) and not set("/\n") & set(clos_id)


def assert_agree(spec: Any, told: str) -> list[Problem]:
    """Compare the verdicts on the normalised *spec*; return the loader's problems."""
    problems = list(document.problems(spec))
    seen = [problem for problem in problems if not is_beyond_schema(problem, spec)]
    errors = list(validate.schema("strict").iter_errors(spec))
    assert bool(errors) == bool(seen), (told, [vars_of(p) for p in problems], errors)
    return problems


def vars_of(problem: Problem) -> tuple[str, str, str]:
    """Return what *problem* says."""
    return problem.category, document.place(problem.path), problem.message


def findings(text: str) -> list[str]:
    """Return the categories of the errors that `validate` finds."""
    return [f.category for f in validate.validate(text) if f.severity == "error"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_document_with_one_thing_wrong_is_refused_for_it(
    category: str, counts: Counter[str]
) -> None:
    """By the loader with that category, by the schema unless it cannot see it."""
    rng = random.Random(f"{SEED} {category}")
    for number in range(EACH):
        name, text = documents.broken(rng, category)
        told = f"{category} {number}: {name}: {text[:4000]}"
        errors = findings(text)
        if category in ("syntax", "duplicate-key"):
            assert errors == [category], told
        else:
            spec = document.normalise(yamlio.decode(text))
            problems = assert_agree(spec, told)
            assert problems[0].category == category, (told, vars_of(problems[0]))
            assert category in errors, told
            assert "bug" not in errors, told
        counts[category] += 1
    assert counts[category] >= 50


def test_valid_documents_pass_both() -> None:
    """However they are written, they are read as the same document."""
    rng = random.Random(SEED)
    for number in range(VALID):
        spec = documents.valid(rng)
        name, text = documents.as_text(rng, documents.written(rng, spec))
        told = f"valid {number}: {name}: {text}"
        assert document.normalise(yamlio.decode(text)) == spec, told
        assert not assert_agree(spec, told), told
        assert not findings(text), told


def test_two_things_wrong_get_one_verdict() -> None:
    """What is wrong first does not make the other pass, with either."""
    rng = random.Random(SEED + 1)
    for number in range(BATTERED):
        spec = documents.valid(rng)
        changes = rng.sample(sorted(documents.CHANGES), 2)
        try:
            for category in changes:
                spec = documents.CHANGES[category](rng, spec)
        except (AttributeError, IndexError, KeyError, TypeError):
            # The first change took away what the second one changes.
            continue
        told = f"{changes} {number}: {spec}"
        assert assert_agree(document.normalise(spec), told), told


def test_junk_in_a_document_gets_one_verdict() -> None:
    """Whatever is where it does not belong, both refuse it or both accept it."""
    rng = random.Random(SEED + 2)
    verdicts: Counter[bool] = Counter()
    for number in range(BATTERED):
        spec = document.normalise(documents.battered(rng))
        verdicts[not assert_agree(spec, f"battered {number}: {spec}")] += 1
    # Neither outcome is an accident of the generator.
    assert min(verdicts[True], verdicts[False]) >= BATTERED / 50, verdicts


def test_validate_says_what_the_loader_says(tmp_path: Path) -> None:
    """About any text: an error if, and only if, it is refused, and every error on a line."""
    rng = random.Random(SEED + 3)
    verdicts: Counter[bool] = Counter()
    for _ in range(BATTERED):
        name, text = documents.as_text(rng, documents.written(rng, documents.valid(rng)))
        if rng.random() < 0.7:
            start = rng.randrange(len(text))
            stop = start + rng.choice((0, 1, 5))
            junk = rng.choice(("", '"', "}", ",", "null", "- ", "\n", "*a", "\0", "\\", ": "))
            text = text[:start] + junk + text[stop:]
        errors = [f for f in validate.validate(text) if f.severity == "error"]
        path = tmp_path / name
        path.write_bytes(text.encode())
        known = registry.load(
            [str(tmp_path)], may_trust=lambda _: True, decode_yaml=yamlio.decode_all
        )
        path.unlink()
        loads = not known.errors
        assert loads == (not errors), (name, text, errors)
        assert all(error.line or error.category == "no-data" for error in errors), (name, text)
        verdicts[loads] += 1
    assert min(verdicts[True], verdicts[False]) >= BATTERED / 50, verdicts


def test_the_schema_lists_what_it_cannot_say() -> None:
    """Its comment and this test's exceptions are the same."""
    comment = str(validate.schema("strict").schema)
    assert all(category in comment for category in (*BEYOND_SCHEMA, "rdt-clos-id"))


def test_every_category_is_hit(
    counts: Counter[str], record_property: Callable[[str, str], None]
) -> None:
    """The last of these tests: the summary shows how often, of those that ran."""
    listed = ", ".join(f"{category} {count}" for category, count in counts.items())
    record_property("summary", f"CDI documents refused as they should be: {listed}")
    assert all(count >= 50 for count in counts.values())
