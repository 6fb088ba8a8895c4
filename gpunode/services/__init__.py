# SPDX-License-Identifier: Apache-2.0
"""The services of the node: each connects the watcher, derivations and adapters."""
