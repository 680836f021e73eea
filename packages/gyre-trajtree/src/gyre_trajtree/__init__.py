"""Recorded model calls to trajectory trees, roles and bounded, masked training trajectories"""
