"""Stands in for `vllm.entrypoints.openai.api_server`: the same addresses and shapes, tokens made up from the prompt.

Standard library only: `tests/fake_vllm.py` puts it where Python finds a package called vllm. The variable FAKE_VLLM is
JSON: `start_seconds`, `fail` (written to standard error, and the end), `die_after` (streamed events), `token_seconds`,
`worker` (a file for the pid of a process it starts and leaves behind).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SETTINGS = json.loads(os.environ.get("FAKE_VLLM", "{}"))
OPTIONS = dict(zip(sys.argv[1::1], sys.argv[2::1], strict=False))
SPECULATION = json.loads(OPTIONS.get("--speculative-config", "null"))
DEPTH = (SPECULATION or {}).get("num_speculative_tokens", 0)
DETAILED = OPTIONS.get("--per-request-spec-decode-metrics") == "detailed" and DEPTH
NAME = OPTIONS.get("--served-model-name", OPTIONS.get("--model"))
LOCK = threading.Lock()
LOADED = []  # drafters, after that of the start
COUNTS = {"drafts": 0, "accepted": [0] * DEPTH, "prompt": 0, "output": 0, "running": 0, "aborted": 0, "steps": 0}


def steps(prompt: list[int], max_tokens: int):
    """Token ids step by step: the first alone, then rounds that accept all, then none, of their drafts."""
    tokens = [(sum(prompt) + i) % 40 + 3 for i in range(max_tokens)]
    yield tokens[:1], None
    at, accepted = 1, DEPTH
    while at < max_tokens:
        yield tokens[at : at + accepted + 1], accepted if DEPTH else None
        at += accepted + 1
        accepted = DEPTH - accepted


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def address_string(self):
        return "local"

    def do_GET(self):
        if self.path == "/metrics":
            self.send(self.metrics().encode(), "text/plain")
        elif self.path == "/v1/models":
            self.send({"object": "list", "data": [{"id": NAME, "object": "model", "max_model_len": 512}]})
        elif self.path == "/argv":
            told = {"argv": sys.argv[1:], "key": os.environ.get("VLLM_API_KEY")}
            self.send({**told, "drafter": LOADED[-1]} if LOADED else told)
        elif self.path in ("/health", "/version"):
            self.send({"version": "0.32.0"})
        else:
            self.send({"error": {"message": "Not Found"}}, status=404)

    def metrics(self) -> str:
        with LOCK:
            lines = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {COUNTS["drafts"]}.0']
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {count}.0'
                for i, count in enumerate(COUNTS["accepted"])
            ]
            lines += [
                f"vllm:generation_tokens_total {COUNTS['output']}",
                f"vllm:prompt_tokens_total {COUNTS['prompt']}",
            ]
            lines += [f"vllm:iteration_tokens_total_count {COUNTS['steps']}.0"]
            lines += [f"vllm:num_requests_running {COUNTS['running']}", "python_info 1", "# HELP vllm:x X."]
        return "\n".join(lines) + "\n"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/fledge/drafter":
            self.load_drafter(body)
            return
        self.asked = {"body": body, "headers": dict(self.headers.items())}
        if body.get("model") not in (None, NAME):
            self.send({"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}, status=404)
            return
        is_chat = "messages" in body
        prompt = [len(m["content"]) for m in body["messages"]] if is_chat else body["prompt"]
        prompt = prompt if isinstance(prompt, list) else list(prompt.encode())
        with LOCK:
            COUNTS["prompt"] += len(prompt)
            COUNTS["running"] += 1
        try:
            self.answer(body, is_chat, prompt)
        except OSError:
            with LOCK:
                COUNTS["aborted"] += 1
        finally:
            with LOCK:
                COUNTS["running"] -= 1

    def load_drafter(self, body):
        """As vllm_process/extension does."""
        if self.headers.get("x-fledge-token") != os.environ.get("FLEDGE_DRAFTER_TOKEN", "none"):
            self.send({"error": {"message": "Not Found"}}, status=404)
        elif body["directory"].endswith("damaged"):
            self.send({"error": {"message": "ValueError: damaged"}}, status=500)
        else:
            LOADED.append(body["directory"])
            self.send({})

    def answer(self, body, is_chat, prompt):
        made, rounds, told = [], [], 0
        stream = body.get("stream", False)
        if stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        limit = body.get("max_tokens") or 16
        stops = set(body.get("stop_token_ids") or ())
        finish = None
        for tokens, accepted in steps(prompt, limit):
            time.sleep(SETTINGS.get("token_seconds", 0.0))
            stop = next((i for i, token in enumerate(tokens) if token in stops), None)
            tokens = tokens if stop is None else tokens[: stop + 1]  # noqa: PLW2901
            made += tokens
            finish = "stop" if stop is not None else "length" if len(made) == limit else None
            if accepted is not None:
                rounds.append(accepted)
            with LOCK:
                COUNTS["output"] += len(tokens)
                COUNTS["steps"] += 1
                if accepted is not None:
                    COUNTS["drafts"] += 1
                    for depth in range(accepted):
                        COUNTS["accepted"][depth] += 1
            if stream:
                text = "".join(chr(60 + token) for token in tokens)
                part = {"delta": {"content": text}} if is_chat else {"text": text}
                choice = {"index": 0, **part, "finish_reason": finish, "stop_reason": None}
                if body.get("return_token_ids"):
                    choice["token_ids"] = tokens
                self.event({"id": "x", "model": NAME, "choices": [choice]})
                told += 1
                if told == SETTINGS.get("die_after"):
                    print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
            if finish is not None:
                break
        ends = {"usage": {"prompt_tokens": len(prompt), "completion_tokens": len(made), "total_tokens": 0}}
        if DETAILED:
            details = {"per_step_accepted": rounds, "per_step_drafted": [DEPTH] * len(rounds)}
            ends["metrics"] = {"speculative_decoding": details}
        if stream:
            if (body.get("stream_options") or {}).get("include_usage"):
                self.event({"id": "x", "model": NAME, "choices": [], **ends})
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")
            return
        text = "".join(chr(60 + token) for token in made)
        part = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {"index": 0, **part, "finish_reason": finish, "token_ids": made}
        self.send({"id": "x", "model": NAME, "choices": [choice], **ends, "asked": self.asked})

    def event(self, value):
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def send(self, body, kind="application/json", status=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True

    def server_bind(self):
        self.socket.bind(self.server_address)


if __name__ == "__main__":
    if "worker" in SETTINGS:
        worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        with open(SETTINGS["worker"], "w") as file:
            file.write(str(worker.pid))
    print("(APIServer pid=1) INFO 11-16 05:49:06 [model.py:1] Resolved architecture", flush=True)
    if "fail" in SETTINGS:
        sys.exit(SETTINGS["fail"])
    time.sleep(SETTINGS.get("start_seconds", 0.0))
    Server(OPTIONS["--uds"], Handler).serve_forever()
