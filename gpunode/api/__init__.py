# SPDX-License-Identifier: Apache-2.0
"""The API server: the objects of this node that the services read and write, by lightkube."""
