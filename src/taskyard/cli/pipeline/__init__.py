"""`taskyard pipeline`: its subcommands, a module each. They import Spark only when they run."""
