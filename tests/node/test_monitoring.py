# SPDX-License-Identifier: Apache-2.0
"""The alert rules and the dashboard of deploy/monitoring."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_packages
import pytest
import yaml

from gpunode import metric_table as table

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
ALERTS = MONITORING / "alerts.yaml"
OURS = {metric.name for metric in (*table.DEVICE_METRICS, *table.OWN_METRICS)}
# Metrics of Prometheus itself and of kube-state-metrics.
OTHERS = {"up", "kube_node_status_allocatable", "kube_node_status_capacity"}
NAME = re.compile(r"\b(?:DCGM_|gpu_node_|kube_|up\b)[A-Za-z0-9_]*")


@pytest.fixture(scope="module")
def checker() -> Path:
    """Return the path of promtool."""
    path = image_packages.ROOT / "prometheus" / "usr/bin/promtool"
    if not path.exists():
        pytest.skip("build/image-packages/prometheus is not there: run `make image-packages`")
    return path


def expressions() -> Iterator[str]:
    """Yield the expressions of the rules and of the dashboard."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    dashboard: Any = json.loads((MONITORING / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield re.sub(r"label_values\((.*), \w+\)", r"\1", variable["query"])


def test_every_metric_exists() -> None:
    """In the exporter's table, or in the named programs."""
    used = {name for text in expressions() for name in NAME.findall(text)}
    assert used - OTHERS <= OURS
    assert used & OURS


def test_expressions_are_valid(tmp_path: Path, checker: Path) -> None:
    """Those of the dashboard too, with its variables replaced."""
    rules = [
        {"record": f"check:{number}", "expr": re.sub(r"\$\w+", ".*", text)}
        for number, text in enumerate(expressions())
    ]
    checked = tmp_path / "rules.yaml"
    checked.write_text(yaml.safe_dump({"groups": [{"name": "check", "rules": rules}]}))
    for path in (ALERTS, checked):
        done = subprocess.run(
            [checker, "check", "rules", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# The series of an alert that fires, and of one that does not.
ALARMS = {
    "GpuIdle": ('gpu_node_idle_seconds{pod="p"}', "4000", "60"),
    "GpuUnderused": ('DCGM_FI_DEV_GPU_UTIL{pod="p"}', "1", "90"),
    "GpuXid": ("DCGM_FI_DEV_XID_ERRORS", "79", "0"),
    "GpuHot": ("DCGM_FI_DEV_GPU_TEMP", "90", "60"),
    "GpuRowRemapFailed": ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "1", "0"),
    "GpuDriverDown": ("gpu_node_driver_up", "0", "1"),
    "GpuTelemetryStale": ("gpu_node_telemetry_age_seconds", "600", "5"),
    "GpuPodMappingDown": ("gpu_node_pod_mapping_up", "0", "1"),
    "GpuExporterDown": ('up{job="gpu-node"}', "0", "1"),
}


def test_alerts_fire(tmp_path: Path, checker: Path) -> None:
    """Each after its time, and not for a normal value."""
    cases = []
    for is_bad in (True, False):
        series = [
            {"series": name, "values": f"{bad if is_bad else good}+0x180"}
            for name, bad, good in ALARMS.values()
        ]
        cases.append(
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f"count(ALERTS{{alertname='{alert}', alertstate='firing'}}) "
                        "or vector(0)",
                        "eval_time": "170m",
                        "exp_samples": [{"labels": "{}", "value": int(is_bad)}],
                    }
                    for alert in ALARMS
                ],
            }
        )
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": cases}))
    done = subprocess.run(
        [checker, "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
