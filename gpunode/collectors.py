# SPDX-License-Identifier: Apache-2.0
"""The collectors file of the exporter: which metrics a scrape has, in dcgm-exporter's format.

A line is `FIELD, TYPE, HELP`; `#` begins a comment. Fields that only DCGM can measure are left out
with a warning, so that the default file of dcgm-exporter can be used.
"""

from __future__ import annotations

import csv
import difflib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpunode import metric_table as table
from gpunode.metric_table import Metric
from gpuruntime.errors import ConfigError

MAX_BYTES = 1 << 20
_PREFIXES = ("DCGM_FI_", "DCGM_EXP_")


@dataclass(frozen=True, slots=True)
class Collectors:
    """The metrics and labels of a scrape, and *warnings* about fields that are left out."""

    metrics: tuple[Metric, ...] = table.DEVICE_METRICS
    labels: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read(path: str) -> Collectors:
    """Return what the collectors file *path* selects; raise ConfigError, with the line."""
    try:
        # O_NONBLOCK: a FIFO must not block us.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _unusable(path, "not a regular file")
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    if len(data) > MAX_BYTES:
        raise _unusable(path, f"larger than {MAX_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _unusable(path, f"not UTF-8 at byte {error.start}") from error
    return parse(text, path)


def parse(text: str, path: str) -> Collectors:
    """Return what *text*, that of the file *path*, selects; raise ConfigError, with the line."""
    selectable = {metric.name: metric for metric in (*table.DEVICE_METRICS, *table.LABELS)}
    metrics: dict[str, Metric] = {}
    labels: list[str] = []
    warnings = []
    for number, name, type_, help_ in _rows(text, path):
        where = f'"{path}", line {number}'
        if name in metrics or name in labels:
            raise ConfigError(f"{where}: {name} is there twice", "remove one of the lines")
        if name in selectable and type_ == table.LABEL:
            if selectable[name].type != table.LABEL:
                raise ConfigError(f"{where}: {name} is not a label", 'write "gauge" or "counter"')
            labels.append(name)
        elif name in selectable and selectable[name].type != table.LABEL:
            metrics[name] = replace(selectable[name], type=type_, help=help_)
        elif name in selectable:
            raise ConfigError(f"{where}: {name} is a label", 'write "label" as its type')
        elif name in table.UNAVAILABLE:
            warnings.append(f"{where}: {name} is left out: {table.UNAVAILABLE[name]}")
        elif name.startswith(_PREFIXES):
            warnings.append(f"{where}: {name} is left out: NVML does not report it")
        else:
            near = difflib.get_close_matches(name, selectable, 1)
            raise ConfigError(
                f'{where}: unknown field "{name}"',
                f"did you mean {near[0]}?" if near else "see docs/reference/metrics.md",
            )
    return Collectors(tuple(metrics.values()), tuple(labels), tuple(warnings))


def _rows(text: str, path: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield the number, field, type and help text of each line that is not a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        columns = [column.strip() for column in next(csv.reader([line], skipinitialspace=True))]
        if len(columns) != 3:
            raise ConfigError(
                f'"{path}", line {number}: {len(columns)} columns, not 3',
                'write "FIELD, TYPE, HELP"',
            )
        name, type_, help_ = columns
        if type_ not in (table.GAUGE, table.COUNTER, table.LABEL):
            raise ConfigError(
                f'"{path}", line {number}: unknown type "{type_}"',
                "use gauge, counter or label",
            )
        yield number, name, type_, help_


def _unusable(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f'cannot use the collectors file "{path}": {problem}', 'name a file with "--collectors"'
    )
