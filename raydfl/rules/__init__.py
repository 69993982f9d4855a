"""Aggregation rules, one file each: the file's name is the rule's name in a configuration (``method.rule: krum``).

Files that begin with an underscore hold what the rules share. All of it is imported from :mod:`raydfl.aggregate`.
"""
