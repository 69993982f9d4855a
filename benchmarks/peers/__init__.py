"""The contestants compared with raydfl, and their common work."""
