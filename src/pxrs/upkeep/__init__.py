"""Upkeep of a hub."""
