"""The command line gyre: train, inspect, simulate, serve and report"""
