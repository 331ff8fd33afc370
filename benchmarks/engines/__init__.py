"""One half of the comparison per engine; each runs in an environment of its own."""
