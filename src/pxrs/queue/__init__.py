"""The transactional work queue: jobs taken and put together or not at all, over any registry."""
