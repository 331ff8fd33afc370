"""SBP: how a tensor of all ranks lies on each of them, and what ops make of that."""
