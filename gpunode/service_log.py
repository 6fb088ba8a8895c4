# SPDX-License-Identifier: Apache-2.0
"""Log lines of the services on standard error: one record a line, key=value or JSON.

The form is that of the runtime's log, so that one reader understands both.
"""

from __future__ import annotations

import logging
import sys
import time

from cdi import strictjson
from gpuruntime.errors import escape

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
# Of other libraries, only what an operator has to know.
_OTHERS = logging.WARNING


class LineFormatter(logging.Formatter):
    """Turn a record into one line of printable ASCII."""

    def __init__(self, format_: str) -> None:
        super().__init__()
        self.format_ = format_

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of *record*; a traceback is left out, except its last line."""
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message = f"{message}: {record.exc_info[1]!r}"
        fields = {
            "level": record.levelname.lower(),
            "msg": escape(message.replace("\n", "; ")),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
        }
        if self.format_ == JSON:
            return strictjson.dumps(fields)
        msg = strictjson.dumps(fields["msg"])
        return f'time="{fields["time"]}" level={fields["level"]} msg={msg}'


def start(format_: str) -> None:
    """Write the records of this program to standard error in *format_*."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(format_))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_OTHERS)
    logging.getLogger("gpunode").setLevel(logging.INFO)
