"""The peer of a run: joining, the training run through a hub, uploads, standby mirroring, file transfer and probes."""
