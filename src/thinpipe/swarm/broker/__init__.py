"""The nats-server process of a hub: its configuration, certificate and credentials."""
