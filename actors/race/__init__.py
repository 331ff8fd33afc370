"""Which firing happens before which, and the accesses that nothing orders."""
