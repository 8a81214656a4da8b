"""`steelyard mock`: a local server with a simulated model."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import click

from steelyard.cli.click_types import SHARE
from steelyard.cli.output import say, show
from steelyard.cli.run_control import SERVER, loop_factory, raise_limit
from steelyard.mock.options import MockOptions
from steelyard.mock.server import MockServer

_SNIPPET = """serving; Ctrl-C ends it, {url}/stats shows what it received. In a suite file, one of:

  target: {{openai-chat: {{model: {model}, base_url: "{url}/v1"}}}}
  target: {{openai-responses: {{model: {model}, base_url: "{url}/v1"}}}}
  target: {{openai-completions: {{model: {model}, base_url: "{url}/v1"}}}}
  target: {{anthropic-messages: {{model: {model}, base_url: "{url}"}}}}
  target: {{gemini: {{model: {model}, base_url: "{url}"}}}}
  target: {{bedrock: {{model: {model}, base_url: "{url}"}}}}
"""


@click.command("mock")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=0, help="Port to listen on [default: a free one].")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything random.")
@click.option("--latency", default="0ms", show_default=True, help="Time to first token: 200ms, normal:200ms,50ms, ...")
@click.option("--tokens-per-second", help="Speed after the first token: 80, uniform:40,90, ... [default: all at once].")
@click.option("--chunk-interval", help="The same, as the time between two tokens: 5ms, ...")
@click.option(
    "--output-tokens", default="16", show_default=True, help="Length of an answer: 64, lognormal:100,0.5, ..."
)
@click.option("--reasoning-tokens", default="0", show_default=True, help="Tokens of reasoning before the answer.")
@click.option("--max-concurrency", type=int, metavar="N", help="Answer 429 above N requests at once.")
@click.option("--slots", type=int, metavar="N", help="Answer N requests at once; queue the others.")
@click.option("--rate", metavar="N/UNIT", help="Answer 429 above a rate: 10/s, 600/min.")
@click.option(
    "--retry-after",
    metavar="SECONDS",
    help="The wait that a 429 asks for [default: until the rate allows a call, or 1].",
)
@click.option("--error-rate", type=SHARE, default=0.0, help="Share of requests answered with 500.")
@click.option("--drop-rate", type=SHARE, default=0.0, help="Share whose connection is closed without a byte.")
@click.option("--torn-rate", type=SHARE, default=0.0, help="Share of answers that break off in the middle.")
@click.option("--slow-first-rate", type=SHARE, default=0.0, help="Share whose first token takes --slow-first longer.")
@click.option("--slow-first", default="5s", show_default=True, help="How much longer.")
@click.option(
    "--tool-call-rate", type=SHARE, default=0.0, help="Share answered with a tool call, if the request has tools."
)
@click.option("--refusal-rate", type=SHARE, default=0.0, help="Share that is refused.")
@click.option("--no-usage", is_flag=True, help="Report no token counts.")
@click.option("--key", help="The API key that requests must have; otherwise 401.")
@click.option("-m", "--model", "models", multiple=True, help="Name of a model; others are 404. Repeatable.")
@click.option(
    "--answers", type=click.Path(path_type=Path), help="JSONL of prompts and answers, such as a suite's cases."
)
@click.option("--right-rate", type=SHARE, default=1.0, show_default=True, help="Share of --answers that are right.")
def command(no_usage: bool, **options: Any) -> int:
    """Serve the APIs of OpenAI, Anthropic, Gemini and Bedrock on this machine, with a simulated model behind them.

    Prints the base URL on stdout. Everything random depends only on the seed and the request, so that a request gets
    the same answer whatever the order of arrival.
    """
    server = MockServer(MockOptions(usage=not no_usage, **options))
    raise_limit(SERVER)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(server))
    return 0


async def _serve(server: MockServer) -> None:
    """Serve until a signal comes; that is how a server ends, so it is no failure."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with server:
        show(server.base_url)
        sys.stdout.flush()
        say(_SNIPPET.format(url=server.url, model=server.options.models[0] if server.options.models else "mock"))
        await stopped.wait()
        stats = server.stats()
    say(f"{stats['requests']:,} requests, at most {stats['peak_concurrency']:,} at once")
