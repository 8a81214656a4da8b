"""The engine over many processes and machines: Ray's actors, each with the local engine's pool inside."""
