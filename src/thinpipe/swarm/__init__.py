"""A run that people join from their own machines: the broker everybody dials out to, its keys, certificate and members.

Knows nothing of models. Import from the modules; what needs the extra `swarm` is imported when it is used.
"""
