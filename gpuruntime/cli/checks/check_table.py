# SPDX-License-Identifier: Apache-2.0
"""The table of checks, in the order of `--json`: from the driver up to the surroundings."""

from __future__ import annotations

from gpuruntime.cli.checks import (
    driver_checks,
    engines,
    nodes,
    oci_hooks,
    platform_checks,
    spec_fresh,
    specs,
    surroundings,
    toolkits,
)
from gpuruntime.cli.checks.run import Check

CHECKS: dict[str, Check] = {
    "platform": platform_checks.platform,
    "module": driver_checks.module,
    "versions": driver_checks.versions,
    "libraries": driver_checks.libraries,
    "files": driver_checks.files,
    "loader-cache": driver_checks.loader_cache,
    "answer": driver_checks.answer,
    "gpus": driver_checks.models,
    "sharing": surroundings.sharing,
    "daemons": driver_checks.sockets,
    "nodes": nodes.nodes,
    "modes": nodes.modes,
    "mig": nodes.mig,
    "dev-char": nodes.dev_char,
    "params": nodes.params,
    "config": toolkits.config,
    "snapshot": toolkits.snapshot,
    "hook-messages": toolkits.hook_messages,
    "spec-dirs": specs.directories,
    "specs": specs.files,
    "spec-fresh": spec_fresh.fresh,
    "spec-readers": specs.readable,
    "spec-hooks": specs.hooks,
    "engines": engines.engines,
    "oci-hooks": oci_hooks.check,
    "pods": engines.pods,
    "rootless": engines.rootless,
    "swarm": engines.swarm,
    "builds": engines.builds,
    "open-files": engines.limits,
    "toolkits": toolkits.toolkits,
    "runtime": toolkits.loop,
    "ldconfig": toolkits.ldconfig,
    "bytecode": toolkits.bytecode,
    "user-namespace": toolkits.namespace,
    "selinux": surroundings.selinux,
    "metrics": surroundings.metrics,
    "packages": surroundings.packages,
}
