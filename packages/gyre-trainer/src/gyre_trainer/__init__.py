"""Megatron training cells, the execution-level GSPO objective, weight movement, and rollout engines.

Importing this package imports no torch: the driver uses `rows`, `stream`, `settings` and `cells`, and the
processes that compute use the rest.
"""
