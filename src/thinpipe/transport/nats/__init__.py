"""Process groups over a NATS server: everybody dials out to one address, over TLS."""
