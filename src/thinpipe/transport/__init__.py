"""How bytes move between processes: c10d groups, and a home line for each process of a group that has none.

Knows nothing of models or pipelines. Import from the modules: `settings` needs no torch.
"""
