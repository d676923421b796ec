"""Consumer groups: who owns which partition, where each one is, and a fence in every write."""
