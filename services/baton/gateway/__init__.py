"""The front door: owns requests from their receipt to their last token. Rank 4; only `main.py` touches `wire`
and `store`."""
