"""How a byte budget is met: launches repeated, state and activations on the host."""
