"""What things cost: closed formulas in SI units, written once for numbers, numpy arrays and sympy symbols alike.

Pricing calls them with arrays, `explain` prints them with symbols. No number of a device or a link stands here; those
live in the cluster files with their sources.

>>> import numpy as np, sympy
>>> step_time(compute=2.0, exposed=0.5, hidden=3.0)
3.5
>>> step_time(compute=np.array([2.0, 4.0]), exposed=0.5, hidden=3.0).tolist()
[3.5, 4.5]
>>> step_time(*sympy.symbols("compute exposed hidden"))
exposed + Max(compute, hidden)
"""

from autopar.solver.cost.communication import KINDS, collective, share
from autopar.solver.cost.compute import PASSES, STATE_PASSES, cast, roofline, update
from autopar.solver.cost.device import Device
from autopar.solver.cost.network import Lane, Line, Network
from autopar.solver.cost.step import peak_bytes, step_time
from autopar.solver.cost.tables import Grid, Samples

__all__ = [
    "KINDS",
    "PASSES",
    "STATE_PASSES",
    "Device",
    "Grid",
    "Lane",
    "Line",
    "Network",
    "Samples",
    "cast",
    "collective",
    "peak_bytes",
    "roofline",
    "share",
    "step_time",
    "update",
]
