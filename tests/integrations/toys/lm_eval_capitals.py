"""Toy tasks in lm-evaluation-harness: generation with two filters by a chat API, and choices by likelihood.

    python lm_eval_capitals.py FOLDER

Run with a Python that has lm_eval[api], in an empty folder. The chat API is served here; the likelihoods are the
harness's own dummy model's. Prints, as JSON, where the samples are.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = {
    "France": "Paris",
    "Norway": "The capital is Oslo.",
    "Peru": "Cusco",
    "Japan": "Tokyo",
    "Kenya": "It is Nairobi",
}
DOCS = [
    {"country": "France", "capital": "Paris", "choices": ["Paris", "Lyon", "Nice"], "gold": 0},
    {"country": "Norway", "capital": "Oslo", "choices": ["Bergen", "Oslo", "Tromso"], "gold": 1},
    {"country": "Peru", "capital": "Lima", "choices": ["Cusco", "Arequipa", "Lima"], "gold": 2},
    {"country": "Japan", "capital": "Tokyo", "choices": ["Tokyo", "Osaka", "Kyoto"], "gold": 0},
    {"country": "Kenya", "capital": "Nairobi", "choices": ["Kisumu", "Nairobi", "Mombasa"], "gold": 1},
]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
metadata: {version: 1.0}
"""
GENERATE = """
task: capitals_gen
output_type: generate_until
doc_to_text: "Capital of {{country}}?"
doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 32}
filter_list:
  - name: strict-match
    filter: [{function: regex, regex_pattern: "^(\\\\w+)$"}, {function: take_first}]
  - name: flexible-extract
    filter: [{function: regex, regex_pattern: "([A-Z]\\\\w+)", group_select: -1}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: capitals_mc
output_type: multiple_choice
doc_to_text: "Capital of {{country}}:"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


class Chat(BaseHTTPRequestHandler):
    """A chat API that knows some capitals."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"][-1]["content"]
        text = next(answer for country, answer in ANSWERS.items() if country in asked)
        body = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def evaluate(folder, task, *more):
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(Path("hf").absolute()),
        "OPENAI_API_KEY": "none",
    }
    words = ["--tasks", task, "--include_path", ".", "--log_samples", "--output_path", folder, *more]
    ended = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words], env={**os.environ, **offline}, capture_output=True, text=True
    )
    if ended.returncode:
        sys.exit(ended.stderr)


def main(folder):
    Path("capitals.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    Path("capitals_gen.yaml").write_text(GENERATE + COMMON)
    Path("capitals_mc.yaml").write_text(CHOOSE + COMMON)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    args = f"model=toy,base_url={address},tokenized_requests=False"
    evaluate(folder, "capitals_gen", "--model", "local-chat-completions", "--model_args", args, "--apply_chat_template")
    evaluate(folder, "capitals_mc", "--model", "dummy")
    server.shutdown()
    print(json.dumps(sorted(str(path) for path in Path(folder).rglob("samples_*.jsonl"))))


if __name__ == "__main__":
    main(sys.argv[1])
