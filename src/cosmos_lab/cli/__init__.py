"""The command ``cosmos-lab``: its subcommands, their arguments and how those are read."""
