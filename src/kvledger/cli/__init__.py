"""The command line; every heavy import is inside a command."""
