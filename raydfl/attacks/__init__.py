"""The built-in attacks: one file each, whose name is the attack's name in a configuration."""
