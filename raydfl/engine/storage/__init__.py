"""What a run keeps on the disk: commits, private state, the record.

Begin with store.py (commits) and private.py (clients' state).
"""
