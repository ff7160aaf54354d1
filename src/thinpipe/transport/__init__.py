"""Transport of bytes between processes: c10d process groups over gloo and NATS, collectives, and link emulation.

Independent of models and pipelines. Import from the submodules: some of them need no torch.
"""
