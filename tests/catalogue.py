# SPDX-License-Identifier: Apache-2.0
"""The attack catalogue: each id has its tests, or a reason why there are none.

A test has an id by its name or that of its parameter (`link_04_cache`), by the first words of its
docstring, by `@pytest.mark.catalogue("EXE-01")`, or by being named in TESTS below. This is a
pytest plugin as well: it prints the ids with what their tests came to.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Sequence

import pytest

GROUPS = {
    "ENV": 15, "LINK": 13, "RACE": 10, "EXEC": 4, "EXE": 4, "FD": 2, "TIME": 2, "CG": 2,
    "NAME": 4, "LOG": 3, "JSON": 11, "REQ": 10, "ANN": 6, "CDI": 9, "PROC": 3, "NS": 4,
    "PERM": 1, "LINT": 2, "META": 3,
}  # fmt: skip
IDS = tuple(f"{group}-{i:02}" for group, count in GROUPS.items() for i in range(1, count + 1))

_BUNDLE = "tests/unit/gpuruntime/oci/test_bundle.py::"
_REQUEST = "tests/unit/gpuruntime/request/test_request.py::"
_ASKED = "tests/property/test_request_properties.py::"
_HOOK = "tests/launcher/test_hook_role.py::"
_REGISTRY = "tests/unit/cdi/test_registry.py::"
# Tests that say it by what they do.
TESTS: dict[str, tuple[str, ...]] = {
    "ENV-10": (
        "tests/engines/test_podman_specs.py::test_hooks_of_every_stage_get_their_arguments_and_environment",
    ),
    "ENV-13": (
        f"{_REQUEST}test_of_repeats_the_last_counts",
        f"{_REQUEST}test_an_endless_value_is_refused",
        f"{_BUNDLE}test_a_huge_file_is_refused_without_reading_it_all",
    ),
    "ENV-14": (
        f"{_HOOK}test_each_hostile_habit_is_undone",
        f"{_HOOK}test_all_hostile_habits_at_once_are_undone",
        f"{_HOOK}test_full_output_does_not_hang_the_start",
        f"{_HOOK}test_small_stack_is_enough",
    ),
    "ENV-15": (
        "tests/launcher/test_roles.py::test_no_arguments_at_all_fails_closed",
        "tests/launcher/test_roles.py::test_a_mebibyte_of_arguments_arrives",
    ),
    "NAME-03": ("tests/unit/hooks/test_plan.py::test_an_argument_that_is_not_clean_is_refused",),
    "LOG-01": (
        "tests/unit/gpuruntime/test_errors.py::test_any_text_is_one_line_of_printable_ascii",
    ),
    "LOG-02": (
        "tests/unit/gpuruntime/test_log.py::test_a_log_that_cannot_be_written_stops_nothing",
    ),
    "JSON-01": (
        f"{_BUNDLE}test_a_member_twice_is_a_doubt_at_any_depth",
        f"{_BUNDLE}test_another_letter_case_is_a_doubt",
    ),
    "JSON-02": (
        f"{_BUNDLE}test_other_encodings_are_no_json",
        f"{_BUNDLE}test_bytes_that_are_no_utf8_are_a_doubt_with_their_place",
        f"{_BUNDLE}test_a_lone_surrogate_cannot_be_stored",
    ),
    "JSON-03": (
        f"{_BUNDLE}test_depth_is_limited",
        f"{_BUNDLE}test_numbers_out_of_range_are_a_doubt",
        f"{_BUNDLE}test_a_huge_file_is_refused_without_reading_it_all",
    ),
    "JSON-04": (f"{_BUNDLE}test_what_is_no_json_object_is_refused_at_once",),
    "JSON-05": (f"{_BUNDLE}test_what_is_no_regular_file_is_refused_at_once",),
    "JSON-08": (
        f"{_BUNDLE}test_unknown_oci_fields_survive_create",
        f"{_BUNDLE}test_large_integers_are_exact",
    ),
    "JSON-10": (
        f"{_BUNDLE}test_wrong_types_are_doubts_and_never_a_crash",
        f"{_ASKED}test_bad_types_end_in_our_own_errors",
    ),
    "JSON-11": (f"{_BUNDLE}test_a_user_id_out_of_range_is_a_doubt",),
    "REQ-01": (f"{_ASKED}test_without_a_grant_there_is_nothing",),
    "REQ-02": (f"{_REQUEST}test_what_counts_and_in_which_order",),
    "REQ-03": (
        f"{_REQUEST}test_the_grammar_of_visible_devices",
        f"{_REQUEST}test_what_is_not_to_be_had_by_asking",
    ),
    "REQ-04": (f"{_REQUEST}test_what_counts_and_in_which_order",),
    "REQ-05": (f"{_ASKED}test_mig_settings_need_privilege",),
    "REQ-08": ("tests/unit/cdi/test_edits.py::test_whether_every_device_is_allowed_anyway",),
    "ANN-01": (
        f"{_REQUEST}test_what_is_not_to_be_had_by_asking",
        f"{_ASKED}test_management_needs_privilege",
    ),
    "ANN-04": ("tests/unit/cdi/test_annotations.py::test_any_map_is_read_or_refused",),
    "CDI-02": (
        f"{_REGISTRY}test_a_file_that_cannot_be_used_is_named_and_hides_no_other",
        f"{_REGISTRY}test_the_worst_files_cost_little",
        f"{_REGISTRY}test_ownership_and_links",
    ),
    "CDI-09": ("tests/system/test_boot.py::test_the_refresh_may_do_little",),
    "FD-02": (
        "tests/launcher/test_transparency.py::test_low_level_runtime_sees_what_the_engine_gave",
    ),
    "ANN-06": (f"{_BUNDLE}test_unknown_oci_fields_survive_create",),
    "CDI-05": ("tests/conformance/test_corpus.py::test_a_case_ends_as_with_the_reference",),
    "CDI-07": (
        "tests/unit/gpuruntime/plan/test_gpu_edits.py::test_every_hook_has_an_environment_and_a_deadline",
        "tests/unit/gpuruntime/plan/test_gpu_edits.py::test_the_spec_is_in_canonical_order_and_of_the_lowest_version",
    ),
    "NS-04": (
        "tests/system/test_user_namespaces.py::test_a_runtime_within_a_user_namespace_binds_too",
    ),
}  # fmt: skip
# Why there is no test. What is only not there yet says what it waits for.
NONE: dict[str, str] = {
    "ENV-11": "hooks of others are not changed: what they are given is their engine's business",
    "EXEC-03": "does not apply: no process of ours enters the container's root",
    "JSON-06": "the bundle is the engine's, which is trusted; what no bundle can be is JSON-07",
    "ANN-02": "does not apply: annotations count in each create alone, nothing is kept of them",
    "ANN-03": "does not apply: no key of the configuration is read from annotations",
    "ANN-05": "does not apply: labels of images are not read; they are no part of an OCI config",
    "PROC-03": "does not apply: no /proc is mounted by us",
}

_IN_NAME = re.compile(rf"(?<![a-z])({'|'.join(GROUPS).lower()})_(\d\d)(?![0-9a-z])")
_IN_TEXT = re.compile(rf"\b({'|'.join(GROUPS)})-(\d\d)\b")
_BY_TEST: dict[str, set[str]] = {}
for _id, _names in TESTS.items():
    for _name in _names:
        _BY_TEST.setdefault(_name, set()).add(_id)


def ids_in(name: str, text: str = "") -> set[str]:
    """Return the ids that the *name* of a test has, and the first line of its docstring."""
    first = text.strip().partition("\n")[0]
    pairs = [*_IN_NAME.findall(name), *_IN_TEXT.findall(first)]
    return {f"{group.upper()}-{number}" for group, number in pairs}


def ids_of(item: pytest.Item) -> set[str]:
    """Return the ids that a test is for; raise UsageError for one that there is not."""
    text = getattr(getattr(item, "function", None), "__doc__", None) or ""
    ids = ids_in(item.name, text) | _BY_TEST.get(item.nodeid.partition("[")[0], set())
    for marker in item.iter_markers("catalogue"):
        ids |= set(marker.args)
    unknown = ids - set(IDS)
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: no such id: {', '.join(sorted(unknown))}")
    return ids


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "catalogue(*ids): ids of the attack catalogue")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse an id that there is not."""
    for item in items:
        ids_of(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the test's ids in each report."""
    report = yield
    report.catalogue = sorted(ids_of(item))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ids with pass, or why not."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in IDS}
    skipped: dict[str, str] = {}
    for category in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(category, ()):
            for name in getattr(report, "catalogue", ()):
                outcome = "failed" if category in ("failed", "error") else category
                counts[name][outcome] += 1
                if category == "skipped":
                    skipped[name] = str(report.longrepr[-1])
    if not any(counts.values()):
        return
    terminalreporter.section("attack catalogue")
    is_whole = terminalreporter.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    for line in lines(counts, skipped, IDS if is_whole else [n for n in IDS if counts[n]]):
        terminalreporter.write_line(line)


def lines(
    counts: dict[str, Counter[str]], skipped: dict[str, str], ids: Sequence[str]
) -> list[str]:
    """Return a line for each of *ids*: how many tests passed, or why none did."""
    totals = {"pass": 0, "fail": 0, "no test": 0, "not run": 0}
    result = []
    for name in ids:
        seen = counts[name]
        if seen["failed"]:
            totals["fail"] += 1
            result.append(f"{name}  FAIL ({seen['failed']} of {sum(seen.values())} tests)")
        elif seen["passed"]:
            totals["pass"] += 1
            result.append(f"{name}  pass ({seen['passed']} tests)")
        elif name in NONE:
            totals["no test"] += 1
            result.append(f"{name}  no test: {NONE[name]}")
        else:
            totals["not run"] += 1
            result.append(f"{name}  not run: {skipped.get(name, 'not among the chosen tests')}")
    summary = ", ".join(f"{count} {word}" for word, count in totals.items())
    return [*result, f"catalogue: {len(ids)} ids, {summary}"]
