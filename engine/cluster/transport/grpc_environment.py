"""What gRPC's library reads from the environment when it is first used; it can be told in no other way."""

from __future__ import annotations

ONLY_TLS_1_3 = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES128-GCM-SHA256"}
"""Of the suites of older versions this leaves one, which a node's P-256 certificate cannot be used with."""
