"""One driver per peer: how its users' own client puts, gets and asks."""
