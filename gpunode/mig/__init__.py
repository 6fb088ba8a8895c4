# SPDX-License-Identifier: Apache-2.0
"""Change the MIG layout of GPUs.

`writer` starts the one process that calls NVML for it, whose program is `child` with the calls of
`operations`. `engine` applies a config through it: all plans before the first step, a `journal`
for a crash, and a second look at the end.
"""
