"""`pxrs demo`, and the processes that it starts."""
