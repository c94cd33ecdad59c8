"""The storm: seeded faults under load on a simulated cluster, followed by checks of all invariants.

`python -m baton.sim.chaos --seed N` replays a seed. Two runs with the same seed produce the same transcript.
"""
