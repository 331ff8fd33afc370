"""A plan opened and driven over data: ports, devices, stop, save, report."""
