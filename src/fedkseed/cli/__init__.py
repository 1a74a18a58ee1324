"""All commands, a file for each family."""
