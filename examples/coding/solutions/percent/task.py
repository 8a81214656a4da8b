def percent(part, whole):
    """The share in percent; 0 of nothing."""
    return 100 * part / whole if whole else 0.0
