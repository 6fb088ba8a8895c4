# SPDX-License-Identifier: Apache-2.0
"""The launcher, a static C program, and the modules that write the files it decides by."""
