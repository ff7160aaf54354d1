"""Training runs that peers join over the internet through a hub: protocol, broker (nats-server), hub and peer.

`hub/` and `peer/` do not import each other, only `protocol/`. Import from the modules; packages of the extra `swarm`
are imported where they are used.
"""
