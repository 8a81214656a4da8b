"""A stand-in for a coding agent: it knows most of the bugs by heart, and misbehaves on some tasks.

It prints what it does in the shape of `claude -p --output-format stream-json --verbose`, so that its turns, tokens and
cost are read as those of a real agent.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

FIXES = {
    "a - b": "a + b",
    "items[len(items)]": "items[len(items) - 1]",
    "year % 4 == 0": "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
    "ordered[half]": "(ordered[half - 1] + ordered[half]) / 2",
    "for letter in text": "for letter in text.lower()",
    "min(low, max(value, high))": "max(low, min(value, high))",
    "range(0, len(items) - size + 1, size)": "range(0, len(items), size)",
    "items=[]": "items=None",
    'pair.split("=")': 'pair.split("=", 1)',
    "low = middle": "low = middle + 1",
    'text.split(" ")': "text.split()",
    "100 * part / whole": "100 * part / whole if whole else 0.0",
    "item if isinstance(item, list) else [item]": "flatten(item) if isinstance(item, list) else [item]",
    "number * 3": "number * 2",
    "60 / seconds": "seconds / 60",
    "number * 2": "number**2",
    "number % 2 == 1": "number % 2 == 0",
    "word[0]": "word[0].upper()",
}


def say(text, **more):
    """One turn: a line of JSON on stdout."""
    usage = {"input_tokens": 900, "output_tokens": 40}
    content = [{"type": "text", "text": text}]
    message = {"role": "assistant", "content": content, "usage": usage}
    print(json.dumps({"type": "assistant", "message": message, **more}), flush=True)


def fix(path):
    """Replace the first bug that it knows; whether it knew one."""
    code = path.read_text()
    for wrong in sorted(FIXES, key=len, reverse=True):
        if wrong in code and FIXES[wrong] not in code:
            path.write_text(code.replace(wrong, FIXES[wrong], 1))
            return True
    return False


def work(task):
    if task == "crashes":
        sys.exit("agent: out of ideas")
    if task == "edits-tests":
        Path("test_task.py").write_text("def test_nothing():\n    pass\n")
        return "I made the tests pass."
    if task == "adds-conftest":
        hook = "def pytest_collection_modifyitems(items):\n    items.clear()\n"
        Path("conftest.py").write_text(hook)
        return "The tests no longer complain."
    if task == "leaves-a-daemon":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    known = fix(Path("task.py"))
    if task == "hangs-after-fixing":
        say("Fixed. Let me think about it once more.")
        time.sleep(600)
    return "Fixed task.py." if known else "I could not find the bug."


if __name__ == "__main__":
    say(f"I read task.py: {os.path.getsize('task.py')} bytes.")
    answer = work(sys.argv[1])
    say(answer)
    usage = {"input_tokens": 1800, "output_tokens": 80}
    result = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 2, "result": answer}
    print(json.dumps({**result, "usage": usage, "total_cost_usd": 0.004}))
