# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a host, check by check: for `gpuruntime doctor`. Cold; changes nothing."""
