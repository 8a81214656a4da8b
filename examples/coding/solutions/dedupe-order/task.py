def dedupe(items):
    """The items without repetitions, in their order."""
    return list(dict.fromkeys(items))
