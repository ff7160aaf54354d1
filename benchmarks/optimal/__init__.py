"""Studies of the keel at compute-optimal lengths: does its cost shrink with width, does it grow with boundaries?"""
