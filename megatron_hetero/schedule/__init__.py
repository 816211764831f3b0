"""The programme of every pipeline rank as data, its deadlock check and its simulation."""
