"""The run on disk: append and group commit, recovery, manifest, lock, states."""
