"""Elastic rollout/training scheduling as a pure state machine, its simulator, and its live runtime"""
