"""One client's local work: the step that its code sees, the loop that trains, the optimiser.

Imports data and core. Begin with step.py and fit.py; together/ trains several clients in one computation.
"""
