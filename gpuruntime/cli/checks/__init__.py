# SPDX-License-Identifier: Apache-2.0
"""The checks of `gpuruntime doctor`: what is wrong with a host; reads only."""
