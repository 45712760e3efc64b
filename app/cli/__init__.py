"""The command line: commands parse and print, and import nothing heavy before one runs."""
