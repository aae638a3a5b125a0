"""The commands of `speclab`, a module for each group."""
