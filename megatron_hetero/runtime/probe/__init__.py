"""Measure the model's pieces and the machine, so that plans stand on measurements."""
