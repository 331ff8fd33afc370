"""What the launches of a plan run: kernels of all targets, described, chosen and bound."""
