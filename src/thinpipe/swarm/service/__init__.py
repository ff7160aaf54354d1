"""`thinpipe service`: a hub or a joined machine that comes back after a reboot, by the system's own means."""
