# SPDX-License-Identifier: Apache-2.0
"""The configuration of the services of a node: config file v1, environment, command line."""
