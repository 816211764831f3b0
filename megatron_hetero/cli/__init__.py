"""The command line: `main` finds the verb, and each verb has a file of its name."""
