"""A module for each section of the check; `run(found, place)` is what its process does."""
