"""pxrs."""
