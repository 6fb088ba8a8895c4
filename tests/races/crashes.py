# SPDX-License-Identifier: Apache-2.0
"""Work that is ended by SIGKILL before each call that it makes, one after the other."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType


def ended_before(number: int, work: Callable[[], None]) -> bool:
    """Do *work* in a child killed before its call *number*; return whether it came there."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count(frame: FrameType, event: str, what: object) -> None:
            nonlocal calls
            del frame, what
            if event == "c_call":
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.setprofile(count)
            work()
            status = 0
        finally:
            sys.setprofile(None)
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
