"""An agent that takes time: it makes model calls until its work is done. Needs nothing but a Python interpreter.

    python -I -S emulation_harness.py

Its task says how many seconds each member of the group lasts (`seconds`), how long a token takes at the emulated engines
(`token_s`) and about how long a call should take (`call_s`). What the launch took since the task file was written counts
as work done, as it does in a recorded duration; delays of later calls do not. The conversation grows with every
call. It leaves "tokens given, tokens wanted" in tokens.txt.
"""

import json
import os
import socket
import sys
import time

ANSWER_S = 600


def main():
    with open(os.environ["GYRE_TASK_FILE"]) as file:
        task = json.load(file)
    host, _, path = os.environ["GYRE_BASE_URL"].removeprefix("http://").partition("/")
    seconds = task["seconds"][int(path.rpartition("-")[2])]
    left = seconds - (time.time() - os.stat(os.environ["GYRE_TASK_FILE"]).st_mtime)
    wanted = max(round(left / task["token_s"]), 1)
    calls = min(max(round(seconds / task["call_s"]), 1), wanted)
    messages, given = [], 0
    for call in range(calls):
        messages.append({"role": "user", "content": f"{task['prompt']} Part {call + 1} of {calls}."})
        tokens = wanted * (call + 1) // calls - wanted * call // calls
        answer = ask(host, f"/{path}/v1/chat/completions", {"messages": messages, "max_tokens": tokens})
        messages.append(answer["choices"][0]["message"])
        given += answer["usage"]["completion_tokens"]
    with open("tokens.txt", "w") as file:
        file.write(f"{given} {wanted}")


def ask(host, path, body):
    """One POST on a connection of its own: http.client costs more to import than everything else here."""
    content = json.dumps({"model": "emulated", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {os.environ['GYRE_API_KEY']}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    name, port = host.split(":")
    with socket.create_connection((name, int(port)), ANSWER_S) as connection:
        connection.sendall(head.encode() + content)
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    status, _, answer = data.partition(b"\r\n\r\n")
    if b" 200 " not in status.split(b"\r\n")[0]:
        sys.exit(f"{path} answered {data[:300]!r}")
    return json.loads(answer)


if __name__ == "__main__":
    main()
