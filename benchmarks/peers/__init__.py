"""The same jobs for Steelyard and its neighbours, each from its package index in its own environment."""
