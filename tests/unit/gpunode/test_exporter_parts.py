# SPDX-License-Identifier: Apache-2.0
"""The collectors file, the text format, and idle times."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpunode import collectors, exposition
from gpunode import metric_table as table
from gpunode.idle import UTILIZATION, IdleTimes
from gpunode.metric_table import Metric
from gpunode.metrics import Family
from gpunode.model import GpuTelemetry, Process, Telemetry
from gpuruntime.errors import ConfigError


def test_a_collectors_file_selects_metrics_and_labels() -> None:
    """In its order and with its help texts; what only DCGM measures is left out with a warning."""
    selected = collectors.parse(
        "# a comment\n\n"
        'DCGM_FI_DEV_POWER_USAGE, gauge, "Power, in W"\n'
        "DCGM_FI_DEV_GPU_TEMP,gauge,Heat\n"
        "DCGM_FI_DRIVER_VERSION, label, Driver\n"
        "DCGM_FI_PROF_DRAM_ACTIVE, gauge, Memory\n"
        "DCGM_FI_DEV_STRANGE, gauge, What is it\n",
        "c.csv",
    )
    assert [(one.name, one.help) for one in selected.metrics] == [
        ("DCGM_FI_DEV_POWER_USAGE", "Power, in W"),
        ("DCGM_FI_DEV_GPU_TEMP", "Heat"),
    ]
    assert selected.labels == ("DCGM_FI_DRIVER_VERSION",)
    assert [text.partition(":")[0] for text in selected.warnings] == [
        '"c.csv", line 6',
        '"c.csv", line 7',
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("DCGM_FI_DEV_GPU_TEMP, gauge", "line 1: 2 columns, not 3"),
        ("DCGM_FI_DEV_GPU_TEMP, gauge, a, b", "line 1: 4 columns"),
        ("DCGM_FI_DEV_GPU_TEMP, histogram, a", 'unknown type "histogram"'),
        ("NVML_TEMP, gauge, a", 'unknown field "NVML_TEMP"'),
        ("DCGM_FI_DEV_GPU_TEMP, label, a", "is not a label"),
        ("DCGM_FI_DRIVER_VERSION, gauge, a", "is a label"),
        ("DCGM_FI_DEV_GPU_TEMP, gauge, a\nDCGM_FI_DEV_GPU_TEMP, gauge, a", "line 2: "),
    ],
)
def test_errors_of_a_collectors_file(line: str, message: str) -> None:
    """Each names the line."""
    with pytest.raises(ConfigError) as error:
        collectors.parse(line + "\n", "c.csv")
    assert message in error.value.message
    assert error.value.hint


@pytest.mark.parametrize("kind", ["missing", "directory", "large", "binary"])
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    """One error line."""
    path = tmp_path / "c"
    if kind == "directory":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"#" * (collectors.MAX_BYTES + 1))
    elif kind == "binary":
        path.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="cannot use the collectors file"):
        collectors.read(str(path))


@given(st.text(), st.text(), st.floats(allow_nan=False))
def test_any_text_is_escaped(help_: str, value: str, number: float) -> None:
    """Complaint 28: the scrape parses, whatever a GPU is called."""
    metric = Metric("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", table.COUNTER, help_, "")
    written = exposition.text([Family(metric, (({"modelName": value}, number),))])
    (family,) = text_string_to_metric_families(written.decode())
    assert family.type == "counter"
    (sample,) = family.samples
    assert sample.labels == {"modelName": value}
    assert sample.value == number


def test_every_metric_has_one_name() -> None:
    """And a source."""
    metrics = (*table.DEVICE_METRICS, *table.LABELS, *table.OWN_METRICS)
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    assert all(metric.source and metric.help for metric in metrics)


def test_idle_times() -> None:
    """From the last measurement in which the device was used, or from the first one."""

    def telemetry(utilization: int, *, has_process: bool, age: float = 0.0) -> Telemetry:
        processes = (Process(7),) if has_process else ()
        return Telemetry(
            age,
            (
                GpuTelemetry("GPU", {UTILIZATION: utilization}, processes),
                GpuTelemetry("MIG", {}, processes),
            ),
        )

    idle = IdleTimes()
    idle.observe(telemetry(0, has_process=False), 10.0)
    idle.observe(telemetry(0, has_process=True, age=1.0), 21.0)
    assert idle.seconds(30.0) == {"GPU": 20.0, "MIG": 10.0}
    idle.observe(telemetry(5, has_process=False), 30.0)
    assert idle.seconds(32.0) == {"GPU": 2.0, "MIG": 12.0}
    idle.observe(Telemetry(0.0, ()), 33.0)
    assert idle.seconds(34.0) == {}


def test_the_page_has_every_metric() -> None:
    """With its type, meaning and source; and what is missing, with the reason."""
    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
    for metric in (*table.DEVICE_METRICS, *table.OWN_METRICS):
        row = f"| `{metric.name}` | {metric.type} | {metric.help} | {metric.source} |"
        assert row in page
    for name, reason in table.UNAVAILABLE.items():
        assert f"| `{name}` | {reason} |" in page
