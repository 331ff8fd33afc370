"""All about several ranks.

Messages, agreement, launcher, process group, parts joined, one plan agreed on.
"""
