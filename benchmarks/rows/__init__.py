"""What is compared: one file per model family with sizes, first weights, data and optimizer.

Only numpy is imported here, for every engine reads these files in an environment of its own.
"""
