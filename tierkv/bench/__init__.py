"""Benchmarks: how fast the daemon is on this machine, against what the machine can do"""
