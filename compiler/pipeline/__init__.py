"""The one list of rewrites, their order checked, those from elsewhere; plans and graphs as text."""
