"""The steps from a list of clips to the clients: each is a pure function from tables to tables, with its settings beside it.

A step gets and returns an ``Assignment``: a table of clips and a table of clients. It adds columns, or leaves rows out.
raydfl.data.build names the steps in their order. Begin with listing.py.
"""
