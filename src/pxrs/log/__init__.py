"""The message log: partitioned, append-only, Arrow record batches in checksummed frames."""
