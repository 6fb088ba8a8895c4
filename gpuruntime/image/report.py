# SPDX-License-Identifier: Apache-2.0
"""All findings about an image, the worst first; pure."""

from __future__ import annotations

from gpuruntime.image import check_cuda, check_hiding, check_loading, check_requests
from gpuruntime.image.subject import FAILS, NOTE, WARNING, Finding, Subject

_CHECKS = (check_loading.check, check_requests.check, check_hiding.check, check_cuda.check)


def findings(subject: Subject) -> list[Finding]:
    """Return the findings about *subject*, each once."""
    all_findings = [finding for check in _CHECKS for finding in check(subject)]
    if not subject.contents.binaries:
        why = "none were found: this may not be the root file system of an image"
        all_findings.append(
            Finding(WARNING, "no programs", why, "name the directory that holds bin and usr")
        )
    all_findings += [Finding(WARNING, "not all files", limit) for limit in subject.contents.limits]
    order = (FAILS, WARNING, NOTE)
    return sorted(dict.fromkeys(all_findings), key=lambda finding: order.index(finding.level))
