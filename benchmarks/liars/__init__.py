"""Peers that lie, each a real `thinpipe join` with one function replaced: at which step a run notices, and by what."""
