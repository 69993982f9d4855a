"""Many runs: grids (sweep/) and searches on Ray Tune (search/).

Imports runs and all below it. Begin with sweep/run.py and search/run.py.
"""
