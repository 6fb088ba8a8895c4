# SPDX-License-Identifier: Apache-2.0
"""The names of MIG profiles: read, written, computed from sizes, compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode import mig_profiles
from gpunode.mig_profiles import ATTRIBUTES, Profile

ATTRIBUTE_SETS = st.sets(st.sampled_from(ATTRIBUTES))


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("1g.5gb", Profile(compute_slices=1, gpu_slices=1, memory_gb=5)),
        ("1c.3g.20gb", Profile(compute_slices=1, gpu_slices=3, memory_gb=20)),
        ("7g.80gb", Profile(compute_slices=7, gpu_slices=7, memory_gb=80)),
        ("1g.5gb+me", Profile(compute_slices=1, gpu_slices=1, memory_gb=5, added=("me",))),
        ("1g.24gb-me", Profile(compute_slices=1, gpu_slices=1, memory_gb=24, removed=("me",))),
        ("2g.48gb+gfx", Profile(compute_slices=2, gpu_slices=2, memory_gb=48, added=("gfx",))),
        (
            "1g.24gb+gfx,me.all",
            Profile(compute_slices=1, gpu_slices=1, memory_gb=24, added=("gfx", "me.all")),
        ),
        (
            "1g.24gb+gfx-me",
            Profile(compute_slices=1, gpu_slices=1, memory_gb=24, added=("gfx",), removed=("me",)),
        ),
    ],
)
def test_a_name_is_read_and_written(name: str, profile: Profile) -> None:
    """Both ways."""
    assert mig_profiles.parse(name) == profile
    assert str(profile) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1g",
        "1g.5",
        "g.5gb",
        "0g.5gb",
        "1g.0gb",
        "01g.5gb",
        " 1g.5gb",
        "1g.5gb ",
        "1g.5gb\n",
        "1G.5GB",
        "2c.1g.5gb",
        "1g.5gb+",
        "1g.5gb-",
        "1g.5gb+x",
        "1g.5gb+me,",
        "1g.5gb+me,me",
        "1g.5gb+me-me",
        "1g.5gb-me+me",
        "1g.5gb.me",
        "\u0661g.5gb",
        "1g.5gb+me.all.all",
    ],
)
def test_another_name_is_refused(name: str) -> None:
    """With the name in the message."""
    with pytest.raises(ValueError, match="MIG profile") as caught:
        mig_profiles.parse(name)
    assert name in str(caught.value)


def test_a_compute_part_that_is_all_of_it_is_left_out() -> None:
    """`3c.3g.20gb` is `3g.20gb`."""
    assert str(mig_profiles.parse("3c.3g.20gb")) == "3g.20gb"


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 200), ATTRIBUTE_SETS, ATTRIBUTE_SETS)
def test_every_profile_has_a_name(
    compute: int, gpu: int, memory: int, added: set[str], removed: set[str]
) -> None:
    """From which it is read again."""
    profile = Profile(
        compute_slices=min(compute, gpu),
        gpu_slices=gpu,
        memory_gb=memory,
        added=tuple(sorted(added)),
        removed=tuple(sorted(removed - added)),
    )
    assert mig_profiles.parse(str(profile)) == profile


@pytest.mark.parametrize(
    ("gpu_memory_mib", "compute", "slices", "memory_mib", "name"),
    [
        (40536, 1, 1, 4864, "1g.5gb"),  # A100 40 GB
        (40536, 1, 1, 9856, "1g.10gb"),
        (40536, 2, 2, 9856, "2g.10gb"),
        (40536, 3, 3, 19968, "3g.20gb"),
        (40536, 1, 3, 19968, "1c.3g.20gb"),
        (40536, 7, 7, 40192, "7g.40gb"),
        (81251, 1, 1, 9728, "1g.10gb"),  # A100 80 GB
        (81251, 7, 7, 81152, "7g.80gb"),
        (81559, 1, 1, 9856, "1g.10gb"),  # H100 80 GB
        (81559, 1, 1, 20096, "1g.20gb"),
        (81559, 3, 3, 40448, "3g.40gb"),
        (24512, 1, 1, 5952, "1g.6gb"),  # A30
        (24512, 4, 4, 24256, "4g.24gb"),
        (97871, 1, 1, 11776, "1g.12gb"),  # H100 96 GB
    ],
)
def test_the_name_follows_from_the_sizes(
    gpu_memory_mib: int, compute: int, slices: int, memory_mib: int, name: str
) -> None:
    """As the driver names its profiles."""
    profile = mig_profiles.of_sizes(
        compute_slices=compute,
        gpu_slices=slices,
        memory_mib=memory_mib,
        gpu_memory_mib=gpu_memory_mib,
    )
    assert str(profile) == name


def test_a_gpu_without_memory_has_no_profiles() -> None:
    """An answer of NVML that cannot be."""
    with pytest.raises(ValueError, match="0 MiB"):
        mig_profiles.of_sizes(compute_slices=1, gpu_slices=1, memory_mib=1, gpu_memory_mib=0)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("7g.79gb", "7g.80gb", True),
        ("7g.80gb", "7g.79gb", True),
        ("7g.78gb", "7g.80gb", False),
        ("1g.10gb", "1g.10gb+me", False),
        ("1c.2g.10gb", "2g.10gb", False),
        ("1g.5gb-me", "1g.5gb", False),
    ],
)
def test_profiles_are_the_same_within_one_gigabyte(one: str, other: str, is_same: bool) -> None:
    """Drivers count the memory of a whole GPU differently."""
    assert mig_profiles.parse(one).is_same(mig_profiles.parse(other)) is is_same
