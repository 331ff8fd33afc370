"""Models people train, a file per family, made of actorflow's public names.

Parameters have the names and first values that the models were published with.
"""
