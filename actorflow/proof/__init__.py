"""What a plan is asked before it runs here, wherever it comes from.

prove      all of it, in order: the one function that every road to a run calls
launches   each launch again through its op's types and its kernel's needs
anatomy    the actors, fields and variables that a run binds by name
"""
