"""A fused program or region seen by a generator, for no target: phases, values, spaces."""
