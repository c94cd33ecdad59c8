"""Load generator and judge: it plans a workload, offers it through the front door, and reports what a client
saw.

Of `baton` it imports only the generated messages of `baton.v1`.
"""
