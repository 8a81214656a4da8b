def parse(text):
    """`a=1;b=2` as a dictionary."""
    return dict(pair.split("=", 1) for pair in text.split(";") if pair)
