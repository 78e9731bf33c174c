"""A fake model server: OpenAI's completions and chat protocol over Weft's NumPy engine.

It is an HTTP server in a process of its own, so that tests can kill it: `python
tests/fake_server.py --model FOLDER` prints its port. `--without` lists features that it lacks, and
POST /faults defines its next faults. It has one model and one thread per request.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "sk-secret-of-the-test"
# What a server may lack: token ids in prompts and answers, several choices, logprobs, scoring of
# given text, streaming, kept stop strings, completions, tokens by name, full rows, chats.
FEATURES = (
    *("prompt_ids", "ids", "n", "logprobs", "echo", "stream", "keep_stop", "completions", "names"),
    *("rows", "chat"),
)


class Gone(Exception):
    """The client has closed the connection."""


class FakeServer(ThreadingHTTPServer):
    """recorded: the bodies of requests so far. faults: one for each of the next completions."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Handler)
        import weft

        self.lm = weft.load(folder, engine="numpy")
        self.options = options
        self.faults: deque[dict[str, Any]] = deque()
        self.recorded: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.n_open = 0
        self.n_gone = 0

    def has(self, feature: str) -> bool:
        return feature not in self.options.without

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a disconnected client."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        if self.path == "/recorded":
            counts = {"n_open": self.server.n_open, "n_gone": self.server.n_gone}
            self.reply(200, {"bodies": self.server.recorded, **counts})
        elif self.path == "/v1/models" and self.server.options.ollama:
            entry = {"id": "tiny:latest", "object": "model", "owned_by": "library"}
            self.reply(200, {"data": [entry, {**entry, "id": "other:1b"}]})
        elif self.path == "/api/version" and self.server.options.ollama:
            self.reply(200, {"version": "0.12.0"})
        elif self.path == "/v1/models" and self.is_let_in():
            lm = self.server.lm
            entry = {"id": "tiny", "object": "model", "owned_by": self.server.options.owner}
            self.reply(200, {"data": [{**entry, "max_model_len": lm.n_ctx, "root": "org/tiny"}]})
        elif self.path != "/v1/models":
            self.reply(404, {"error": {"message": "no such page"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/faults":
            self.server.faults.extend(body)
            self.reply(200, {})
            return
        if not self.is_let_in():
            return
        is_chat = self.path == "/v1/chat/completions"
        if not is_chat and not (self.path == "/v1/completions" and self.server.has("completions")):
            self.reply(404, {"error": {"message": "no such page"}})
            return
        if is_chat and not self.server.has("chat"):
            self.reply(400, {"error": {"message": "the model has no chat template"}})
            return
        with self.server.lock:
            self.server.recorded.append(body)
            fault = self.server.faults.popleft() if self.server.faults else {}
            self.server.n_open += 1
        try:
            if not self.fails(fault):
                Answer(self, body, fault, is_chat=is_chat).send()
        except (Gone, BrokenPipeError, ConnectionResetError):
            self.server.n_gone += 1
            self.close_connection = True
        except Mistake as error:
            self.reply(400, {"error": {"message": str(error)}})
        except weft_errors() as error:
            self.reply(500, {"error": {"message": str(error)}})
        finally:
            self.server.n_open -= 1

    def is_let_in(self) -> bool:
        if not self.server.options.key or self.headers.get("authorization") == f"Bearer {KEY}":
            return True
        given = self.headers.get("authorization", "none")
        self.reply(401, {"error": {"message": f"not the right key: {given}"}})
        return False

    def fails(self, fault: dict[str, Any]) -> bool:
        """Answer with a fault that comes before any text."""
        kind = fault.get("kind")
        if kind == "status":
            headers = {"retry-after": fault["after"]} if "after" in fault else {}
            self.reply(fault["status"], {"error": {"message": "by order"}}, headers)
        elif kind == "redirect":
            self.reply(307, {}, {"location": fault["to"]})
        elif kind == "html":
            self.reply(200, None, raw=b"<html>a proxy's page</html>")
        elif kind == "hang":
            time.sleep(fault["seconds"])
            return False
        elif kind == "drop":
            self.close_connection = True
            self.connection.close()
        else:
            return False
        return True

    def reply(
        self, status: int, data: Any, headers: dict[str, str] | None = None, raw: bytes = b""
    ) -> None:
        payload = raw or json.dumps(data).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-type", "text/html" if raw else "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def weft_errors() -> type[Exception]:
    from weft.errors import WeftError

    return WeftError


class Mistake(Exception):
    """The server does not support this request."""


class Answer:
    """One completion, streamed or in one message, with the fault that a test has set."""

    def __init__(
        self, handler: Handler, body: dict[str, Any], fault: dict[str, Any], *, is_chat: bool
    ) -> None:
        self.handler = handler
        self.server = handler.server
        self.lm = handler.server.lm
        self.body = body
        self.fault = fault
        self.is_chat = is_chat
        self.n_sent = 0
        self.texts: dict[int, Any] = {}
        self.prompt = self.prompt_ids()
        self.names_ids = bool(body.get("return_token_ids")) and self.server.has("ids")
        self.n_top = body.get("logprobs") if self.server.has("logprobs") else None

    def prompt_ids(self) -> list[int]:
        lm, prompt = self.lm, self.body.get("prompt")
        if self.body.get("model") not in ("tiny", "tiny:latest"):
            raise Mistake(f"the model {self.body.get('model')!r} does not exist")
        if self.is_chat:
            messages = self.body["messages"]
            if messages[-1]["role"] == "assistant":
                if not self.body.get("continue_final_message"):
                    raise Mistake("the last message is the assistant's")
                ids = lm.text.encode_chat(messages[:-1])
                return [*ids, *lm.text.continuation(messages[-1]["content"])]
            return lm.text.encode_chat(messages)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            if not self.server.has("prompt_ids"):
                raise Mistake("prompt is no text")
            return prompt
        if not isinstance(prompt, str):
            raise Mistake("prompt is no text")
        return lm.text.encode(prompt, special=True)

    def send(self) -> None:
        n = int(self.body.get("n") or 1) if self.server.has("n") else 1
        if n > 1 and self.body.get("temperature", 1) == 0:
            raise Mistake("n must be 1 when using greedy sampling")
        if self.body.get("logprobs") == -1 and not self.server.has("rows"):
            raise Mistake("requested logprobs of all tokens, which is greater than max allowed: 20")
        if len(self.prompt) >= self.lm.n_ctx:
            raise Mistake(f"this model's maximum context length is {self.lm.n_ctx} tokens")
        streams = bool(self.body.get("stream")) and self.server.has("stream")
        if not streams:
            self.handler.reply(200, self.message(n))
            return
        handler = self.handler
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"6\r\n: hi\n\n\r\n")
        for choice in self.choices(n):
            self.event(json.dumps({"choices": [choice]}, ensure_ascii=False))
        self.event("[DONE]")
        handler.wfile.write(b"0\r\n\r\n")

    def event(self, text: str) -> None:
        """Send one message, or break off in the middle of it."""
        data = f"data: {text}\n\n".encode()
        kind, at = self.fault.get("kind"), self.fault.get("at", 0)
        wfile = self.handler.wfile
        if kind in ("break", "cut", "garble", "kill") and self.n_sent == at:
            if kind == "garble":
                data = b'data: {"choices": [{"index": 0, "tex\n\n'
                wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            elif kind == "break":
                wfile.write(b"%x\r\n%b" % (len(data), data[: len(data) // 2]))
            else:  # a clean end of the stream, without the end of the text
                wfile.write(b"0\r\n\r\n")
            wfile.flush()
            self.handler.close_connection = True
            with suppress(OSError):
                self.handler.connection.shutdown(2)
            raise Gone
        if kind == "slow":
            time.sleep(self.fault["seconds"])
        if self.fault.get("split"):  # bytes as a network may cut them
            for byte in data:
                wfile.write(b"1\r\n%c\r\n" % byte)
        else:
            wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.n_sent += 1

    def message(self, n: int) -> dict[str, Any]:
        """Return the completion as one message."""
        merged: dict[int, dict[str, Any]] = {}
        for choice in self.choices(n):
            first = merged.setdefault(choice["index"], choice)
            if first is choice:
                continue
            first["text"] += choice["text"]
            first["finish_reason"] = choice["finish_reason"]
            if "token_ids" in choice:
                first["token_ids"] += choice["token_ids"]
            if first.get("logprobs") and choice.get("logprobs"):
                for name, values in choice["logprobs"].items():
                    first["logprobs"][name] += values
        if self.is_chat:
            for choice in merged.values():
                choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        if self.body.get("echo") and self.server.has("echo"):
            for choice in merged.values():
                self.echo(choice)
        return {"choices": [merged[index] for index in sorted(merged)]}

    def echo(self, choice: dict[str, Any]) -> None:
        """Put the prompt before the text, with its logprobs."""
        choice["text"] = self.lm.detokenize(self.prompt) + choice["text"]
        if choice.get("logprobs"):
            logprobs = [None, *self.scored(self.prompt)]
            names = [self.lm.token_to_text(token) for token in self.prompt]
            logprobs_of_all = choice["logprobs"]
            logprobs_of_all["tokens"] = names + logprobs_of_all["tokens"]
            logprobs_of_all["token_logprobs"] = logprobs + logprobs_of_all["token_logprobs"]
            logprobs_of_all["top_logprobs"] = [None] * len(names) + logprobs_of_all["top_logprobs"]

    def scored(self, ids: Sequence[int]) -> list[float]:
        from weft import Loom

        with Loom(self.lm, [ids[0]]) as loom:
            return list(loom.measure(list(ids[1:])).logprobs)

    def choices(self, n: int) -> Iterator[dict[str, Any]]:
        """Yield the new tokens of all choices as they come."""
        from weft import Loom

        params = self.params()
        with Loom(self.lm, self.prompt) as loom:
            stream = loom.stream(n=n, **params)
            try:
                for delta in stream:
                    yield from self.choices_of(loom, delta)
            finally:
                stream.close()

    def params(self) -> dict[str, Any]:
        from weft.constraints import from_dict

        body = self.body
        known = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        known += ("repetition_penalty",)
        given = {name: body[name] for name in known if name in body}
        given["top_k"] = max(body.get("top_k", 0), 0)
        given["max_tokens"] = body.get("max_tokens", 16)
        given["temperature_first"] = True
        if body.get("logit_bias"):
            given["logit_bias"] = {int(k): v for k, v in body["logit_bias"].items()}
        if body.get("seed") is not None:
            given["seed"] = body["seed"]
        if body.get("stop") and self.server.has("keep_stop"):
            given["stop"] = body["stop"]
        forms = body.get("structured_outputs") or body
        for name, kind in (("grammar", "gbnf"), ("regex", "regex")):
            if name in forms:
                given["constraint"] = from_dict({kind: forms[name]})
        return given

    def choices_of(self, loom: Any, delta: Any) -> Iterator[dict[str, Any]]:
        ids, logprobs = list(delta.token_ids), list(delta.logprobs)
        finish = delta.finish_reason
        is_end = finish == "stop" and delta.node.terminal
        # The text that each token completes; an unfinished character waits, as servers do.
        speaking = self.texts.setdefault(delta.branch, self.lm.text.stream())
        parts = [speaking.push(token) for token in ids]
        text = speaking.flush() if finish is not None else ""
        if ids and not is_end:
            parts[-1] += text
        tokens = list(zip(ids, parts, logprobs, strict=True))
        for at, (token, part, logprob) in enumerate(tokens):
            is_last = finish is not None and at == len(tokens) - 1 and not is_end
            yield self.choice(delta.branch, [token], part, [logprob], finish if is_last else None)
        if is_end or (finish is not None and not tokens):
            end = [self.lm.eog_token] if is_end else []
            yield self.choice(delta.branch, end, "" if tokens else text, [-0.1] * len(end), finish)

    def choice(
        self, index: int, ids: list[int], text: str, logprobs: list[float], finish: str | None
    ) -> dict[str, Any]:
        if finish == "context":
            finish = "length"
        fields: dict[str, Any] = {"index": index, "finish_reason": finish}
        if self.is_chat and self.body.get("stream"):
            fields["delta"] = {"content": text}
        else:
            fields["text"] = text
        if self.names_ids:
            fields["token_ids"] = ids
        if self.n_top is not None and self.is_chat and self.n_top is not False:
            fields["logprobs"] = {
                "content": [
                    {"token": self.name(token), "logprob": logprob, "bytes": None}
                    for token, logprob in zip(ids, logprobs, strict=True)
                ]
            }
        elif self.n_top is not None and not self.is_chat:
            fields["logprobs"] = {
                "tokens": [self.name(token) for token in ids],
                "token_logprobs": logprobs,
                "top_logprobs": [
                    self.tops(token, lp) for token, lp in zip(ids, logprobs, strict=True)
                ],
            }
        return fields

    def name(self, token: int) -> str:
        if not self.server.has("names") or self.body.get("return_tokens_as_token_ids"):
            return f"token_id:{token}"
        return "" if token in self.lm.text.stop_ids else self.lm.token_to_text(token)

    def tops(self, token: int, logprob: float) -> dict[str, float]:
        """Return the token's logprob; for a probe of one token also those of the likeliest."""
        from weft import Loom

        logprobs = {self.name(token): logprob}
        if self.n_top and self.body.get("max_tokens") == 1:
            n = self.n_top if self.n_top > 0 else self.lm.info.n_vocab
            with Loom(self.lm, self.prompt) as loom:
                logprobs |= {self.name(each.id): each.logprob for each in loom.next(n)}
        return logprobs


# From tests -----------------------------------------------------------------------------------


class ServerProcess:
    """The process of a fake server. base: the address to load."""

    def __init__(self, folder: Path | str, *options: str, port: int = 0) -> None:
        command = [sys.executable, __file__, "--model", str(folder), "--port", str(port), *options]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        for name in ("WEFT_API_KEY", "OPENAI_API_KEY"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.strip().isdigit(), f"the stand-in did not start: {line!r}"
        self.port = int(line)
        self.base = f"http://127.0.0.1:{self.port}/v1"

    def fault(self, *faults: dict[str, Any]) -> None:
        """Set the faults of the next completions, one each."""
        self._ask("/faults", list(faults))

    def recorded(self) -> dict[str, Any]:
        """Return the requests so far and the numbers of connections."""
        record: dict[str, Any] = self._ask("/recorded", None)
        return record

    def bodies(self) -> list[dict[str, Any]]:
        """Return the requests for texts, without probes."""
        return [each for each in self.recorded()["bodies"] if each.get("stream")]

    def _ask(self, path: str, data: Any) -> Any:
        payload = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.base.removesuffix("/v1") + path, payload)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return json.loads(answer.read())

    def kill(self) -> None:
        """Kill the process like a crash."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def run_fake_server(folder: Path | str, *options: str, port: int = 0) -> Iterator[ServerProcess]:
    """Run a fake server until the end of the block."""
    started = ServerProcess(folder, *options, port=port)
    try:
        yield started
    finally:
        started.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--owner", default="vllm")
    parser.add_argument("--key", action="store_true")
    parser.add_argument("--ollama", action="store_true", help="list models as Ollama does")
    parser.add_argument("--without", nargs="*", default=[], choices=FEATURES)
    server = FakeServer(parser.parse_args().model, parser.parse_args())
    print(server.server_address[1], flush=True)
    # This process exits with the tests.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server.serve_forever(poll_interval=0.05)


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
