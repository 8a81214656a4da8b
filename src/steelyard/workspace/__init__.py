"""A folder per case for agents: made from a template, handed to the target, copied for graders, kept by rule."""
