"""Simulated attackers, to find out what a method and a rule withstand. One file an attack; its name is the name in a configuration.

Imports methods, training, data and core. Begin with label_flip.py (recordings and labels), sign_flip.py (what one client sends) and
alie.py (attackers that know each other). An attack of your own is a subclass of one of the classes below.
"""

from raydfl.attacks._attack import Attack, Cohort, ColludingAttack, UpdateAttack
from raydfl.attacks._statistics import HonestUpdates

__all__ = ["Attack", "Cohort", "ColludingAttack", "HonestUpdates", "UpdateAttack"]
