"""Utilities that every package shares: errors, events, files, locks, seeds, units. Imports no other thinpipe package
and no torch."""
