# SPDX-License-Identifier: Apache-2.0
"""The launcher, a static C program, and the files by which it decides without Python."""
