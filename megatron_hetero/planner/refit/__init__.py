"""Placements that were found, fitted again: devices stay, everything else may change.

refit             the layers and settings of a placement chosen again, on the same devices
polish            single layers moved, each move priced
settings          a placement found under other settings, written for the job's own
optimizer_shares  shares of the optimizer's state by free memory
"""
