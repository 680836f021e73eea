"""Megatron training cells, the execution-level GSPO objective, weight movement, and rollout engines"""
