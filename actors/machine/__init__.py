"""The pure machine.

Transitions, table, state, story; and the protocols of launches, devices, transports.
"""
