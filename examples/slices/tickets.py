"""A small sorter of support tickets, what is measured of its answers, and a metric of the whole run."""

from steelyard import MetricValue, Score

KEYWORDS = {"invoice": "billing", "refund": "billing", "crash": "bugs", "error": "bugs", "password": "accounts"}


def sort(case):
    queue = next((queue for word, queue in KEYWORDS.items() if word in case.prompt.lower()), "other")
    return f"Thank you, this is for the queue\n{queue}" if len(case.prompt) % 3 else f"It is\n{queue}"


def shape(case, response):
    words = response.response_text.split()
    return [
        Score("words", len(words), unit="words", better="lower"),
        Score("tone", label="polite" if "Thank" in words else "plain"),
        Score("brevity", 1.0 if len(words) <= 4 else 0.5),
    ]


def hardest(records):
    """The pass rate of the hard tickets, as a stream."""
    tried = passed = 0
    for record in records:
        if record.metadata.get("difficulty") == "hard" and record.passed is not None:
            tried, passed = tried + 1, passed + record.passed
    return MetricValue(passed / tried if tried else None, better="higher", n=tried)
