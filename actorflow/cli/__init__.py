"""The command line: `main` has the commands, each larger one its own file."""
