"""From a problem to an answer: search, plan and words.

searched   the candidate asked for, which can run
planned    the candidate as a plan with its bound
explained  the plan beside the best stock plan, and why it is good
"""
