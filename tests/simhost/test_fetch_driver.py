# SPDX-License-Identifier: Apache-2.0
"""What `make driver-root` reads of the machine's apt sources."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def test_sources_of_both_forms_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make driver-root` fetches from where the machine itself does, however that is written."""
    source_file = Path(__file__).with_name("fetch_driver.py")
    spec = importlib.util.spec_from_file_location("fetch_driver", source_file)
    assert spec is not None
    assert spec.loader is not None
    fetch_driver = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_driver", fetch_driver)
    spec.loader.exec_module(fetch_driver)

    deb822 = (
        "Types: deb deb-src\nURIs: http://mirror.example/debian\n# a remark\n"
        "Suites: bookworm bookworm-updates\nComponents: main\nSigned-By: /keys/debian.gpg\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\n\n"
        "Types: deb-src\nURIs: http://source.example\nSuites: bookworm\n"
    )
    (source,) = fetch_driver.parse_deb822(deb822)
    assert source.uris == "http://mirror.example/debian"
    assert source.suites == ("bookworm", "bookworm-updates")
    assert source.signed_by == "/keys/debian.gpg"

    one_line = (
        "# deb http://off.example bookworm main\n"
        "deb-src http://source.example bookworm main\n"
        "deb [ arch=amd64 signed-by=/keys/debian.gpg ] http://mirror.example/debian bookworm x\n"
        "deb http://mirror.example/debian bookworm-updates main # a remark\n"
    )
    first, second = fetch_driver.parse_one_line(one_line)
    assert first == fetch_driver.Source(
        "http://mirror.example/debian", ("bookworm",), "/keys/debian.gpg"
    )
    assert second == fetch_driver.Source("http://mirror.example/debian", ("bookworm-updates",), "")
