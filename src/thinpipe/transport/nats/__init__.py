"""Process groups over a NATS server: every process makes outgoing TLS connections to one address only."""
