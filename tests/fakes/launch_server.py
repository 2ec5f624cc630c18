"""A program in place of ``sglang.launch_server``: same flags, same HTTP, same log lines, no model.

Standard library only, up in 0.2 s. Named in a configuration, the engine starts it like the real one:

    Config(launcher=("python3", str(Path("tests/fakes/launch_server.py").resolve())), model="any", …)

It speaks ``/health``, ``/server_info``, ``/generate`` (streams in SGLang's form, spec_* fields included), wants the
API key of its ``--config`` file, and has a child named ``sglang::scheduler``. Texts depend on the prompt alone, with
speculation or without. A tree smaller than num_draft_tokens kills it at the first generation, as SGLang 0.5.20 on the
CPU.

Environment RAYTUNE_FAKE: faults, comma-separated, each ``name`` or ``name=value``:

    exit=FILE           print FILE as the log and end with 1 (FILE:CODE for another code)
    missing_draft       a launch with speculation ends with 1, as where its draft cannot be found
    hang                say nothing, open no port, for ever
    stall               the first log lines, then like ``hang``
    never_ready         /health answers 503 for ever, while the log goes on (never_ready=KB: in lines of so many KB)
    take_port           "address already in use", then hang and ignore SIGTERM, as SGLang does
    refuse              each generation is answered with 400
    die=N               end with 1, and a traceback in the log, after N streamed chunks
    kill_scheduler=N    the scheduler child dies after N streamed chunks, the rest lives on
    drop=N              cut each Nth stream after its first chunk
    error=N             answer each Nth generation with 500
    ignore_sigterm      stay alive on SIGTERM
    grandchildren       start a child, one that called setsid, and a daemon (forked twice)
    wrong_model         /server_info names another model
    round_ms=MS         milliseconds per verify round (default 1)
    reject              accept no draft token
    garble, loop        answer with another text, with one word over and over; only with speculation
    draft_class=NAME    say that the draft was loaded as this
    say=FILE            print FILE into the log once ready
    info=FILE           /server_info says what the JSON object in FILE says
RAYTUNE_FAKE_ONCE: a path; faults apply only while it does not exist, and it is made at the first start (for retries).
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fake_tokens  # both lie beside this program
from fake_model import SERIOUS, Model, die, say

VERSION = "0.5.20"
SLEEP = "import time; time.sleep(600)"
DAEMON = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"


def faults():
    """What RAYTUNE_FAKE asks for."""
    once = Path(os.environ.get("RAYTUNE_FAKE_ONCE", "/"))  # the root is there, but nobody named it
    if once.name and once.exists():
        return {}
    if once.name:
        once.touch()
    entries = filter(None, os.environ.get("RAYTUNE_FAKE", "").split(","))
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def arguments(words):
    """Flags that matter here; all others are taken, as SGLang would."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("model-path", "host", "config", "speculative-algorithm", "speculative-draft-model-path"):
        parser.add_argument(f"--{flag}")
    for flag in ("port", *(name.replace("_", "-") for name in SERIOUS)):
        parser.add_argument(f"--{flag}", type=int)
    args, _ = parser.parse_known_args(words)
    args.api_key = None
    if args.config:
        pairs = (line.partition(":") for line in Path(args.config).read_text().splitlines())
        args.api_key = {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}.get("api-key")
    return args


class Handler(BaseHTTPRequestHandler):
    """SGLang's HTTP."""

    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, form, *args):
        """A request's line in the log."""
        say(f'INFO:     127.0.0.1:1 - "{self.requestline}" {args[1] if len(args) > 1 else ""}')

    def answer(self, code, body=None):
        """A whole answer."""
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def allowed(self):
        """Whether the request carries our key."""
        key = self.model.args.api_key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def do_GET(self):
        """Health and facts."""
        path = self.path.partition("?")[0]
        if path in ("/health", "/health_generate"):
            self.answer(503 if "never_ready" in self.model.faults else 200)
        elif not self.allowed():
            self.answer(401, {"error": "Unauthorized"})
        elif path in ("/server_info", "/get_server_info"):
            info = {**vars(self.model.args), "version": VERSION, "internal_states": [{"last_gen_throughput": 1.0}]}
            if "wrong_model" in self.model.faults:
                info["model_path"] = "/another/model"
            if "info" in self.model.faults:
                info |= json.loads(Path(self.model.faults["info"]).read_text())
            self.answer(200, info)
        else:
            self.answer(404)

    def do_POST(self):
        """Generations."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self.allowed():
            self.answer(401, {"error": "Unauthorized"})
        elif self.path.startswith("/generate"):
            self.generate(body)
        else:
            self.answer(200 if self.path.startswith("/flush_cache") else 404)

    def generate(self, body):
        """One generation, or the fault that is due."""
        model = self.model
        with model.lock:
            model.requests += 1
            at = model.requests
        if model.tree_too_small():
            die("RuntimeError: selected index k out of range")
        if "refuse" in model.faults:
            self.answer(400, {"error": {"message": "refused, as RAYTUNE_FAKE asks"}})
        elif "error" in model.faults and at % int(model.faults["error"]) == 0:
            self.answer(500, {"error": {"message": "broken, as RAYTUNE_FAKE asks"}})
        elif body.get("stream"):
            self.stream(body, drop=at % int(model.faults.get("drop") or 1 << 30) == 0)
        else:
            *_, last = self.states(body)
            self.answer(200, last)

    def stream(self, body, *, drop):
        """Server-sent events."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for state in self.states(body):
            self.event(json.dumps(state, separators=(",", ":")))
            if drop:
                self.close_connection = True
                return
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text):
        """One event, as one chunk of the body."""
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def states(self, body):
        """What each chunk of the answer says: everything so far."""
        prompt = body.get("text") or str(body.get("input_ids"))
        count = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        kind = next((fault for fault in ("garble", "loop") if fault in self.model.faults and self.model.steps), "")
        started, ids, done, accepted = time.monotonic(), fake_tokens.words(prompt, count, kind), 1, []
        meta = {
            "id": fake_tokens.digest(prompt + str(started)).hex(),
            "finish_reason": None,
            "prompt_tokens": len(prompt.split()),
        }
        meta |= {"weight_version": "default", "cached_tokens": 0}
        most = 0 if "reject" in self.model.faults else 1 << 30
        pending = list(fake_tokens.rounds(prompt, count, self.model.steps, most))
        while pending:
            self.model.chunk()
            yield fake_tokens.state(ids[:done], meta)
            accepted.append(pending.pop(0))
            done += accepted[-1] + 1
        self.model.chunk()
        meta["finish_reason"] = {"type": "length", "length": count}
        meta["e2e_latency"] = time.monotonic() - started
        if self.model.args.speculative_algorithm:
            meta |= fake_tokens.speculative(
                accepted, count, self.model.steps, self.model.args.speculative_num_draft_tokens
            )
        say(f"Decode batch, #running-req: 1, #token: {count}, gen throughput (token/s): 100.00, #queue-req: 0")
        yield fake_tokens.state(ids, meta)


def load(kind):
    """What SGLang says when it loads a model."""
    say("Load weight begin. avail mem=20.02 GB")
    say(f"Load weight end. elapsed=0.03 s, type={kind}, avail mem=20.02 GB, mem usage=0.00 GB.")


def before_port(asked, args):
    """Faults of a start."""
    draft = args.speculative_draft_model_path
    if draft and "missing_draft" in asked:
        sys.stdout.write(f"OSError: {draft} is not a local folder and is not a valid model identifier listed on\n")
        sys.stdout.flush()
        os._exit(1)
    if "exit" in asked:
        file, _, code = asked["exit"].partition(":")
        sys.stdout.write(Path(file).read_text())
        sys.stdout.flush()
        os._exit(int(code or 1))
    if "ignore_sigterm" in asked or "take_port" in asked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "hang" in asked:
        time.sleep(600)
    load("LlamaForCausalLM")
    if args.speculative_algorithm:
        load(asked.get("draft_class", "LlamaForCausalLMEagle3"))
    if "take_port" in asked:
        say("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use")
    if "take_port" in asked or "stall" in asked:
        time.sleep(600)
    if "grandchildren" in asked:
        subprocess.Popen([sys.executable, "-c", SLEEP])
        subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
        subprocess.Popen([sys.executable, "-c", DAEMON])


def chatter(kilobytes):
    """A log that goes on."""
    while True:
        say("still starting" + 1000 * kilobytes * ".")
        time.sleep(0.1)


def main():
    """Serve until killed."""
    asked, args = faults(), arguments(sys.argv[1:])
    say(f"server_args={vars(args)}")
    before_port(asked, args)
    scheduler = subprocess.Popen(["sglang::scheduler", "-c", SLEEP], executable=sys.executable)
    Handler.model = Model(args, asked, scheduler)
    ThreadingHTTPServer.request_queue_size = 256  # all streams may connect at once
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    if "never_ready" in asked:
        threading.Thread(target=chatter, args=[int(asked["never_ready"] or 0)], daemon=True).start()
    else:
        sys.stdout.write(Path(asked["say"]).read_text() if "say" in asked else "")
        say("The server is fired up and ready to roll!")
    server.serve_forever()


if __name__ == "__main__":
    main()
