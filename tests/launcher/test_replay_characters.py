# SPDX-License-Identifier: Apache-2.0
"""Characters in the holes of a config that the launcher replays: ASCII, and a few escapes.

Half a character is not text: Python refuses it. An escape may hide a word.
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
        document["process"]["cwd"] = MARK
    elif place == "argument":
        document["process"]["args"].append(MARK)
    elif place == "variable":
        document["process"]["env"].append(f"OWN={MARK}")
    else:
        document["mounts"].append({"destination": "/x", "type": "bind", "source": MARK})
    return json.dumps(document, ensure_ascii=False).replace(MARK, text).encode()


PLACES = pytest.mark.parametrize("place", ["value", "argument", "variable", "mount"])


@PLACES
@pytest.mark.parametrize(
    "text",
    [
        *(HIGH, f"a{HIGH}b", HIGH.upper().replace("U", "u", 1), HIGH * 2, r"\ud800", r"\udbff"),
        *(LOW, f"{LOW}{HIGH}", r"\udc00", r"\udfff", f"{HIGH}{LOW}", f"{HIGH}é"),
        *("é", "😀", r"\u00e9", r"\u2028", r"\u0000", r"\u000a", r"\u0041", r"\/", "\x7f"),
        *(r"NVIDIA_X", "nvidia.com/", r"\u004eVIDIA_X", r"\u003", r"\u003C", r"\x", "\\"),
    ],
)
def test_any_other_character_is_python_s(scene: Scene, place: str, text: str) -> None:
    """Also text that has a word, in whatever spelling, and what is no JSON."""
    scene.remember(spelled(place, "x"))
    data = spelled(place, text)
    assert scene.create(data).who == "python"
    assert scene.written == data


@PLACES
@pytest.mark.parametrize(
    "text", ["", " ", "~", "a:b=c", r"\"\\\b\f\n\r\t", r"\u003c\u003e\u0026", r"\\u0041", "u003c"]
)
def test_control_ascii_and_what_go_escapes_are_replayed(
    scene: Scene, place: str, text: str
) -> None:
    """Byte for byte as by Python."""
    scene.remember(spelled(place, "x"))
    assert scene.replays(spelled(place, text))
