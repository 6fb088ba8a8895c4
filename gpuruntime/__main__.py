# SPDX-License-Identifier: Apache-2.0
"""`python -m gpuruntime`: the command line, from a checkout."""

from gpuruntime.cli.main import main

main()
