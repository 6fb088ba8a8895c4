# SPDX-License-Identifier: Apache-2.0
"""Escapes in the config of a container that the launcher replays.

Half a character is no text: Python refuses it, and what read it as one would write no UTF-8.
"""

from __future__ import annotations

import json

import pytest
from launcher import replays
from launcher.conftest import Bench
from launcher.replays import Scene

MARK = "a-name-of-its-own"
HIGH, LOW = r"\ud83d", r"\ude00"


@pytest.fixture
def scene(bench: Bench) -> Scene:
    """Return a machine with a spec, and the launcher."""
    return Scene.make(bench, "plain")


def spelled(place: str, text: str) -> bytes:
    """Return the config of a container that has *text*, as it is spelled in JSON, in *place*."""
    document = json.loads(replays.recorded("docker"))
    if place == "value":
        document["hostname"] = MARK
    elif place == "argument":
        document["process"]["args"].append(MARK)
    elif place == "variable":
        document["process"]["env"].append(f"OWN={MARK}")
    else:
        document["mounts"].append({"destination": f"/{MARK}", "type": "bind", "source": "/srv"})
    return json.dumps(document).replace(MARK, text).encode()


PLACES = pytest.mark.parametrize("place", ["value", "argument", "variable", "mount"])


@PLACES
@pytest.mark.parametrize(
    "text",
    [
        *(HIGH, f"a{HIGH}b", HIGH.upper().replace("U", "u", 1), HIGH * 2, r"\ud800", r"\udbff"),
        *(LOW, f"{LOW}{HIGH}", r"\udc00", r"\udfff", f"{HIGH}{LOW}", f"{HIGH}é"),
    ],
)
def test_half_a_character_is_python_s(scene: Scene, place: str, text: str) -> None:
    """Both halves as well, which no engine writes; alone, there is no byte for it."""
    scene.remember(replays.recorded("docker"))
    data = spelled(place, text)
    assert scene.create(data).who == "python"
    assert scene.written == data


@PLACES
@pytest.mark.parametrize("text", [r"\u00e9", r"\ud7ff", r"\ue000", r"\uffff", "😀", r"\u2028"])
def test_control_what_is_beside_them_is_given_again(scene: Scene, place: str, text: str) -> None:
    """The last before the halves, and the first after them, byte for byte as by Python."""
    scene.remember(replays.recorded("docker"))
    assert scene.replays(spelled(place, text))
