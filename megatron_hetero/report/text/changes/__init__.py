"""Comparisons of plans, and plans on changed clusters, for a terminal.

differences  the differences of two plans
replan       the gain of a new plan at measured speeds
replanning   ways to go on with a plan on a changed cluster
additions    machines to add to a cluster first
"""
