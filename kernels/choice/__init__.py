"""Choices by measurement: several ways are right, and which is the fastest is timed once on the card and kept.

`chooser` says when to measure and what serves meanwhile, `store` keeps what was found on disk, `replays` times graphs
of launches beside each other. What is chosen, and what it depends on, is the user's (`linear/choices.py`: how linears
of one input run; `mhc/cuda/tuning.py`: the plan of an mHC kernel). Nothing here raises for want of a measurement.
"""
