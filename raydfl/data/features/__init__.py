"""From recordings to features, and the cache in which they lie.

Begin with kinds.py (which kinds there are), extraction.py (making them) and cache.py (keeping them).
"""
