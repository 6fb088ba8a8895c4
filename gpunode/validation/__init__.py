# SPDX-License-Identifier: Apache-2.0
"""Whether a node can run pods with GPUs: one check for each component, and the files it leaves."""
