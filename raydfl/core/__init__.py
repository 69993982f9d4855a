"""Values, numbers and files that every other room uses: types, tensors, errors, seeds, metrics, options, operators.

Imports no other room. Begin with types.py, tensors.py and errors.py.
"""
