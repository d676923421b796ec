"""A storage node: stores the entries of all its ledgers in one journal, fences ledgers, and removes garbage."""
