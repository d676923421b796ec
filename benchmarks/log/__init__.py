"""What the log costs: 100-byte values, 1,000 keys, 8 partitions, durable, against references in the same run."""
