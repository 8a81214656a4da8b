"""A small coding agent that asks its models through the gateway: a tool call, a sub-agent, then the fix.

It speaks OpenAI's chat API with nothing but the standard library. Behind the gateway may be any model; with
`steelyard mock`, which knows nothing of bugs, the fixes are those that agent.py has by heart.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from agent import fix

TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", "properties": {}}}}]


def ask(model, messages, **more):
    """One call of a model: its message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": model, "messages": messages, **more}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def main(prompt):
    messages = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": prompt}]
    reply = ask("large", messages, tools=TOOLS)
    messages.append(reply)
    for call in reply.get("tool_calls") or []:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": Path("task.py").read_text()})
    ask("small", [{"role": "user", "content": "Where is the bug?\n" + Path("task.py").read_text()}])
    known = fix(Path("task.py"))
    for step in range(int(os.environ.get("MORE_STEPS", "0"))):  # an agent that does not stop by itself
        messages.append(ask("large", messages, max_tokens=8))
        messages.append({"role": "user", "content": f"go on {step}"})
    print(ask("large", messages)["content"] if known else "I do not know this bug.")


main(sys.argv[1])
