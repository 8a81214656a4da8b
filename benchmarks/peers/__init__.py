"""The same jobs for Steelyard and its neighbours, each from its package index in an environment of its own."""
