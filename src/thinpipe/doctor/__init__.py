"""`thinpipe doctor`: checks of this machine, of a run's settings and of the connection to a hub."""
