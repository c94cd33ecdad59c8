"""A nemesis: random faults on a cluster of real processes under load, with a check of every request.

    make nemesis MINUTES=30 SEED=1 [NETWORK=loopback|namespaces]

The seed decides on the requests (`clients.py`) and on the faults (`plan.py`). Each answer is compared with
the answer that the same cluster gave before the first fault (`history.py`). At the end, all resources must be
back (`resources.py`).
"""
