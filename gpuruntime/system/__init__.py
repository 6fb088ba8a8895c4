# SPDX-License-Identifier: Apache-2.0
"""Work below a container's root: paths, mounts, the loader's files, confinement, system calls."""
