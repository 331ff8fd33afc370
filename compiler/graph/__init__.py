"""The logical graph, the registry of ops with its columns, how programs grow.

What a device and a job ask (target).
"""
