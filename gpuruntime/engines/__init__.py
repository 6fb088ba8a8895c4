# SPDX-License-Identifier: Apache-2.0
"""What container engines must be told of our runtime: their config files, edited and undone."""
