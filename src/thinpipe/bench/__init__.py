"""Measurements that users run on their own machines: `thinpipe bench ...`. Imports no torch until one of them runs."""
