# SPDX-License-Identifier: Apache-2.0
"""The command line `gpuruntime`: one module for each command."""
