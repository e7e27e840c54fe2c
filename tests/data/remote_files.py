"""What the tests of files behind URLs share: a corpus, and its texts."""

import json

CONTENT = b"".join(json.dumps({"text": f"text {n} " * 9}).encode() + b"\n" for n in range(60))
TEXTS = [json.loads(line)["text"].encode() for line in CONTENT.splitlines()]
