"""A storage node: one journal for the entries of all its ledgers, fences, and the removal of garbage."""
