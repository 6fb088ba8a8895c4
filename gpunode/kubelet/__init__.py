# SPDX-License-Identifier: Apache-2.0
"""The kubelet's protocols over unix sockets: servers, clients, registration."""
